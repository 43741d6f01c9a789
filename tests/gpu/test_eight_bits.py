"""Products and layers in 8 bits on a GPU, against float64 of the quantized numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.gpu.test_ragged_dot import spans
from triax import moe
from triax.moe.quantization.scaled import ScaledArray
from triax.testing import assert_same_bits, poison

pytestmark = pytest.mark.gpu

FAST = "ANY_F8_ANY_F8_F32_FAST_ACCUM"
SIZES = {
    "uneven": [0, 1, 700, 63, 64, 65, 1500, 300],
    "few": [3, 0, 20, 17, 33, 1, 0, 9],
    "wrong": [-5, 900, 2**31 - 1, 40, -(2**31), 7, 0, 2**31 - 1],
}
BLOCKS = {"rows": ((1, None), (1, None, 1)), "blocks": ((1, 128), (1, 128, 128))}
DEPTH, COLUMNS = 1072, 656  # partial blocks and tiles


def draw(num_rows):
    keys = jax.random.split(jax.random.key(0))
    rows = (
        jax.random.normal(keys[0], (num_rows, DEPTH)) * jnp.exp(jnp.arange(num_rows) % 7)[:, None]
    )
    weights = jax.random.normal(keys[1], (8, DEPTH, COLUMNS)) * DEPTH**-0.5
    return rows.astype("bfloat16"), weights.astype("bfloat16")


def product(rows, weights, sizes):
    x = np.asarray(rows.dequantize() if isinstance(rows, ScaledArray) else rows, np.float64)
    w = np.asarray(weights.dequantize(), np.float64)
    out = np.zeros((len(x), COLUMNS))
    for group, span in enumerate(spans(sizes, len(x))):
        out[span] = x[span] @ w[group]
    return out


def error(found, wanted):
    found = np.asarray(found, np.float64)
    assert np.all(np.isfinite(found))
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


@pytest.mark.parametrize("dtypes", [("float8_e4m3fn",) * 2, ("float8_e5m2", "float8_e4m3fn")])
@pytest.mark.parametrize(
    ("scaling", "precision"), [("rows", FAST), ("rows", None), ("blocks", None)]
)
@pytest.mark.parametrize("sizes", SIZES)
def test_products(sizes, scaling, precision, dtypes):
    sizes = SIZES[sizes]
    num_rows = 100 if sum(sizes) == 83 else 3072
    x, w = draw(num_rows)
    rows = moe.quantize(x, dtypes[0], block=BLOCKS[scaling][0])
    weights = moe.quantize(w, dtypes[1], block=BLOCKS[scaling][1], transposed=True)
    given = jnp.asarray(np.array(sizes, np.int64).astype(np.int32))
    past = sum(max(size, 0) for size in sizes)
    if past < num_rows:  # what no group has may be anything
        rows = ScaledArray(rows.values, rows.scales.at[past:].set(jnp.nan), rows.block)
    wanted = product(moe.quantize(x, dtypes[0], block=BLOCKS[scaling][0]), weights, sizes)
    poison(4 * wanted.nbytes)
    run = jax.jit(
        lambda rows: moe.ragged_dot(
            rows, weights, given, precision=precision, preferred_element_type="float32"
        )
    )
    first = run(rows)
    assert error(first, wanted) < (3e-3 if precision == FAST else 5e-4)
    assert not np.any(first[past:])
    for _ in range(20):
        assert_same_bits(run(rows), first)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize(
    ("scaling", "transposed"), [("rows", True), ("rows", False), ("blocks", True)]
)
@pytest.mark.parametrize("sizes", SIZES)
def test_weights_alone(sizes, scaling, transposed, dtype):
    sizes = SIZES[sizes]
    x, w = draw(100 if sum(sizes) == 83 else 3072)
    weights = moe.quantize(w, dtype, block=BLOCKS[scaling][1], transposed=transposed)
    given = jnp.asarray(np.array(sizes, np.int64).astype(np.int32))

    @jax.jit
    def run(x):
        out, pull = jax.vjp(lambda x: moe.ragged_dot(x, weights, given), x)
        return out, *pull(out)

    out, d_x = run(x)
    wanted = product(x, weights, sizes)
    assert error(out, wanted) < 5e-3
    w = np.swapaxes(np.asarray(weights.dequantize(), np.float64), 1, 2)
    back = np.zeros(x.shape)
    for group, span in enumerate(spans(sizes, len(x))):
        back[span] = np.asarray(out[span], np.float64) @ w[group]
    assert error(d_x, back) < 5e-3


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("num_rows", [16, 256, 512, 2048, 32768])
def test_all_weights_are_widened_exactly(num_rows, dtype):
    """Whatever tiles the rows of a group take; what is not finite is none of its row's numbers."""
    codes = jax.lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8), dtype)
    codes = jnp.where(jnp.isfinite(codes.astype("float32")), codes.astype("float32"), 0)
    each = (jnp.arange(256)[:, None] + jnp.arange(256)) % 256
    values = jnp.broadcast_to(codes[each].astype(dtype), (8, 256, 256))
    scales = jnp.ones((8, 256, 1), "float32")
    rows = jnp.tile(jnp.eye(256, dtype="bfloat16"), (num_rows // 256 + 1, 1))[:num_rows]
    sizes = jnp.full(8, num_rows // 8, "int32")
    multiply = jax.jit(lambda values: moe.ragged_dot(rows, scaled(values), sizes))
    scaled = lambda values: ScaledArray(values, scales, (1, 1, 256), True)
    wanted = jnp.tile(codes[each].T, (num_rows // 256 + 1, 1))[:num_rows]
    np.testing.assert_array_equal(np.asarray(multiply(values), np.float32), wanted)
    if dtype != "int8":
        out = np.asarray(multiply(values.at[3, 5, 7].set(jnp.nan)), np.float32)
        rows_of_it = slice(3 * num_rows // 8, 4 * num_rows // 8)
        assert np.isnan(out[rows_of_it, 5]).all()
        assert np.isnan(out).sum() == num_rows // 8


@pytest.mark.parametrize("recipe", ["rows", "blocks"])
def test_the_layer(recipe):
    """The kernels against plain JAX: both quantize to the same bits."""
    keys = jax.random.split(jax.random.key(1), 4)
    shapes = (500, 256), (500, 8), (8, 256, 384), (8, 192, 256)
    given = [
        jax.random.normal(k, s) / (1 if len(s) == 2 else 14)
        for k, s in zip(keys, shapes, strict=True)
    ]
    given = [a.astype("float32" if i == 1 else "bfloat16") for i, a in enumerate(given)]

    def run(implementation):
        def tokens(*given):
            how = {"top_k": 2, "normalize": True, "implementation": implementation}
            return moe.feed_forward(*given, recipe=recipe, **how).tokens

        out, pull = jax.vjp(tokens, *given)
        return out, *pull(given[0])

    for found, wanted in zip(jax.jit(lambda: run("triton"))(), run("xla"), strict=True):
        assert error(found, np.asarray(wanted, np.float64)) < 1e-2
