"""ragged_dot in numbers: of biases, and dtypes that kernels do not take; the rest is in case.py."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from triax import moe
from triax.testing import assert_same_bits

PATHS = ["interpret", "xla"]


@pytest.mark.parametrize("implementation", PATHS)
def test_bias(implementation):
    """None in rows past the groups."""
    x, w, sizes = jnp.zeros((4, 16)), jnp.zeros((2, 16, 3)), jnp.array([1, 2])
    weights = jnp.array([1, 2, 3, jnp.nan])

    def run(bias, weights):
        how = {"bias": bias, "bias_weights": weights, "implementation": implementation}
        return moe.ragged_dot(x, w, sizes, **how)

    bias = jnp.array([[1, 2, 3], [4, 5, 6]], jnp.bfloat16)
    out, pull = jax.vjp(run, bias, weights)
    np.testing.assert_array_equal(out, [[1, 2, 3], [8, 10, 12], [12, 15, 18], [0, 0, 0]])
    d_bias, d_weights = pull(jnp.ones((4, 3)).at[3].set(jnp.nan))
    assert d_bias.dtype == jnp.bfloat16
    np.testing.assert_array_equal(d_bias, [[1, 1, 1], [5, 5, 5]])
    np.testing.assert_array_equal(d_weights, [6, 15, 15, 0])


@pytest.mark.parametrize("implementation", PATHS)
def test_eight_bits_by_default_stay_eight(implementation):
    """Sums past the largest number of 8 bits become what JAX's cast makes of them."""
    rows = np.full((32, 64), 4.0, jnp.float8_e4m3fn)
    weights = np.full((1, 64, 16), 4.0, jnp.float8_e4m3fn)
    out = moe.ragged_dot(rows, weights, np.array([31]), implementation=implementation)
    expected = jnp.full((32, 16), 1024.0).astype(jnp.float8_e4m3fn).at[31:].set(0)
    assert_same_bits(out, expected)
    empty = moe.ragged_dot(rows[:0], weights, np.array([31]), implementation=implementation)
    assert_same_bits(empty, expected[:0])


@pytest.mark.parametrize("implementation", PATHS)
def test_operands_of_two_dtypes_are_multiplied_in_the_wider(implementation):
    x, w, sizes = jnp.ones((5, 64), "bfloat16"), jnp.full((1, 64, 3), 1.01), np.array([4])
    with pytest.warns(UserWarning, match="in float32"):
        mixed = moe.ragged_dot(x, w, sizes, implementation=implementation)
    assert mixed.dtype == jnp.float32
    np.testing.assert_allclose(mixed, np.full((5, 3), 64.64) * (np.arange(5) < 4)[:, None], 1e-6)


@pytest.mark.parametrize(
    ("rows_dtype", "weights_dtype", "result"),
    [
        ("int32", "int32", None),
        ("int8", "int8", "int32"),
        ("uint8", "int8", "float32"),
        ("int4", "int4", "int32"),
    ],
)
def test_integers_take_plain_jax(rows_dtype, weights_dtype, result):
    rows = jnp.arange(12).reshape(6, 2).astype(rows_dtype)
    weights = jnp.arange(100, 112).reshape(2, 2, 3).astype(weights_dtype)
    out = moe.ragged_dot(rows, weights, jnp.array([2, 3]), preferred_element_type=result)
    x, w = (np.asarray(array).astype(int) for array in (rows, weights))
    expected = np.zeros((6, 3), int)
    expected[:2] = x[:2] @ w[0]
    expected[2:5] = x[2:5] @ w[1]
    assert out.dtype == (result or rows_dtype)
    np.testing.assert_array_equal(out, expected)


def test_sums_of_8_bit_integers_are_exact():
    """Of more than 2**24, where float32 is not; scaled where they are floats."""
    rows, weights = np.full((3, 4096), 127, np.int8), np.full((1, 4096, 2), 127, np.int8)
    weights[:, 0] = 126
    total = 127 * 127 * 4096 - 127
    scales, sizes = np.float32([[1], [2], [0.5]]), np.array([3])
    product = moe.ragged_dot(rows, weights, sizes, preferred_element_type="int32")
    np.testing.assert_array_equal(product, np.full((3, 2), total))
    rows = moe.ScaledArray(rows, scales, (1, None))
    weights = moe.ScaledArray(weights, scales[1:2, None], (1, None, None))
    scaled = moe.ragged_dot(rows, weights, sizes, preferred_element_type="float32")
    np.testing.assert_array_equal(scaled, np.float32(total) * 2 * scales * np.ones((1, 2), "f"))
