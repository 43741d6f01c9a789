"""ragged_dot in programs for the GPUs there are."""

from __future__ import annotations

import jax
import pytest

from triax import moe
from triax.compat import jax_private, triton_proto
from triax.emitting import reading

WIDE = (512, 1024)  # rows that descriptors can address


def lowered(num_rows, depth, columns, dtype, precision=None):
    types = [
        jax.ShapeDtypeStruct(shape, kind)
        for shape, kind in [
            ((num_rows, depth), dtype),
            ((5, depth, columns), dtype),
            ((5,), "int32"),
            ((num_rows, columns), dtype),
        ]
    ]

    def value_and_gradient(x, w, sizes, gradient):
        with jax.default_matmul_precision(precision):
            out, pull = jax.vjp(lambda x, w: moe.ragged_dot(x, w, sizes), x, w)
        return out, pull(gradient)

    traced = jax.jit(value_and_gradient).trace(*types)
    return traced.lower(lowering_platforms=("cuda",))


def kernels(program):
    """The PTX of its calls."""
    return [triton_proto.decode(call.opaque).calls[0].ptx for call in reading.triton_calls(program)]


SLOW = pytest.mark.slow("Triton is the same, and most of its time is Triton's")


@pytest.mark.cuda_plugin
@pytest.mark.parametrize(
    ("arch", "dtype", "num_rows", "widths"),
    [
        pytest.param(80, "bfloat16", 40, WIDE, marks=SLOW),
        pytest.param(80, "float32", 4000, (33, 21), marks=SLOW),
        pytest.param(89, "bfloat16", 4000, WIDE, marks=SLOW),
        pytest.param(90, "float32", 40, WIDE, marks=SLOW),
        (90, "bfloat16", 4000, WIDE),
        pytest.param(90, "bfloat16", 4000, (33, 21), marks=SLOW),
        pytest.param(100, "float32", 4000, WIDE, marks=SLOW),
    ],
)
def test_cuda_gets_kernels_alone(monkeypatch, arch, dtype, num_rows, widths):
    monkeypatch.setenv("TRIAX_CUDA_ARCH", str(arch))
    program = lowered(num_rows, *widths, dtype)
    text = program.as_text()
    for other in ("dot_general", "gather", "transpose", "callback"):
        assert f"stablehlo.{other}" not in text
    ptx = kernels(program)
    assert sum("tf32" in text for text in ptx) == 0
    assert len(ptx) == 6  # three products, and the schedule of each
    descriptors = arch >= 90 and widths == WIDE and jax_private.supports_tensor_maps()
    assert sum("cp.async.bulk.tensor" in text for text in ptx) == (3 if descriptors else 0)
    if arch == 90 and dtype == "bfloat16" and num_rows == 4000:
        assert sum("wgmma" in text for text in ptx) == 3


@SLOW
@pytest.mark.cuda_plugin
@pytest.mark.parametrize(("arch", "num_rows"), [(80, 200), (90, 4000), (100, 200)])
def test_tf32_where_it_is_asked_for(monkeypatch, arch, num_rows):
    """Also in the gradients, which are traced where nothing asks for it."""
    monkeypatch.setenv("TRIAX_CUDA_ARCH", str(arch))
    ptx = kernels(lowered(num_rows, *WIDE, "float32", precision="tensorfloat32"))
    assert sum("tf32" in text for text in ptx) == 3
