"""Weights that are dequantized in memory: the bits that plain JAX gives."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.moe.products.test_few_rows_packed import WAYS, weights_of
from triax import moe
from triax.moe.products import few_rows
from triax.moe.quantization.scaled import num_blocks
from triax.moe.shared.target import for_target
from triax.testing import assert_same_bits, checked

MORE = {
    "zeros are floats": ("int4", (64, 1), "float32", np.float32),
    "blocks of 16": ("int4", (16, 1), "float32", None),
}


def widened(weights, dtype, implementation="interpret"):
    """By the kernel, as `ragged_dot` calls it."""

    def run(target, weights, implementation):
        return few_rows.widen(target, weights, dtype, implementation=implementation).values

    shape = *weights.shape[:-2], *weights.shape[:-3:-1]
    out_type = jax.ShapeDtypeStruct(shape, dtype)
    return for_target(run, weights, out_type=out_type, implementation=implementation)


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize("way", [*WAYS, *MORE])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("tiled", [False, True])
def test_the_bits_of_plain_jax(tiled, dtype, way):
    columns, depth = (192, 320) if tiled else (176, 352)
    weights = weights_of(3, *(WAYS | MORE)[way], columns, depth)
    given = weights.tile() if tiled else weights
    with checked():
        found = jax.jit(lambda w: widened(w, dtype))(given)
    assert_same_bits(found, jnp.swapaxes(weights.dequantize(dtype), 1, 2))


@pytest.mark.sampled(1, 4)
@pytest.mark.parametrize("numbers", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize(
    ("tiled", "block"),
    [(tiled, block) for tiled in (False, True) for block in ((1, 128, 128), (1, 64, 1))]
    + [(True, (1, None, 1)), (True, (1, None, None))],
)
def test_8_bits_are_those_of_plain_jax(tiled, block, numbers):
    """All codes. Scales of the whole depth stay apart, where blocks have others."""
    columns, depth = (192, 320) if tiled else (176, 352)
    codes = np.resize(np.arange(256, dtype=np.uint8), (3, columns, depth))
    values = codes.view(getattr(ml_dtypes, numbers, numbers))
    sizes = num_blocks((3, depth, columns), block)
    scales = np.random.default_rng(0).uniform(1, 2, (sizes[0], sizes[2], sizes[1]))
    weights = moe.ScaledArray(values, scales.astype(np.float32), block, transposed=True)
    given = weights.tile() if tiled else weights
    with checked():
        found = jax.jit(lambda w: widened(w, "bfloat16"))(given)
    wanted = jnp.swapaxes(weights.dequantize("bfloat16"), 1, 2)
    wanted = jnp.asarray(values).astype("bfloat16") if block[1] is None else wanted
    of_one_sign = lambda of: jnp.where(jnp.isnan(of), jnp.nan, of)
    assert_same_bits(of_one_sign(found), of_one_sign(wanted))


@pytest.mark.parametrize("block", [(1, None, 1), (1, None, None), (1, 64, 1)])
@pytest.mark.parametrize("numbers", ["float8_e4m3fn", "int8", "int4"])
def test_tiles_for_the_gradient_of_rows_have_all_scales(numbers, block, monkeypatch):
    """Bit for bit as in plain JAX, and by a kernel, which does not reorder weights in memory."""
    array = np.random.default_rng(0).standard_normal((2, 192, 128), np.float32)
    weights = moe.quantize(array, numbers, block=block, transposed=True)
    how = {"dtype": jnp.dtype("bfloat16"), "implementation": "interpret"}
    with checked():
        found = few_rows.dequantize_tiles(weights.tile(), **how)
    assert_same_bits(found, jnp.swapaxes(weights.dequantize("bfloat16"), 1, 2))

    def gradient(rows, weights):
        product = lambda rows: moe.ragged_dot(rows, weights, np.array([3, 5]))
        return jax.vjp(product, rows)[1](rows[:, :128])[0]

    monkeypatch.setenv("TRIAX_CUDA_ARCH", "90")
    types = jax.ShapeDtypeStruct((8, 192), "bfloat16"), jax.eval_shape(weights.tile)
    lowered = jax.jit(gradient).trace(*types).lower(lowering_platforms=("cuda",)).as_text()
    assert 'triax.kernel = "widen"' in lowered
    assert "stablehlo.transpose" not in lowered


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize("dtype", ["float4_e2m1fn", "int4"])
def test_all_numbers_times_all_powers_of_two(dtype):
    """In float64; XLA on a CPU takes subnormal numbers for zeros."""
    codes = np.arange(16, dtype=np.uint8)
    values = np.tile(np.repeat(codes[0::2] | codes[1::2] << 4, 2), (256, 1))[None]
    powers = np.arange(256, dtype=np.uint8)[None, :, None]
    weights = moe.ScaledArray(
        values, powers.view(jnp.float8_e8m0fnu), (1, 32, 1), transposed=True, packed=dtype
    )
    ones = dataclasses.replace(weights, scales=np.full_like(powers, 127).view(jnp.float8_e8m0fnu))
    exact = np.swapaxes(np.asarray(ones.dequantize(), np.float64), 1, 2)
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = np.ldexp(exact, powers.astype(np.int32) - 127)
        wanted[:, 255] = np.nan
        wanted = wanted.astype(np.float32)
    np.testing.assert_array_equal(widened(weights, "float32"), wanted)
