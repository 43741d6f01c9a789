"""ragged_dot and its gradients against float64, on every path."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.moe.ragged_dot import oracle
from triax import moe
from triax.testing import assert_close, assert_same_bits, checked

PATHS = ["interpret", "xla"]
# Whether descriptors can address the arrays: rows of multiples of 16 bytes.
WIDTHS = {"descriptors": (64, 48), "pointers": (33, 21)}


def as_sizes(sizes):
    return np.array(sizes, np.int64).astype(np.int32)


@functools.partial(jax.jit, static_argnames="implementation")
def _run(rows, weights, sizes, gradient, implementation):
    op = lambda x, w: moe.ragged_dot(x, w, sizes, implementation=implementation)
    out, pull = jax.vjp(op, rows, weights)
    return out, *pull(gradient)


def run(case, sizes, implementation):
    """The product and both gradients, in NumPy."""
    sizes = as_sizes(sizes)
    return map(np.asarray, _run(case.rows, case.weights, sizes, case.gradient, implementation))


@pytest.mark.slow("plain JAX and the interpreter do the same on every Python")
@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize(
    ("sizes", "widths", "dtype"),
    [
        (sizes, widths, oracle.DTYPES[(i + j) % len(oracle.DTYPES)])
        for i, sizes in enumerate(oracle.SIZES)
        for j, widths in enumerate(WIDTHS)
    ],
)
def test_product_and_gradients(implementation, dtype, widths, sizes):
    case = oracle.draw(0, *WIDTHS[widths], dtype)
    sizes = oracle.SIZES[sizes]
    with checked():  # each element is written by one program, and none is read before
        results = run(case, sizes, implementation)
    for actual, expected in zip(results, oracle.all_three(case, sizes), strict=True):
        assert actual.dtype == dtype
        assert_close(actual, expected)


@pytest.mark.slow("plain JAX and the interpreter do the same on every Python")
@pytest.mark.parametrize(
    ("num_rows", "num_groups", "depth", "columns"),
    [(1, 1, 16, 16), (500, 2, 80, 300), (9, 260, 16, 24), (40, 5, 1, 1), (150, 1, 130, 264)],
)
def test_shapes(num_rows, num_groups, depth, columns):
    """Tiles of every size, more groups than the schedule reads at once, more tiles than one."""
    case = oracle.draw(1, depth, columns, "bfloat16", num_rows, num_groups)
    chances = np.full(num_groups, 1 / num_groups)
    sizes = np.random.default_rng(0).multinomial(max(num_rows - 3, 1), chances)
    for actual, expected in zip(
        run(case, sizes, "interpret"), oracle.all_three(case, sizes), strict=True
    ):
        assert_close(actual, expected)


@pytest.mark.parametrize("implementation", PATHS)
def test_rows_past_the_groups_are_zero(implementation):
    case = oracle.draw(2, 64, 48, "float32")
    case.rows[80:] = np.nan
    case.gradient[80:] = np.inf
    out, d_rows, d_weights = run(case, [20, 20, 20, 20], implementation)
    assert_same_bits(out[80:], np.zeros_like(out[80:]))
    assert_same_bits(d_rows[80:], np.zeros_like(d_rows[80:]))
    assert np.all(np.isfinite(d_weights))


@pytest.mark.slow("plain JAX and the interpreter do the same on every Python")
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("group", [1, 2])
def test_nothing_of_a_group_reaches_another(widths, group):
    """NaN in all rows and weights but one group's: that group is as if alone."""
    sizes = [33, 20, 1, 60]
    case = oracle.draw(3, *WIDTHS[widths], "bfloat16")
    expected = oracle.all_three(case, sizes)
    span = list(oracle.spans(sizes, oracle.NUM_ROWS))[group]
    others = np.delete(np.arange(oracle.NUM_ROWS), span)
    case.rows[others] = np.nan
    case.gradient[others] = np.inf
    case.weights[np.arange(4) != group] = np.nan
    out, d_rows, d_weights = run(case, sizes, "interpret")
    assert_close(out[span], expected[0][span])
    assert_close(d_rows[span], expected[1][span])
    assert_close(d_weights[group], expected[2][group])


@pytest.mark.parametrize("implementation", PATHS)
def test_equals_jax(implementation):
    case = oracle.draw(4, 64, 48, "float32")
    sizes = as_sizes([30, 0, 50, 45])
    expected = jax.lax.ragged_dot(case.rows, case.weights, sizes)
    actual = moe.ragged_dot(case.rows, case.weights, sizes, implementation=implementation)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("dtypes", [("float8_e4m3fn",) * 2, ("float8_e4m3fn", "float8_e5m2")])
def test_eight_bits_with_scales(implementation, dtypes):
    case = oracle.draw(5, 64, 48, "float32")
    rows, weights = case.rows.astype(dtypes[0]), case.weights.astype(dtypes[1])
    row_scales = np.linspace(0.5, 2, oracle.NUM_ROWS, dtype=np.float32)
    group_scales = np.array([1.0, 4.0, 0.25, 3.0], np.float32)
    sizes = [30, 0, 50, 20]
    actual = moe.ragged_dot(
        rows,
        weights,
        as_sizes(sizes),
        row_scales=row_scales,
        group_scales=group_scales,
        preferred_element_type=jnp.bfloat16,
        implementation=implementation,
    )
    expected = oracle.ragged_dot(rows, weights, sizes) * row_scales[:, None]
    for scale, span in zip(group_scales, oracle.spans(sizes, oracle.NUM_ROWS), strict=True):
        expected[span] *= float(scale)
    assert actual.dtype == jnp.bfloat16
    assert_close(actual, expected)


@pytest.mark.parametrize("implementation", PATHS)
def test_eight_bits_by_default_stay_eight(implementation):
    """Sums past the largest number of 8 bits become what JAX's cast makes of them."""
    rows = np.full((32, 64), 4.0, jnp.float8_e4m3fn)
    weights = np.full((1, 64, 16), 4.0, jnp.float8_e4m3fn)
    out = moe.ragged_dot(rows, weights, np.array([31]), implementation=implementation)
    expected = jnp.full((32, 16), 1024.0).astype(jnp.float8_e4m3fn).at[31:].set(0)
    assert_same_bits(out, expected)


@pytest.mark.parametrize("implementation", PATHS)
def test_preferred_element_type_and_mixed_dtypes(implementation):
    case = oracle.draw(6, 64, 48, "bfloat16")
    sizes = [30, 0, 50, 45]
    wide = moe.ragged_dot(
        case.rows,
        case.weights,
        as_sizes(sizes),
        preferred_element_type=jnp.float32,
        implementation=implementation,
    )
    assert wide.dtype == jnp.float32
    assert_close(wide, oracle.ragged_dot(case.rows, case.weights, sizes))
    mixed = moe.ragged_dot(
        case.rows, case.weights.astype("float32"), as_sizes(sizes), implementation=implementation
    )
    assert mixed.dtype == jnp.float32


def test_dtypes_without_kernels_take_plain_jax():
    rows, weights = jnp.arange(12).reshape(6, 2), jnp.arange(12).reshape(2, 2, 3)
    out = moe.ragged_dot(rows, weights, jnp.array([2, 3]))
    expected = np.zeros((6, 3), int)
    expected[:2] = np.asarray(rows)[:2] @ np.asarray(weights)[0]
    expected[2:5] = np.asarray(rows)[2:5] @ np.asarray(weights)[1]
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("implementation", [None, *PATHS])
@pytest.mark.parametrize(
    ("rows", "weights"), [((0, 4), (2, 4, 3)), ((5, 0), (2, 0, 3)), ((5, 4), (2, 4, 0))]
)
def test_nothing_to_multiply(implementation, rows, weights):
    def loss(x, w):
        out = moe.ragged_dot(x, w, np.array([2, 2]), implementation=implementation)
        assert out.shape == (rows[0], weights[2])
        return jnp.sum(out)

    ones = functools.partial(np.ones, dtype=np.float32)
    d_rows, d_weights = jax.jit(jax.grad(loss, (0, 1)))(ones(rows), ones(weights))
    assert d_rows.shape == rows
    assert d_weights.shape == weights
    assert not np.any(d_weights)
