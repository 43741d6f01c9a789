"""quantize in programs for the GPUs there are."""

from __future__ import annotations

import functools

import jax
import pytest

from triax import moe
from triax.emitting import reading
from triax.errors import UnsupportedError

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


def kernels(shape, dtype, **how):
    """The PTX of its calls."""
    array = jax.ShapeDtypeStruct(shape, "bfloat16")
    traced = jax.jit(functools.partial(moe.quantize, dtype=dtype, **how)).trace(array)
    program = traced.lower(lowering_platforms=("cuda",))
    return [call.ptx[0] for call in reading.triton_calls(program)]


@pytest.mark.sampled(1, 1)
@pytest.mark.cuda_plugin
@pytest.mark.parametrize(
    ("shape", "block", "transposed"),
    [
        ((100, 7168), (1, None), False),
        ((100, 16384), (1, None), False),
        ((100, 7168), (1, 128), False),
        ((4, 512, 256), (1, None, 1), True),
        ((4, 512, 256), (1, 128, 128), True),
    ],
)
def test_cuda_gets_one_kernel_that_moves_16_bytes(monkeypatch, shape, block, transposed):
    monkeypatch.setenv("TRIAX_CUDA_ARCH", "90")
    (ptx,) = kernels(shape, E4M3, block=block, transposed=transposed)
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx


@pytest.mark.cuda_plugin
def test_other_blocks_take_plain_jax():
    assert kernels((100, 300), E4M3, block=(1, 100)) == []


@pytest.mark.cuda_plugin
def test_a_gpu_that_does_not_round_to_8_bits_takes_plain_jax(monkeypatch):
    """Triton would round to float16 first, and then again."""
    monkeypatch.setenv("TRIAX_CUDA_ARCH", "80")
    for dtype in (E4M3, E5M2):
        assert kernels((100, 256), dtype, block=(1, 128)) == []
        with pytest.raises(UnsupportedError, match=f"capability 80 do not round to {dtype}"):
            kernels((100, 256), dtype, block=(1, 128), implementation="triton")
    assert len(kernels((100, 256), "int8", block=(1, 128))) == 1


@pytest.mark.sampled(1, 1)
@pytest.mark.cuda_plugin
@pytest.mark.parametrize(("block", "transposed"), [((1, 1, None), False), ((1, None, 1), True)])
def test_products_are_rounded_before_they_are_rounded_to_integers(monkeypatch, block, transposed):
    """ptxas makes one operation of a multiplication and an addition, unless both say `.rn`."""
    monkeypatch.setenv("TRIAX_CUDA_ARCH", "90")
    (ptx,) = kernels((4, 512, 256), "int8", block=block, transposed=transposed)
    assert "add.rn.f32" in ptx
    assert "mul.rn.f32" in ptx
    for fused in ("fma.rn.f32", "add.f32", "mul.f32"):
        assert fused not in ptx
