"""ragged_dot and its gradients against float64, on every path."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.moe.products import oracle
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


@pytest.mark.sampled
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


@pytest.mark.sampled(2)
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


def test_gradient_of_transposed_weights():
    case, sizes = oracle.draw(2, 16, 24, "float32"), jnp.array([20, 0, 37, 23])

    def gradient(weights, transposed):
        run = lambda w: moe.ragged_dot(case.rows, w, sizes, transpose_weights=transposed)
        return jax.vjp(run, jnp.asarray(weights))[1](jnp.asarray(case.gradient))[0]

    found = gradient(np.swapaxes(case.weights, 1, 2), True)
    wanted = np.swapaxes(np.asarray(gradient(case.weights, False), np.float64), 1, 2)
    assert_close(found, wanted, terms=case.rows.shape[0])


@pytest.mark.parametrize("implementation", PATHS)
def test_rows_past_the_groups_are_zero(implementation):
    case = oracle.draw(2, 64, 48, "float32")
    case.rows[80:] = np.nan
    case.gradient[80:] = np.inf
    out, d_rows, d_weights = run(case, [20, 20, 20, 20], implementation)
    assert_same_bits(out[80:], np.zeros_like(out[80:]))
    assert_same_bits(d_rows[80:], np.zeros_like(d_rows[80:]))
    assert np.all(np.isfinite(d_weights))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("implementation", PATHS)
def test_rows_past_the_groups_are_zero_for_all_scales(implementation):
    x, w = (jnp.ones(shape, "float8_e4m3fn") for shape in ((6, 16), (2, 16, 16)))
    x = moe.ScaledArray(x, jnp.array([1, 1, 2, 1, jnp.nan, jnp.inf])[:, None], (1, None))
    w = moe.ScaledArray(w, jnp.array([3, jnp.inf])[:, None, None], (1, None, None))
    out = moe.ragged_dot(x, w, jnp.array([4, 0]), implementation=implementation)
    np.testing.assert_array_equal(out[:, 0], [48, 48, 96, 48, 0, 0])


@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("depth", [0, 16])
def test_bias(implementation, depth):
    """Also where there is nothing else; none in rows past the groups."""
    x, w, sizes = jnp.zeros((4, depth)), jnp.zeros((2, depth, 3)), jnp.array([1, 2])
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


def test_sums_of_many_rows_for_a_bias_are_rounded_once():
    """Three parts have 1050 each, which bfloat16 lacks. Rows past the groups have no gradient."""
    rows, sizes = jnp.zeros((2200, 0), jnp.bfloat16), np.array([2100], np.int32)

    def run(bias, bias_weights):
        how = {"bias": bias, "bias_weights": bias_weights, "implementation": "interpret"}
        return moe.ragged_dot(rows, jnp.zeros((1, 0, 8), jnp.bfloat16), sizes, **how)

    gradient = jnp.full((2200, 8), 1.5, jnp.bfloat16).at[2100:].set(jnp.nan)
    given = jnp.ones((1, 8), jnp.bfloat16), jnp.ones(2200)
    d_bias, d_weights = jax.vjp(run, *given)[1](gradient)
    assert d_bias.tolist() == [[3152.0] * 8]  # 3150; sums that were rounded before give 3136
    assert d_weights.tolist() == [12.0] * 2100 + [0.0] * 100


@pytest.mark.sampled(1, 1)
@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("sizes", [[900, 1700], [0, 2590], [2100, 0]])
def test_gradients_of_biases_of_many_rows(implementation, sizes):
    """Groups are summed up in parts, and what is past them is left out."""
    rng, num_rows, columns = np.random.default_rng(5), 2600, 70
    bias = rng.standard_normal((2, columns), np.float32)
    weights = rng.standard_normal(num_rows, np.float32)
    gradient = rng.standard_normal((num_rows, columns), np.float32)
    group = np.repeat([0, 1], sizes)
    inside = len(group)
    gradient[inside:] = weights[inside:] = np.nan
    x, w = jnp.zeros((num_rows, 0)), jnp.zeros((2, 0, columns))

    def run(bias, weights):
        how = {"bias": bias, "bias_weights": weights, "implementation": implementation}
        return moe.ragged_dot(x, w, np.array(sizes, np.int32), **how)

    d_bias, d_weights = jax.vjp(run, bias, weights)[1](jnp.asarray(gradient))
    exact = gradient[:inside].astype(np.float64)
    wanted = np.stack([weights[:inside][group == g] @ exact[group == g] for g in (0, 1)])
    assert_close(d_bias, wanted, terms=num_rows)
    products = np.sum(exact * bias[group], 1)
    assert_close(d_weights, np.pad(products, (0, num_rows - inside)), terms=columns)
    alone = [jax.grad(lambda *of: jnp.vdot(run(*of)[:inside], exact), at) for at in (0, 1)]
    assert_close(alone[0](bias, weights), wanted, terms=num_rows)
    assert_close(alone[1](bias, weights)[:inside], products, terms=columns)


@pytest.mark.slow("many programs for one rule")
def test_second_derivatives_with_a_bias():
    rng = np.random.default_rng(3)
    operands = [rng.standard_normal(n, np.float32) for n in ((5, 4), (2, 4, 3), (2, 3), (5,))]
    group = np.array([0, 0, 1, 1])

    def op(rows, weights, bias, each):
        return moe.ragged_dot(rows, weights, jnp.array([2, 2]), bias=bias, bias_weights=each)

    def plain(rows, weights, bias, each):
        out = jnp.einsum("rk,rkn->rn", rows[:4], weights[group])
        return out + bias[group] * each[:4, None]

    def run(op):
        everything = tuple(range(4))
        slopes = jax.grad(lambda *args: jnp.sum(op(*args) ** 3), everything)
        steep = lambda *args: sum(jnp.sum(jnp.sin(slope)) for slope in slopes(*args))
        return jax.jit(jax.grad(steep, everything))(*operands)

    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3), run(op), run(plain))


@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("precision", ["BF16_BF16_F32", "TF32_TF32_F32"])
def test_precision_is_that_of_float32_alone(implementation, precision):
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(np.float16) for shape in [(5, 64), (1, 64, 7)])
    how = {"preferred_element_type": "float32", "implementation": implementation}
    out = moe.ragged_dot(x, w, np.array([5]), precision=precision, **how)
    assert_close(out, x.astype(np.float64) @ w[0].astype(np.float64), terms=64)


@pytest.mark.sampled(4, 4)
@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("group", [0, 1])
def test_what_is_no_number_stays_in_its_group(implementation, value, group):
    """In the weights of a group with rows, or of one without, and in both gradients."""
    sizes = [40, 0, 50, 20]
    case = oracle.draw(7, *WIDTHS["descriptors"], "float32")
    clean = list(run(case, sizes, implementation))
    case.weights[group, 3, 5] = value
    out, d_rows, d_weights = run(case, sizes, implementation)
    span = list(oracle.spans(sizes, oracle.NUM_ROWS))[group]
    others = np.delete(np.arange(oracle.NUM_ROWS), span)
    assert_same_bits(out[others], clean[0][others])
    assert_same_bits(d_rows[others], clean[1][others])
    assert_same_bits(d_weights, clean[2])
    assert not np.isfinite(out[span, 5]).any()
    assert not np.isfinite(d_rows[span, 3]).any()

    case = oracle.draw(7, *WIDTHS["descriptors"], "float32")
    case.rows[3] = case.gradient[3] = value  # of the first group
    out, d_rows, d_weights = run(case, sizes, implementation)
    others = np.delete(np.arange(oracle.NUM_ROWS), 3)
    assert_same_bits(out[others], clean[0][others])
    assert_same_bits(d_rows[others], clean[1][others])
    assert_same_bits(d_weights[1:], clean[2][1:])
    assert not np.isfinite(d_weights[0]).any()


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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("implementation", PATHS)
def test_equals_jax(implementation):
    case = oracle.draw(4, 64, 48, "float32")
    sizes = as_sizes([30, 0, 50, 45])
    expected = jax.lax.ragged_dot(case.rows, case.weights, sizes)
    actual = moe.ragged_dot(case.rows, case.weights, sizes, implementation=implementation)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(1)
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
    with pytest.warns(UserWarning, match="in float32"):
        mixed = moe.ragged_dot(
            case.rows,
            case.weights.astype("float32"),
            as_sizes(sizes),
            implementation=implementation,
        )
    assert mixed.dtype == jnp.float32
    assert_close(mixed, oracle.ragged_dot(case.rows, case.weights, sizes))


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


@pytest.mark.parametrize("implementation", [None, *PATHS])
@pytest.mark.parametrize(
    ("rows", "weights"), [((0, 4), (2, 4, 3)), ((5, 0), (2, 0, 3)), ((5, 4), (2, 4, 0))]
)
def test_nothing_to_multiply(implementation, rows, weights):
    small = jnp.zeros(rows, "float8_e4m3fn"), jnp.zeros(weights, "float8_e5m2")
    out = moe.ragged_dot(*small, np.array([2, 2]), implementation=implementation)
    assert_same_bits(out, jnp.zeros((rows[0], weights[2]), "float8_e4m3fn"))

    def loss(x, w):
        out = moe.ragged_dot(x, w, np.array([2, 2]), implementation=implementation)
        assert out.shape == (rows[0], weights[2])
        return jnp.sum(out)

    ones = functools.partial(np.ones, dtype=np.float32)
    d_rows, d_weights = jax.jit(jax.grad(loss, (0, 1)))(ones(rows), ones(weights))
    assert d_rows.shape == rows
    assert d_weights.shape == weights
    assert not np.any(d_weights)


@pytest.mark.sampled(1, 4)
@pytest.mark.parametrize("implementation", ["xla", "interpret"])
@pytest.mark.parametrize(("rows", "depth", "columns"), [(0, 4, 8), (5, 0, 8), (5, 4, 0)])
def test_gradients_by_biases_of_empty_products(implementation, rows, depth, columns):
    x, w, sizes = jnp.ones((rows, depth)), jnp.ones((3, depth, columns)), np.array([2, 0, 1])

    def total(bias, by):
        how = {"bias": bias, "bias_weights": by, "implementation": implementation}
        return jnp.sum(moe.ragged_dot(x, w, sizes, **how))

    d_bias, d_by = jax.grad(total, (0, 1))(jnp.ones((3, columns)), jnp.full(rows, 2.0))
    wanted = 2.0 * min(rows, 1) * sizes[:, None]
    np.testing.assert_array_equal(d_bias, np.broadcast_to(wanted, (3, columns)))
    inside = np.arange(rows) < (3 if rows else 0)
    np.testing.assert_array_equal(d_by, columns * inside)


@pytest.mark.parametrize("num_rows", [0, 5])
def test_biases_of_no_groups(num_rows):
    arrays = jnp.ones((num_rows, 0)), jnp.ones((0, 0, 3)), np.zeros(0, np.int32)
    out = moe.ragged_dot(*arrays, bias=jnp.ones((0, 3)))
    np.testing.assert_array_equal(out, np.zeros((num_rows, 3)))


def test_tangents_of_all_operands():
    """The product is linear in each, so a tangent is the product of it and the others."""
    rng = np.random.default_rng(0)
    sizes, shapes = np.array([2, 0, 3], np.int32), [(6, 4), (3, 4, 5), (3, 5), (6,)]
    x, w, b, each = primals = [rng.standard_normal(s, np.float32) for s in shapes]
    dx, dw, db, deach = tangents = [rng.standard_normal(s, np.float32) for s in shapes]

    def product(x, w, b, each):
        return moe.ragged_dot(x, w, sizes, bias=b, bias_weights=each)

    _, found = jax.jit(lambda p, t: jax.jvp(product, p, t))(tuple(primals), tuple(tangents))
    none = np.zeros_like(b)
    expected = product(dx, w, none, each) + product(x, dw, none, each)
    expected += product(0 * x, w, db, each) + product(0 * x, w, b, deach)
    assert_close(found, expected, terms=8)
