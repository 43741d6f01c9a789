"""ragged_dot in programs for the GPUs there are."""

from __future__ import annotations

import jax
import pytest

from triax import moe
from triax.compat import jax_private, triton_proto
from triax.emitting import reading


def lowered_text(*args):
    return lowered(*args).as_text()


def lowered(platform, num_rows=400, depth=64, columns=96, dtype="bfloat16"):
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
        out, pull = jax.vjp(lambda x, w: moe.ragged_dot(x, w, sizes), x, w)
        return out, pull(gradient)

    traced = jax.jit(value_and_gradient).trace(*types)
    return traced.lower(lowering_platforms=(platform,))


@pytest.mark.cuda_plugin
@pytest.mark.parametrize(
    ("arch", "dtype", "num_rows", "widths"),
    [
        (80, "bfloat16", 40, (512, 1024)),
        (80, "float32", 4000, (33, 21)),
        (89, "bfloat16", 4000, (512, 1024)),
        (90, "float32", 40, (512, 1024)),
        (90, "bfloat16", 4000, (512, 1024)),
        (90, "bfloat16", 4000, (33, 21)),
        (100, "float32", 4000, (512, 1024)),
    ],
)
def test_cuda_gets_kernels_alone(monkeypatch, arch, dtype, num_rows, widths):
    monkeypatch.setenv("TRIAX_CUDA_ARCH", str(arch))
    text = lowered_text("cuda", num_rows, *widths, dtype)
    # Three products, and the schedule of each.
    assert text.count("@triton_kernel_call") == 6
    for other in ("dot_general", "gather", "transpose", "callback"):
        assert f"stablehlo.{other}" not in text


@pytest.mark.cuda_plugin
@pytest.mark.parametrize(("arch", "num_rows"), [(80, 200), (90, 4000), (100, 200)])
def test_tf32_compiles(monkeypatch, arch, num_rows):
    monkeypatch.setenv("TRIAX_CUDA_ARCH", str(arch))
    with jax.default_matmul_precision("tensorfloat32"):
        assert "triton_kernel_call" in lowered_text("cuda", num_rows, 512, 1024, "float32")


@pytest.mark.cuda_plugin
def test_descriptors_where_the_gpu_and_jaxlib_have_them(monkeypatch):
    ptx = {}
    for arch in (80, 90):
        monkeypatch.setenv("TRIAX_CUDA_ARCH", str(arch))
        calls = reading.triton_calls(lowered("cuda", 4000))
        ptx[arch] = [triton_proto.decode(call.opaque).calls[0].ptx for call in calls]
    assert not any("cp.async.bulk.tensor" in text for text in ptx[80])
    uses = sum("cp.async.bulk.tensor" in text for text in ptx[90])
    assert uses == (3 if jax_private.supports_tensor_maps() else 0)
    assert sum("wgmma" in text for text in ptx[90]) == 3
