"""Products of scaled arrays: what is refused, and how tensor cores and plain JAX multiply."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from triax import moe
from triax.errors import DifferentiationError
from triax.moe.quantization.scaled import ScaledArray

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
SIZES = np.array([20, 0, 37, -3, 30], np.int32)
ROWS, DEPTH, COLUMNS = 96, 304, 144  # blocks of 128 and 64 are partial
FAST = "ANY_F8_ANY_F8_F32_FAST_ACCUM"


def scaled(seed, shape, block, dtype, transposed=False):
    """Random values of a shape, and scales of many sizes; `block` is that of the array."""
    rng = np.random.default_rng(seed)
    stored = (block[0], *block[:0:-1]) if transposed else block
    count = tuple(-(-size // of) for size, of in zip(shape, stored, strict=True))
    values = rng.standard_normal(shape, np.float32) * (20 if dtype == "int8" else 1)
    scales = 2 ** rng.uniform(-3, 3, count)
    values = jnp.asarray(values.astype(jnp.dtype(dtype)))
    return ScaledArray(values, jnp.asarray(scales.astype(np.float32)), block, transposed)


def rows_of(block, dtype=E4M3, seed=0):
    return scaled(seed, (ROWS, DEPTH), (1, block), dtype)


def weights_of(depth, columns, transposed, dtype=E4M3):
    shape = (DEPTH, COLUMNS)[:: -1 if transposed else 1]
    return scaled(1, (len(SIZES), *shape), (1, depth, columns), dtype, transposed)


WAYS = {
    "rows and columns": (rows_of(DEPTH), weights_of(DEPTH, 1, True)),
    "blocks": (rows_of(128), weights_of(128, 128, True)),
}


@pytest.mark.parametrize("way", ["rows and columns", "blocks"])
def test_no_derivative(way):
    rows, weights = WAYS[way]

    def loss(scales):
        given = ScaledArray(rows.values, scales, rows.block)
        return jnp.sum(moe.ragged_dot(given, weights, SIZES).astype("float32"))

    with pytest.raises(DifferentiationError, match="by numbers of float8_e4m3fn"):
        jax.grad(loss)(rows.scales)

    def of_weights(scales):
        given = ScaledArray(weights.values, scales, weights.block, True)
        return jnp.sum(moe.ragged_dot(jnp.ones((ROWS, DEPTH)), given, SIZES))

    with pytest.raises(DifferentiationError, match="by numbers of float8_e4m3fn"):
        jax.grad(of_weights)(weights.scales)


@pytest.mark.parametrize("block", [(1, 1, None), (1, None, 1)])
def test_scales_of_columns_are_not_those_of_the_depth(block):
    """Square weights, where both have the same shape."""
    weights = moe.quantize(jnp.ones((5, 64, 64)), block=block)
    with pytest.raises(ValueError, match="`weights` must have scales of blocks"):
        moe.ragged_dot(jnp.ones((8, 64)), weights, SIZES, transpose_weights=block[1] is None)


MISTAKES = {
    "odd blocks of rows": (rows_of(48), WAYS["blocks"][1], {}, "`rows` must have scales of blocks"),
    "rows share scales": (
        scaled(0, (ROWS, DEPTH), (2, DEPTH), E4M3),
        WAYS["blocks"][1],
        {},
        "`rows` must have scales of blocks",
    ),
    "odd blocks of weights": (
        WAYS["blocks"][0],
        weights_of(48, 48, True),
        {},
        "`weights` must have scales of blocks",
    ),
    "rows alone": (WAYS["blocks"][0], jnp.ones((5, DEPTH, 8)), {}, "must both be floats"),
    "integers as rows": (
        jnp.ones((ROWS, DEPTH), jnp.int32),
        WAYS["blocks"][1],
        {},
        "`rows` must be floats of 16 bits or more",
    ),
    "another depth": (
        rows_of(128),
        scaled(0, (5, COLUMNS, DEPTH + 1), (1, DEPTH + 1, 1), E4M3, True),
        {},
        "must have the depth of `rows`",
    ),
}


@pytest.mark.parametrize(("rows", "weights", "how", "match"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(rows, weights, how, match):
    with pytest.raises((TypeError, ValueError), match=match):
        moe.ragged_dot(rows, weights, SIZES, **how)


@pytest.mark.sampled(0, 2)
@pytest.mark.cuda_plugin
@pytest.mark.parametrize("way", ["rows and columns", "blocks"])
@pytest.mark.parametrize("precision", [None, FAST])
def test_tensor_cores_of_8_bits(monkeypatch, way, precision):
    """Without a transpose, and with sums as they are asked for."""
    from tests.moe.products.test_programs import kernels

    monkeypatch.setenv("TRIAX_CUDA_ARCH", "90")
    depth = {"rows and columns": 512, "blocks": 128}[way]
    columns = {"rows and columns": 1, "blocks": 128}[way]
    shape = jax.ShapeDtypeStruct
    rows = ScaledArray(shape((4096, 512), E4M3), shape((4096, 512 // depth), "float32"), (1, depth))
    blocks = 512 // depth, 256 // columns
    weights = ScaledArray(
        shape((4, 256, 512), E4M3), shape((4, *blocks[::-1]), "float32"), (1, depth, columns), True
    )
    multiply = functools.partial(moe.ragged_dot, precision=precision)
    traced = jax.jit(multiply).trace(rows, weights, shape((4,), "int32"))
    ptx = kernels(traced.lower(lowering_platforms=("cuda",)))[1]
    assert re.search(r"wgmma.mma_async\S*e4m3.e4m3", ptx)
    assert ("add.f32" in ptx or "fma.rn.f32" in ptx) == (precision is None or way == "blocks")


def test_products_of_blocks_are_exact_in_plain_jax():
    """Where the platform would multiply float32 in fewer bits by default, as GPUs and TPUs do."""
    product = functools.partial(moe.ragged_dot, implementation="xla")
    program = jax.jit(product).lower(rows_of(128), weights_of(128, 128, False), SIZES)
    assert "precision = [HIGHEST, HIGHEST]" in program.as_text()


@pytest.mark.slow("many programs for one rule")
def test_plain_jax_has_no_fast_sums():
    """Their name is one of tensor cores, which other platforms refuse."""
    rows, weights = (array.values for array in (rows_of(DEPTH), weights_of(DEPTH, COLUMNS, False)))
    multiply = functools.partial(moe.ragged_dot, preferred_element_type="float32")
    fast = multiply(rows, weights, SIZES, precision=FAST, implementation="xla")
    np.testing.assert_array_equal(fast, multiply(rows, weights, SIZES, implementation="xla"))
