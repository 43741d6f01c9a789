"""Which 8-bit products go to the kernel in Gluon."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from tests.moe.products.test_programs import kernels
from triax import moe
from triax.compat import jax_private, versions
from triax.moe.products import sm90_8_bits
from triax.moe.products.operands import Parts
from triax.moe.products.options import Groups, Options
from triax.moe.products.product import RaggedDot
from triax.moe.shared.target import Target

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
HOPPER = Target(compute_capability=90, multiprocessors=132, tensor_maps=True)


def shape(*sizes, dtype=E4M3):
    return jax.ShapeDtypeStruct(sizes, dtype)


BLOCKS, LINES = (128, (1, 128, 128)), (None, (1, None, 1))
FAST = "ANY_F8_ANY_F8_F32_FAST_ACCUM"


def ptx_of(num_rows=4000, dtype=E4M3, blocks=BLOCKS, bias=None, out="bfloat16", precision=None):
    def run(x, w, sizes, *bias):
        rows = moe.quantize(x, dtype, block=(1, blocks[0]))
        weights = moe.quantize(w, block=blocks[1], transposed=True)
        how = {"preferred_element_type": out, "bias": bias[0] if bias else None}
        how["precision"] = precision
        return moe.ragged_dot(rows, weights, sizes, **how)

    arrays = [shape(num_rows, 464, dtype="bfloat16"), shape(2, 464, 400, dtype="bfloat16")]
    arrays += [shape(2, dtype="int32"), *([] if bias is None else [bias])]
    return kernels(jax.jit(run).trace(*arrays).lower(lowering_platforms=("cuda",)))


def takes_turns(ptx):
    return sum("setmaxnreg" in text and "wgmma" in text for text in ptx)


@pytest.mark.cuda_plugin
@pytest.mark.parametrize(
    ("dtype", "out", "blocks"),
    [(E4M3, "bfloat16", BLOCKS), (E5M2, "float32", BLOCKS), (E4M3, "float16", LINES)],
)
def test_it_compiles(monkeypatch, dtype, out, blocks):
    if not jax_private.supports_tensor_maps():
        pytest.skip("this jaxlib encodes no descriptors")
    if not versions.GLUON.passes(versions.installed("triton")):
        pytest.skip(f"needs Triton {versions.GLUON.stable}")
    monkeypatch.setenv("TRIAX_CUDA_ARCH", "90")
    ptx = ptx_of(dtype=dtype, out=out, blocks=blocks)
    assert takes_turns(ptx) == 1
    assert "st.global" not in next(text for text in ptx if takes_turns([text]))


@pytest.mark.slow("many programs for one rule")
@pytest.mark.cuda_plugin
@pytest.mark.parametrize(
    ("arch", "how"),
    [
        (90, {"num_rows": 100}),
        (90, {"blocks": (64, (1, 128, 128))}),
        (90, {"blocks": LINES, "precision": FAST}),
        (90, {"bias": shape(2, 400, dtype="bfloat16")}),
        (100, {}),
    ],
)
def test_others_do_not(monkeypatch, arch, how):
    monkeypatch.setenv("TRIAX_CUDA_ARCH", str(arch))
    assert takes_turns(ptx_of(**how)) == 0


def suits(rows=(4000, 512), weights=(2, 400, 512), precision=None, **how):
    x, w = (
        Parts(shape(*of), how.pop(f"{name}_scales", 0), how.pop(f"{name}_deep", 128), wide)
        for name, of, wide in (("row", rows, None), ("weight", weights, how.pop("wide", 128)))
    )
    given = {"target": HOPPER, "transposed": True, "implementation": None} | how
    groups = Groups(shape(weights[0], dtype="int32"))
    options = Options(jnp.dtype("bfloat16"), precision)
    operands = {"left": x, "right": w, "weights": w.values, "groups": groups}
    return sm90_8_bits.needs(RaggedDot(**operands, options=options, **given)) is None


def test_what_suits(monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda package: "3.6.0")
    assert suits()
    assert suits(rows=(2**28, 512))
    # Offsets of scales and rows of all weights are in 32 bits.
    assert not suits(rows=(2**29, 512))
    assert suits(rows=(2**20, 16), weights=(2**10, 2**20, 16))
    assert not suits(rows=(2**20, 16), weights=(2**10, 2**21, 16))
    assert not suits(rows=(2**20, 2**17), weights=(2**10, 2**18, 2**17))
    assert not suits(implementation="interpret")
    assert not suits(bias=shape(2, 400))
    assert not suits(target=dataclasses.replace(HOPPER, compute_capability=100))
    assert not suits(target=dataclasses.replace(HOPPER, tensor_maps=False))
    assert not suits(rows=(128, 512))  # 64 rows in a group
    assert suits(rows=(130, 512))
    assert not suits(transposed=False)
    assert not suits(rows=(4000, 500))  # rows that begin at no multiple of 16 bytes
    of_lines = {"row_deep": None, "weight_deep": None, "wide": 1}
    assert suits(**of_lines)
    assert not suits(**of_lines, row_scales=None)
    assert not suits(**of_lines, precision=FAST)
    for blocks in ({"row_deep": None}, {"row_deep": 64}, {"wide": 1}):
        assert not suits(**blocks)
    monkeypatch.setattr(versions, "installed", lambda package: "3.5.1")
    assert not suits()
