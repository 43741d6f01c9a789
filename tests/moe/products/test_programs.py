"""ragged_dot in programs for the GPUs there are."""

from __future__ import annotations

import functools
import re

import jax
import pytest

from triax import moe
from triax.compat import jax_private
from triax.emitting import reading
from triax.errors import UnsupportedError

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
    return [call.ptx[0] for call in reading.triton_calls(program)]


SLOW = pytest.mark.slow("Triton is the same, and most of its time is Triton's")


@pytest.mark.sampled(0, 3)
@pytest.mark.cuda_plugin
@pytest.mark.parametrize(
    ("arch", "dtype", "num_rows", "widths"),
    [
        (80, "bfloat16", 40, WIDE),
        (80, "float32", 4000, (33, 21)),
        (89, "bfloat16", 4000, WIDE),
        (90, "float32", 40, WIDE),
        (90, "bfloat16", 4000, WIDE),
        (90, "bfloat16", 4000, (33, 21)),
        (100, "float32", 4000, WIDE),
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


@pytest.mark.slow("compiled for a GPU, to look at its code")
@pytest.mark.cuda_plugin
def test_precision_says_how_float32_is_multiplied(monkeypatch):
    """By name or as JAX's value; "high" is three products of TF32, which add up to float32's."""
    monkeypatch.setenv("TRIAX_CUDA_ARCH", "80")
    types = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((40, 64), (2, 64, 48))]

    def products(precision):
        multiply = functools.partial(moe.ragged_dot, precision=precision)
        sizes = jax.ShapeDtypeStruct((2,), "int32")
        program = jax.jit(multiply).trace(*types, sizes).lower(lowering_platforms=("cuda",))
        return sum(text.count("tf32.tf32") for text in kernels(program))

    with jax.default_matmul_precision("tensorfloat32"):
        assert products(jax.lax.Precision.HIGHEST) == products("float32") == 0
        tf32 = products(None)
    assert products(None) == 0
    assert tf32 == products("tensorfloat32") == products(jax.lax.Precision.DEFAULT) > 0
    assert products(jax.lax.DotAlgorithmPreset.TF32_TF32_F32) == tf32
    assert products(jax.lax.Precision.HIGH) == products("high") == 3 * tf32


E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


def lowered_8_bits(num_rows, depth, dtypes, **options):
    types = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in zip(
            [(num_rows, depth), (2, depth, 48), (2,)], [*dtypes, "int32"], strict=True
        )
    ]
    multiply = functools.partial(moe.ragged_dot, preferred_element_type="float32", **options)
    return jax.jit(multiply).trace(*types).lower(lowering_platforms=("cuda",))


@pytest.mark.sampled(1)
@pytest.mark.cuda_plugin
@pytest.mark.parametrize("depth", [4, 16, pytest.param(48, marks=SLOW)])
def test_eight_bits_of_any_depth_compile(depth):
    """Tensor cores take at least 32 of depth; what is missing is zeros."""
    ptx = kernels(lowered_8_bits(4000, depth, (E4M3, E5M2)))
    assert sum("e4m3.e5m2" in text for text in ptx) == 1


@pytest.mark.slow("many programs for one rule")
@pytest.mark.cuda_plugin
def test_sums_of_eight_bits_are_added_in_float32():
    """Tensor cores keep about 14 bits of a sum: every 128 of depth it is added to a float32 one."""
    (product,) = (
        text for text in kernels(lowered_8_bits(4000, 256, (E4M3, E4M3))) if "wgmma" in text
    )
    assert len(re.findall(r"\badd(\.rn)?\.f32", product)) >= 32


@pytest.mark.sampled(1)
@pytest.mark.cuda_plugin
@pytest.mark.parametrize(
    ("arch", "dtypes", "lacking"),
    [
        (80, (E5M2, E4M3), E4M3),
        (90, ("float8_e4m3fnuz", "float8_e5m2fnuz"), "float8_e4m3fnuz, float8_e5m2fnuz"),
    ],
)
def test_eight_bits_that_a_gpu_lacks_take_plain_jax(monkeypatch, arch, dtypes, lacking):
    monkeypatch.setenv("TRIAX_CUDA_ARCH", str(arch))
    with pytest.warns(UserWarning, match=f"ragged_dot runs in plain JAX, which converts {lacking}"):
        program = lowered_8_bits(40, 64, dtypes)
    assert kernels(program) == []
    assert "stablehlo.dot_general" in program.as_text()
    with pytest.raises(UnsupportedError, match=f"capability {arch} have no {lacking}"):
        lowered_8_bits(40, 64, dtypes, implementation="triton")


@pytest.mark.sampled(0, 1)
@pytest.mark.cuda_plugin
@pytest.mark.parametrize(("arch", "num_rows"), [(80, 200), (90, 4000), (100, 200)])
def test_tf32_where_it_is_asked_for(monkeypatch, arch, num_rows):
    """Also in the gradients, which are traced where nothing asks for it."""
    monkeypatch.setenv("TRIAX_CUDA_ARCH", str(arch))
    ptx = kernels(lowered(num_rows, *WIDE, "float32", precision="tensorfloat32"))
    assert sum("tf32" in text for text in ptx) == 3
