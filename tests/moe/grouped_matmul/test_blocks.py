"""Which 8-bit products with scales of blocks go to the kernel in Gluon."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from tests.moe.grouped_matmul.test_programs import kernels
from triax import moe
from triax.compat import jax_private, versions
from triax.moe.grouped_matmul import blocks
from triax.moe.grouped_matmul.options import Options
from triax.moe.shared.target import Target

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
HOPPER = Target(compute_capability=90, multiprocessors=132, tensor_maps=True)
DEEPSEEK = Options(jnp.dtype("bfloat16"), None, row_block=128, weight_block=(128, 128))


def shape(*sizes, dtype=E4M3):
    return jax.ShapeDtypeStruct(sizes, dtype)


def ptx_of(num_rows=4000, dtype=E4M3, block=128, bias=None, out="bfloat16"):
    def run(x, w, sizes, *bias):
        rows = moe.quantize(x, dtype, block=(1, block))
        weights = moe.quantize(w, block=(1, 128, 128), transposed=True)
        how = {"preferred_element_type": out, "bias": bias[0] if bias else None}
        return moe.ragged_dot(rows, weights, sizes, **how)

    arrays = [shape(num_rows, 464, dtype="bfloat16"), shape(2, 464, 400, dtype="bfloat16")]
    arrays += [shape(2, dtype="int32"), *([] if bias is None else [bias])]
    return kernels(jax.jit(run).trace(*arrays).lower(lowering_platforms=("cuda",)))


def takes_turns(ptx):
    return sum("setmaxnreg" in text and "wgmma" in text for text in ptx)


@pytest.mark.cuda_plugin
@pytest.mark.parametrize(("dtype", "out"), [(E4M3, "bfloat16"), (E5M2, "float32")])
def test_it_compiles(monkeypatch, dtype, out):
    if not jax_private.supports_tensor_maps():
        pytest.skip("this jaxlib encodes no descriptors")
    if not versions.GLUON.passes(versions.installed("triton")):
        pytest.skip(f"needs Triton {versions.GLUON.stable}")
    monkeypatch.setenv("TRIAX_CUDA_ARCH", "90")
    assert takes_turns(ptx_of(dtype=dtype, out=out)) == 1


@pytest.mark.cuda_plugin
@pytest.mark.parametrize(
    ("arch", "how"),
    [
        (90, {"num_rows": 100}),
        (90, {"block": 64}),
        (90, {"bias": shape(2, 400, dtype="bfloat16")}),
        (100, {}),
    ],
)
def test_others_do_not(monkeypatch, arch, how):
    monkeypatch.setenv("TRIAX_CUDA_ARCH", str(arch))
    assert takes_turns(ptx_of(**how)) == 0


def suits(rows=(4000, 512), weights=(2, 400, 512), target=HOPPER, bias=None, **how):
    options = dataclasses.replace(DEEPSEEK, **how.pop("options", {}))
    how = {"transposed": True, "implementation": None} | how
    return blocks.suit(target, shape(*rows), shape(*weights), bias, options=options, **how)


def test_what_suits(monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda package: "3.6.0")
    assert suits()
    assert suits(rows=(2**28, 512))
    # Offsets of scales and rows of all weights are in 32 bits.
    assert not suits(rows=(2**29, 512))
    assert not suits(weights=(2**10, 2**21, 16))
    assert not suits(weights=(2**10, 2**18, 2**17))
    assert not suits(transposed=False)
    assert not suits(implementation="interpret")
    assert not suits(bias=shape(2, 400))
    assert not suits(target=dataclasses.replace(HOPPER, compute_capability=100))
    for options in ({"row_block": None}, {"row_block": 64}, {"weight_block": (1, 128)}):
        assert not suits(options=options)
    monkeypatch.setattr(versions, "installed", lambda package: "3.5.1")
    assert not suits()
