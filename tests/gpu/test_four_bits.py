"""Rows times tiles of 4-bit weights on a GPU, against float64 of the quantized numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.gpu.test_eight_bits import error
from tests.moe.products import oracle
from tests.moe.products.test_few_rows_packed import (
    WAYS,
    all_numbers,
    all_numbers_of_nvfp4,
    is_taken,
    weights_of,
)
from tests.moe.quantization.oracle import exactly
from triax import moe
from triax.testing import assert_same_bits, poison

pytestmark = pytest.mark.gpu

SIZES = {
    "narrow": [3, 0, 17, 1, 0, 9, 2, 2],
    "wide": [60, 0, 65, 64, 1, 130],
    "wider": [200, 0, 129, 255],
    "many": [700, 300],
    "wrong": [-5, 40, 2**31 - 1, 7],
}
ROWS = {"narrow": 40, "wide": 330, "wider": 600, "many": 1000, "wrong": 70}
DEPTH, COLUMNS = 2880, 704  # partial blocks


@pytest.mark.parametrize("dtype", ["float4_e2m1fn", "int4"])
@pytest.mark.parametrize("num_rows", [64, 256, 1024, 4096, 16384])
def test_all_numbers_times_all_powers_of_two(num_rows, dtype):
    """Whatever tiles the rows of a group take."""
    rows, weights, sizes, wanted = all_numbers(num_rows, dtype)
    weights = jax.jit(moe.ScaledArray.tile)(weights)
    multiply = lambda *args: moe.ragged_dot(*args, preferred_element_type="float32")
    np.testing.assert_array_equal(jax.jit(multiply)(rows, weights, sizes), wanted)


@pytest.mark.parametrize("num_rows", [64, 256, 1024, 4096])
def test_all_numbers_times_all_scales_of_e4m3(num_rows):
    *args, wanted = all_numbers_of_nvfp4(num_rows)
    multiply = lambda *args: moe.ragged_dot(*args, preferred_element_type="float32")
    np.testing.assert_array_equal(jax.jit(multiply)(*args), wanted)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sizes", SIZES)
def test_products(sizes, way):
    """And the rows' gradient."""
    num_rows, sizes = ROWS[sizes], np.array(SIZES[sizes], np.int64).astype(np.int32)
    weights = weights_of(len(sizes), *WAYS[way], columns=COLUMNS, depth=DEPTH)
    exact = exactly(weights)
    weights = weights.tile()
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((num_rows, DEPTH), np.float32).astype(jnp.bfloat16)
    past = int(np.minimum(np.maximum(sizes.astype(np.int64), 0).sum(), num_rows))
    rows[past:] = np.nan
    bias = rng.standard_normal((len(sizes), COLUMNS), np.float32).astype(jnp.bfloat16)

    @jax.jit
    def run(rows, weights, sizes):
        out, pull = jax.vjp(lambda rows: moe.ragged_dot(rows, weights, sizes, bias=bias), rows)
        return out, *pull(out)

    assert is_taken(run, rows, weights, sizes) == (num_rows != ROWS["many"])
    poison(4 * num_rows * COLUMNS)
    out, d_rows = first = run(rows, weights, sizes)
    wanted = oracle.ragged_dot(rows, exact, sizes)
    for group, span in enumerate(oracle.spans(sizes, num_rows)):
        wanted[span] += np.float64(bias[group])
    assert error(out, wanted) < 5e-3
    assert not np.any(np.asarray(out)[past:])
    assert error(d_rows, oracle.ragged_dot(out, np.swapaxes(exact, 1, 2), sizes)) < 1e-2
    for _ in range(20):
        jax.tree.map(assert_same_bits, run(rows, weights, sizes), first)
