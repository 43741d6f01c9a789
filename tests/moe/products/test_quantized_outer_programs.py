"""Weights' gradients in 8 bits in programs for the GPUs there are."""

from __future__ import annotations

import re

import jax
import pytest

from triax.compat import jax_private
from triax.emitting import reading
from triax.errors import UnsupportedError
from triax.moe.products.quantized_outer_ops import outer_in_8_bits

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


def lowered(dtypes=(E4M3, E4M3), widths=(512, 1024), dtype="bfloat16", **how):
    shapes = [(4000, width) for width in widths]
    types = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    options = {"result_dtype": dtype, "fast_sums": True, "implementation": None} | how
    run = lambda left, right, sizes: outer_in_8_bits(left, right, sizes, dtypes=dtypes, **options)
    traced = jax.jit(run).trace(*types, jax.ShapeDtypeStruct((5,), "int32"))
    return traced.lower(lowering_platforms=("cuda",))


def kernels(program):
    """The PTX of its calls."""
    return [call.ptx[0] for call in reading.triton_calls(program)]


@pytest.mark.sampled(0, 2)
@pytest.mark.cuda_plugin
@pytest.mark.parametrize(
    ("arch", "fast_sums", "widths"),
    [
        (90, True, (512, 1024)),
        (90, False, (512, 1024)),
        (90, True, (33, 21)),
        (89, True, (512, 1024)),
        (100, True, (512, 1024)),
    ],
)
def test_cuda_gets_kernels_alone(monkeypatch, arch, fast_sums, widths):
    monkeypatch.setenv("TRIAX_CUDA_ARCH", str(arch))
    program = lowered((E4M3, E5M2), widths, fast_sums=fast_sums)
    for other in ("dot_general", "gather", "transpose", "callback"):
        assert f"stablehlo.{other}" not in program.as_text()
    schedule, left, right, product = kernels(program)
    assert ".entry _ragged_dot_schedule" in schedule
    for side, name in ((left, "e4m3x2"), (right, "e5m2x2")):
        assert f"cvt.rn.satfinite.{name}.f32" in side
        if widths == (512, 1024):
            assert "ld.global.v4.b32" in side
            assert "st.global.v4.b32" in side
    assert "e4m3.e5m2" in product or arch == 100
    descriptors = arch >= 90 and jax_private.supports_tensor_maps()
    assert ("cp.async.bulk.tensor" in product) == descriptors
    if arch == 90:
        # Twice before the loop: the loads of the next steps are under way while one is multiplied.
        assert product.count("cp.async.bulk.tensor.2d.shared") == 6 * descriptors
        assert len(set(re.findall(r"wgmma\.mma_async\S+", product))) == 1
        # The sums stay in the tensor cores' registers, or are added to float32 ones.
        assert bool(re.search(r"\badd(\.rn)?\.f32", product)) != fast_sums


@pytest.mark.cuda_plugin
def test_a_gpu_that_does_not_round_to_8_bits_takes_plain_jax(monkeypatch):
    monkeypatch.setenv("TRIAX_CUDA_ARCH", "80")
    program = lowered()
    assert kernels(program) == []
    assert "stablehlo.dot_general" in program.as_text()
    with pytest.raises(UnsupportedError, match=f"capability 80 do not round to {E4M3}"):
        lowered(implementation="triton")
