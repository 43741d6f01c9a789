"""Permute and unpermute against their definitions: values and gradients, every path."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.moe import oracle
from triax import moe
from triax.moe.permutation.configs import MoveConfig
from triax.testing import assert_close, assert_same_bits

FLOATS = ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
OTHERS = ["int8", "uint16", "int32", "bool"]

# Few shapes, so that plain JAX compiles few programs: tokens, slots, experts, hidden, alignment,
# rows (None for the default). No tokens, one, odd widths, no width, several blocks of tokens and
# of the width, pad rows, more rows than needed and fewer.
SHAPES = [
    (0, 2, 5, 3, 8, None),
    (1, 1, 1, 1, 1, None),
    (2, 1, 8, 7, 1, 64),
    (17, 2, 5, 67, 8, None),
    (17, 8, 128, 3, 1, None),
    (5, 2, 3, 5, 128, None),
    (40, 2, 5, 16, 16, 48),
    (30, 1, 8, 33, 1, 20),
    (3, 2, 5, 261, 8, None),
    (4, 2, 3, 0, 8, None),
    # Wide maps: their slots are visited in steps, as far as there are rows.
    (3, 17, 9, 67, 4, None),
    (5, 40, 64, 3, 1, 32),
    (0, 20, 3, 5, 1, None),
]


@pytest.fixture(params=["xla", "interpret"])
def implementation(request):
    return request.param


@functools.partial(jax.jit, static_argnames="implementation")
def everything(x, weights, scales, plan, rows, gradients, implementation):
    """Both ops and all their gradients."""
    d_permuted, d_tokens = gradients
    permuted, pull = jax.vjp(
        lambda x, w, s: moe.permute(x, plan, weights=w, scales=s, implementation=implementation),
        x,
        weights,
        scales,
    )
    op = functools.partial(moe.unpermute, implementation=implementation)
    weighted, pull_weighted = jax.vjp(lambda rows, w: op(rows, plan, w), rows, weights)
    plain, pull_plain = jax.vjp(lambda rows: op(rows, plan), rows)
    return {
        "permuted": permuted,
        "d_permute": pull(d_permuted),
        "weighted": weighted,
        "d_weighted": pull_weighted(d_tokens),
        "plain": plain,
        "d_plain": pull_plain(d_tokens)[0],
    }


def make_case(rng, shape, routing="any", capacity=None, hostile=False, dtype=np.float32):
    """Arguments of `everything` but the implementation."""
    num_tokens, top_k, num_experts, width, align_size, num_rows = shape
    ids = oracle.draw_ids(rng, num_tokens, top_k, num_experts, routing)
    plan = oracle.make_plan(ids, num_experts, capacity, align_size, num_rows)
    draw = functools.partial(oracle.draw_values, rng, hostile=hostile)
    rows = plan.num_rows
    return (
        draw((num_tokens, width), dtype),
        draw((num_tokens, top_k)),
        draw((num_tokens, 3)),
        plan,
        draw((rows, width), dtype),
        (
            moe.Permuted(draw((rows, width), dtype), draw((rows,)), draw((rows, 3))),
            draw((num_tokens, width), dtype),
        ),
    )


def check(case, implementation):
    x, weights, scales, plan, rows, (d_permuted, d_tokens) = case
    out = everything(*case, implementation=implementation)
    row_of = np.asarray(plan.row_of)
    num_rows, top_k = plan.num_rows, row_of.shape[1]
    width = x.shape[1]
    same = lambda name, actual, expected: assert_same_bits(actual, expected, name)

    def close(name, actual, expected, terms):
        if actual.dtype == "float8_e4m3fn":  # it has no infinities
            expected = np.where(np.isinf(expected), np.nan, expected)
        # Inputs are of size one, and errors are measured against that where sums cancel out.
        actual, expected = (np.append(np.asarray(a), a.dtype.type(1)) for a in (actual, expected))
        assert_close(actual, expected, terms=max(terms, 1), err_msg=name)

    same("rows", out["permuted"].rows, oracle.permute(x, row_of, num_rows))
    same("weights", out["permuted"].weights, oracle.permute_slots(weights, row_of, num_rows))
    same("scales", out["permuted"].scales, oracle.permute(scales, row_of, num_rows))
    d_x, d_w, d_s = out["d_permute"]
    close("d_x", d_x, oracle.unpermute(d_permuted.rows, row_of), top_k)
    same("d_weights", d_w, oracle.gather_slots(d_permuted.weights, row_of))
    close("d_scales", d_s, oracle.unpermute(d_permuted.scales, row_of), top_k)
    assert (d_x.dtype, d_w.dtype, d_s.dtype) == (x.dtype, weights.dtype, scales.dtype)

    close("weighted", out["weighted"], oracle.unpermute(rows, row_of, weights), top_k)
    d_rows, d_weights = out["d_weighted"]
    expected = oracle.unpermute_gradients(rows, row_of, weights, d_tokens)
    close("d_rows", d_rows, expected[0], 1)
    close("d_weights of the sum", d_weights, expected[1], width)
    empty = np.setdiff1d(np.arange(num_rows), row_of)
    same("empty rows", np.asarray(d_rows)[empty], np.zeros_like(rows[empty]))
    same("empty slots", np.asarray(d_weights)[row_of < 0], np.zeros_like(weights[row_of < 0]))
    close("plain", out["plain"], oracle.unpermute(rows, row_of), top_k)
    same("d_plain", out["d_plain"], oracle.permute(d_tokens, row_of, num_rows))
    assert out["weighted"].dtype == out["plain"].dtype == d_rows.dtype == rows.dtype


def test_example(implementation):
    plan = oracle.make_plan(np.array([[1, 0], [2, 1]]), 3)
    x = np.array([[1, 2], [3, 4]], np.float32)
    rows = jax.jit(functools.partial(moe.permute, implementation=implementation))(x, plan)
    assert rows.tolist() == [[1, 2], [1, 2], [3, 4], [3, 4]]
    weights = np.array([[0.5, 0.5], [2, 0]], np.float32)
    back = jax.jit(functools.partial(moe.unpermute, implementation=implementation))
    y = back(rows, plan, weights)
    assert y.tolist() == [[1, 2], [6, 8]]


@pytest.mark.sampled(1, 3)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@given(
    seed=st.integers(0, 2**32 - 1),
    routing=st.sampled_from(oracle.ROUTINGS),
    capacity=st.sampled_from([None, None, 0, 1, 4]),
    hostile=st.booleans(),
)
def test_equals_definition(shape, seed, routing, capacity, hostile):
    case = make_case(np.random.default_rng(seed), shape, routing, capacity, hostile)
    for implementation in ("xla", "interpret"):
        check(case, implementation)


@pytest.mark.sampled(1)
def test_many_experts_with_pad_rows(implementation):
    """More than are looked at together, which is 256."""
    check(make_case(np.random.default_rng(8), (10, 3, 270, 2, 4, None)), implementation)


@pytest.mark.sampled(2, 2)
@pytest.mark.parametrize(
    "dtype",
    [
        "bfloat16",
        "float64",
        *(
            pytest.param(dtype, marks=pytest.mark.slow("bfloat16 stands for them"))
            for dtype in FLOATS
            if dtype != "bfloat16"
        ),
    ],
)
def test_floats(dtype, implementation):
    with jax.enable_x64(dtype == "float64"):
        shape = (17, 3, 5, 33, 8, None)
        rng = np.random.default_rng(1)
        check(make_case(rng, shape, "wild", hostile=True, dtype=jnp.dtype(dtype)), implementation)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [*FLOATS, *OTHERS])
def test_moves_keep_every_bit(dtype, implementation):
    rng = np.random.default_rng(2)
    plan = oracle.make_plan(oracle.draw_ids(rng, 30, 2, 5, "wild"), 5, align_size=8)
    permute = jax.jit(functools.partial(moe.permute, implementation=implementation))
    x = oracle.random_bits(rng, (30, 19), jnp.dtype(dtype))
    scales = oracle.random_bits(rng, (30, 4), jnp.float8_e8m0fnu)
    out = permute(x, plan, scales=scales)
    row_of = np.asarray(plan.row_of)
    assert_same_bits(out.rows, oracle.permute(x, row_of, plan.num_rows))
    assert out.weights is None
    expected = oracle.permute(scales.view(np.uint8), row_of, plan.num_rows)
    assert out.scales.dtype == scales.dtype
    assert_same_bits(np.asarray(out.scales).view(np.uint8), expected)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("dtype", "weights_dtype"), [("float32", "float16"), ("bfloat16", "bfloat16")]
)
def test_weights_keep_their_dtype(dtype, weights_dtype, implementation):
    case = list(make_case(np.random.default_rng(3), (9, 2, 5, 16, 8, None), dtype=jnp.dtype(dtype)))
    case[1] = case[1].astype(jnp.dtype(weights_dtype))
    permuted, d_tokens = case[5]
    permuted = permuted._replace(weights=permuted.weights.astype(jnp.dtype(weights_dtype)))
    case[5] = permuted, d_tokens
    check(tuple(case), implementation)


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize(
    ("width", "dtype"),
    [(1, "bfloat16"), (1024, "bfloat16"), (4097, "float32"), (9000, "float32")],
)
def test_widths(width, dtype, implementation):
    """Narrow rows, rows of several blocks, rows too wide to be held at once."""
    case = make_case(np.random.default_rng(4), (3, 2, 3, width, 4, None), dtype=jnp.dtype(dtype))
    check(case, implementation)


@pytest.mark.sampled(1, 3)
@pytest.mark.parametrize(("num_tokens", "top_k"), [(0, 4), (11, 1), (11, 4), (11, 5)])
def test_rows_that_share_pieces_of_memory(num_tokens, top_k, implementation):
    """From four choices on, two rows of a token are written at once; the last may be alone."""
    width = 521
    assert MoveConfig.for_copies(width, 4, top_k).block_slots == (2 if top_k > 1 else 1)
    shape = (num_tokens, top_k, 6, width, 4, None)
    check(make_case(np.random.default_rng(9), shape, capacity=5), implementation)


@pytest.mark.sampled(2, 2)
@pytest.mark.parametrize("wide", [False, True])
def test_overflow_to_float8_is_the_same_everywhere(wide, implementation):
    """JAX casts what float8_e4m3fn does not hold to NaN; a GPU would saturate."""
    ids = np.full((1, 20 if wide else 2), -1)
    ids[0, :2] = 0
    plan = oracle.make_plan(ids, 1, num_rows=2)
    rows = np.full((2, 4), 400.0, jnp.float8_e4m3fn)
    op = lambda *weights: moe.unpermute(rows, plan, *weights, implementation=implementation)
    assert np.isnan(np.asarray(jax.jit(op)()).astype(np.float32)).all()

    gradient = jax.jit(lambda weights: jax.vjp(op, weights)[1](jnp.ones((1, 4), rows.dtype)))
    for dtype, is_nan in (("float8_e4m3fn", True), ("float8_e5m2", False)):
        (d_weights,) = gradient(np.ones(ids.shape, jnp.dtype(dtype)))
        assert d_weights.dtype == dtype
        expected = np.where(ids >= 0, np.nan if is_nan else 1536.0, 0.0)  # 4 * 400, rounded
        np.testing.assert_array_equal(np.asarray(d_weights).astype(np.float32), expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("num_tokens", "width"), [(3, 1100), (70, 2)])
def test_a_wide_map_is_the_narrow_one_with_room(num_tokens, width, implementation):
    """More slots than rows, in any place, change nothing: values and gradients to the bit."""
    rng = np.random.default_rng(10)
    narrow = oracle.draw_ids(rng, num_tokens, 3, 5, "any")
    wide = np.full((num_tokens, 40), -1, np.int32)
    places = np.sort(rng.permuted(np.tile(np.arange(40), (num_tokens, 1)), axis=1)[:, :3], axis=1)
    np.put_along_axis(wide, places, narrow, axis=1)
    weights = rng.standard_normal((num_tokens, 3)).astype(np.float32)
    wide_weights = np.full(wide.shape, np.nan, np.float32)  # of slots that nobody looks at
    np.put_along_axis(wide_weights, places, weights, axis=1)
    x = rng.standard_normal((num_tokens, width)).astype(np.float32)
    scales = rng.standard_normal((num_tokens, 2)).astype(np.float32)

    @jax.jit
    def both(ids, weights):
        plan = moe.make_plan(ids, 5, align_size=4, num_rows=num_tokens * 3 + 16 & ~3)

        def layer(x, weights, scales):
            out = moe.permute(
                x, plan, weights=weights, scales=scales, implementation=implementation
            )
            return out, moe.unpermute(out.rows, plan, weights, implementation=implementation)

        out, pull = jax.vjp(layer, x, weights, scales)
        return out, pull(out)

    out, (d_x, d_weights, d_scales) = both(narrow, weights)
    wide_out, (wide_d_x, wide_d_weights, wide_d_scales) = both(wide, wide_weights)
    same = out, d_x, d_scales
    wide_same = wide_out, wide_d_x, wide_d_scales
    if implementation == "xla":  # XLA fuses products into sums where it unrolls
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), same, wide_same
        )
    else:
        jax.tree.map(assert_same_bits, wide_same, same)
    spread = np.zeros(wide.shape, np.float32)
    np.put_along_axis(spread, places, np.asarray(d_weights), axis=1)
    np.testing.assert_allclose(wide_d_weights, spread, rtol=1e-5, atol=1e-6)
    assert (np.asarray(wide_d_weights)[wide < 0] == 0).all()


@pytest.mark.sampled(1)
def test_nan_stays_in_the_tokens_that_own_it(implementation):
    case = make_case(np.random.default_rng(5), (17, 2, 5, 8, 8, None))
    x, weights, scales, plan, rows, gradients = case
    row_of = np.asarray(plan.row_of)
    rows = rows.copy()
    rows[row_of[3, 1]] = np.nan
    empty = np.setdiff1d(np.arange(plan.num_rows), row_of)
    rows[empty] = np.nan  # nobody owns these
    args = x, weights, scales, plan, rows, gradients
    out = everything(*args, implementation=implementation)
    for name in ("weighted", "plain"):
        touched = np.isnan(np.asarray(out[name])).any(1)
        assert np.flatnonzero(touched).tolist() == [3]
    d_rows, d_weights = map(np.asarray, out["d_weighted"])
    assert np.isfinite(d_rows).all()
    assert np.argwhere(np.isnan(d_weights)).tolist() == [[3, 1]]


def test_a_zero_weight_is_a_weight(implementation):
    plan = oracle.make_plan(np.array([[0, 1], [1, -1]]), 2)
    rows = np.array([[np.nan], [1.0], [2.0], [3.0]], np.float32)
    weights = np.array([[0.0, 1.0], [1.0, np.nan]], np.float32)
    back = jax.jit(functools.partial(moe.unpermute, implementation=implementation))
    y = np.asarray(back(rows, plan, weights))
    assert np.isnan(y[0, 0])
    assert y[1, 0] == 2.0  # the weight of a slot that is not routed is not looked at


@pytest.mark.sampled(1, 3)
@pytest.mark.parametrize(
    ("damage", "top_k"), [("far", 2), ("past", 20), ("negative", 2), ("sizes", 2), ("sizes", 20)]
)
def test_corrupted_plans_stay_inside(damage, top_k, implementation):
    """The interpreter checks every access: a row that does not exist is one that was dropped."""
    case = make_case(np.random.default_rng(6), (17, top_k, 5, 8, 8, 48 * top_k))
    x, weights, scales, plan, rows, gradients = case
    row_of = np.array(plan.row_of)
    wrong = {"far": 2**31 - 1, "past": plan.num_rows, "negative": -(2**31), "sizes": -1}
    row_of[::3] = wrong[damage]
    changes = {"row_of": row_of}
    if damage == "sizes":
        changes["group_sizes"] = np.array([2**31 - 1, -5, 2**31 - 1, 7, -(2**31)], np.int32)
        changes["group_filled"] = np.array([-9, 2**31 - 1, 3, -(2**31), 1], np.int32)
    plan = type(plan)(**{**vars(plan), **changes})
    out = everything(x, weights, scales, plan, rows, gradients, implementation=implementation)
    row_of = np.where((row_of < 0) | (row_of >= plan.num_rows), -1, row_of)
    assert_close(out["weighted"], oracle.unpermute(rows, row_of, weights), terms=2)
    if damage != "sizes":  # rows that the plan counts and no slot names are not defined
        kept = row_of[row_of >= 0]
        expected = oracle.permute(x, row_of, plan.num_rows)
        assert_same_bits(np.asarray(out["permuted"].rows)[kept], expected[kept])


def test_integer_rows_have_no_gradient(implementation):
    """A cotangent without elements (float0) comes in for the rows, and goes out for x."""
    plan = oracle.make_plan(np.array([[0, 1], [1, -1]]), 2)

    def loss(x, weights):
        out = moe.permute(x, plan, weights=weights, implementation=implementation)
        return jnp.sum(out.weights * np.array([1, 2, 4, 8], np.float32))

    gradient = jax.jit(jax.grad(loss, (0, 1), allow_int=True))
    d_x, d_weights = gradient(np.ones((2, 3), int), np.ones((2, 2), np.float32))
    assert d_x.dtype == jax.dtypes.float0
    assert d_weights.tolist() == [[1, 2], [4, 0]]


def test_dtypes_triton_lacks_go_through_plain_jax():
    plan = oracle.make_plan(np.array([[1], [0]]), 2)
    for dtype in ("complex64", "int4"):
        x = np.arange(6).reshape(2, 3).astype(jnp.dtype(dtype))
        np.testing.assert_array_equal(jax.jit(moe.permute)(x, plan), x[::-1])


def test_gradients_of_complex_tokens():
    plan = oracle.make_plan(np.array([[1, 0], [0, -1]]), 2)
    x = (np.arange(6).reshape(2, 3) * (1 + 2j)).astype(np.complex64)
    grad = jax.jit(jax.grad(lambda x: jnp.sum(moe.permute(x, plan)).imag))(x)
    np.testing.assert_array_equal(grad, np.array([[-2j] * 3, [-1j] * 3]))
