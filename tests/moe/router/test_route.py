"""route and its gradient against NumPy in float64, on every path and in every combination."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.moe import flat
from tests.moe.router import oracle
from triax import moe
from triax.testing import assert_close, assert_same_bits

PATHS = ["xla", "interpret"]
# Tokens, experts, choices, groups, groups kept.
SHAPES = [
    (5, 256, 8, 8, 4),
    (3, 160, 6, 8, 3),  # groups of 20
    (6, 12, 4, 3, 2),  # three groups of four
    (9, 40, 5, 4, 2),
    (33, 8, 2, 4, 1),
    (2, 1, 1, None, None),
    (4, 7, 7, None, None),  # all experts
    (2, 64, 40, None, None),
    (1, 1024, 4, 16, 2),
]


_compiled = jax.jit(moe.route, static_argnames="implementation")


def route(logits, top_k, bias=None, implementation=None, **router):
    """As one program, where each of its steps would be compiled alone; in NumPy."""
    how = {"bias": bias, "implementation": implementation}
    return jax.tree.map(np.asarray, _compiled(logits, moe.Router(top_k, **router), **how))


def call(logits, top_k, d_weights, implementation, **options):
    """The result, and the gradient of the logits for that of the weights."""

    @jax.jit
    def both(logits, bias):
        op = functools.partial(flat.route, top_k=top_k, implementation=implementation)
        routed, pull = jax.vjp(lambda x: op(x, bias=bias, **options), logits)
        none = np.zeros(routed.experts.shape, jax.dtypes.float0)
        return routed, pull(moe.Routing(d_weights, none))[0]

    return both(logits, options.pop("bias", None))


def draw(seed, shape, dtype="float32"):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * 2).astype(jnp.dtype(dtype))


def combinations():
    """A quarter of all options with each shape, each with each other; all of them over the shapes.

    Yields shape, grouped, biased, normalize, score.
    """
    for number, shape in enumerate(SHAPES):
        for grouped, biased in itertools.product([False, True], repeat=2):
            if grouped and shape[3] is None:
                continue
            normalize = grouped ^ bool(number & 1)
            score = "sigmoid" if biased ^ bool(number & 2) else "softmax"
            yield shape, grouped, biased, normalize, score


@pytest.mark.sampled
@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize(
    ("shape", "grouped", "biased", "normalize", "score"), list(combinations()), ids=str
)
def test_options(shape, grouped, biased, normalize, score, implementation):
    num_tokens, num_experts, top_k, num_groups, top_groups = shape
    groups = {"num_groups": num_groups, "top_groups": top_groups} if grouped else {}
    logits = draw(0, (num_tokens, num_experts))
    bias = draw(1, (num_experts,)) * np.float32(0.1) if biased else None
    d_weights = draw(2, (num_tokens, top_k))
    options = {"score": score, "normalize": normalize, "scale": 2.5}
    routed, d_logits = call(
        logits, top_k, d_weights, implementation, bias=bias, **options, **groups
    )
    experts, _ = oracle.choose(logits, top_k, score, bias, **groups)
    np.testing.assert_array_equal(routed.experts, experts)
    assert routed.weights.dtype == jnp.float32
    assert routed.experts.dtype == jnp.int32
    assert_close(routed.weights, oracle.weigh(logits, experts, **options))
    expected = oracle.gradient(logits, experts, d_weights, **options)
    if np.abs(expected).max() < 1e-9:  # a single choice, normalised
        assert np.abs(d_logits).max() < 1e-5
    else:
        assert_close(d_logits, expected, terms=4 * top_k)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("score", ["sqrtsoftplus", "none"])
@pytest.mark.parametrize("options", [{}, {"normalize": True}, {"bias": True}, {"groups": True}])
def test_scores_and_groups_by_their_best(options, score, implementation):
    options = dict(options)
    logits = draw(0, (21, 24)) * np.float32(4)
    logits[3:6] -= np.float32([[20], [60], [90]])  # where softplus is tiny, or zero in float32
    if score == "none":
        logits = np.abs(logits)
    bias = draw(1, (24,)) if options.pop("bias", False) else None
    grouped = options.pop("groups", False)
    groups = {"num_groups": 6, "top_groups": 3} if grouped else {}
    how = {"score": score, "normalize": False, "scale": 1.5} | options
    d_weights = draw(2, (21, 5))
    best = {"group_score": "max"} if grouped else {}
    routed, d_logits = call(
        logits, 5, d_weights, implementation, bias=bias, **how, **groups, **best
    )
    experts, _ = oracle.choose(logits, 5, score, bias, **groups, group_best=1)
    np.testing.assert_array_equal(routed.experts, experts)
    np.testing.assert_allclose(routed.weights, oracle.weigh(logits, experts, **how), rtol=3e-5)
    expected = oracle.gradient(logits, experts, d_weights, **how)
    size = np.abs(expected).max(1, keepdims=True)
    np.testing.assert_allclose(d_logits / size, expected / size, rtol=1e-4, atol=1e-4)


@pytest.mark.sampled
@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("order", [1, 1.5, 2, 200.0])
def test_weights_of_norm_one(order, score, implementation):
    """DBRX's router with any p, also where scores are so small that no power of them is a float."""
    logits, d_weights = draw(0, (9, 12)), draw(1, (9, 4))
    logits[3:6] -= np.float32([[20], [60], [80]])
    how = {"score": score, "normalize": order, "scale": -2.5}
    routed, d_logits = call(logits, 4, d_weights, implementation, **how)
    experts, _ = oracle.choose(logits, 4, score)
    np.testing.assert_array_equal(routed.experts, experts)
    np.testing.assert_allclose(routed.weights, oracle.weigh(logits, experts, **how), rtol=1e-5)
    expected = oracle.gradient(logits, experts, d_weights, **how)
    np.testing.assert_allclose(d_logits, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.slow("many programs for one rule")
def test_norms_of_what_is_nothing_or_not_chosen():
    """Zeros, and no gradient, for padding; and what is not an expert counts in no norm."""
    logits = np.float32([[-np.inf] * 5, [0, 1, 2, -np.inf, 1], [200, 1, 2, 3, 4]])
    experts, d_weights = np.int32([[0, 1, -1], [3, 2, 9], [0, 1, 2]]), draw(2, (3, 3))
    for chosen in (None, experts):
        routed, d_logits = call(logits, 3, d_weights, None, normalize=2.0, experts=chosen)
        assert np.isfinite(d_logits).all()
        assert not np.any(routed.weights[0])
        assert not np.any(d_logits[0])
        np.testing.assert_allclose(np.sum(routed.weights**2, axis=1), [0, 1, 1], rtol=1e-6)
    np.testing.assert_array_equal(routed.weights[1:], [[0, 1, 0], [1, 0, 0]])
    for order in (1.5, 2, 3):
        op = lambda x, order=order: jnp.sin(moe.route(x, moe.Router(3, normalize=order)).weights)
        assert np.isfinite(jax.jit(jax.hessian(op))(logits)).all()
    router = moe.Router(3, normalize=2.0)
    scaled = moe.route(logits, router, expert_scale=np.float32([1, 2, 3, 4, 5]))
    plain = moe.route(logits, router)
    np.testing.assert_allclose(scaled.weights, plain.weights * (1 + plain.experts), rtol=1e-6)


@pytest.mark.sampled(2, 2)
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus", "none"])
@pytest.mark.parametrize("normalize", [False, True])
def test_weights_of_experts_that_are_given(score, normalize):
    """As if they had been chosen; zero for those that there are not, which no sum counts."""
    logits, d_weights = np.abs(draw(3, (9, 12))), draw(4, (9, 4))
    experts = np.argsort(draw(5, (9, 12)), axis=1)[:, :4].astype(np.int32)
    how = {"score": score, "normalize": normalize, "scale": 2.0}
    routed, d_logits = call(logits, 4, d_weights, None, experts=experts, **how)
    np.testing.assert_array_equal(routed.experts, experts)
    assert_close(routed.weights, oracle.weigh(logits, experts, **how), terms=4)
    assert_close(d_logits, oracle.gradient(logits, experts, d_weights, **how), terms=16)
    some = experts.copy()
    some[:, 2:] = [-1, 12]
    routed, d_logits = call(logits, 4, d_weights, None, experts=some, **how)
    assert not routed.weights[:, 2:].any()
    assert_close(routed.weights[:, :2], oracle.weigh(logits, experts[:, :2], **how), terms=4)
    wanted = oracle.gradient(logits, experts[:, :2], d_weights[:, :2], **how)
    assert_close(d_logits, wanted, terms=16)


@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("normalize", [False, True])
def test_scores_that_are_given(normalize, implementation):
    """Padding has no weights; scores that add up to zero are divided by one."""
    logits = np.float32([[-np.inf] * 4, [1, -1, -5, -5], [3, -np.inf, 1, -np.inf]])
    d_weights = np.float32([[1, 2]] * 3)
    options = {"score": "none", "normalize": normalize}
    routed, d_logits = call(logits, 2, d_weights, implementation, **options)
    weights = [[0, 0], [1, -1], [0.75, 0.25] if normalize else [3, 1]]
    np.testing.assert_allclose(routed.weights, weights)
    last = [-1 / 16, 0, 3 / 16, 0] if normalize else [1, 0, 2, 0]
    np.testing.assert_allclose(d_logits, [[0] * 4, [1, 2, 0, 0], last], rtol=1e-6)


@pytest.mark.parametrize("implementation", PATHS)
def test_a_nan_with_the_sign_bit_makes_its_group_the_best(implementation):
    logits = np.float32([[-np.nan, 1, 0.5, 0.4, 0.3, 2]])
    for score in ("sigmoid", "none"):
        groups = {"num_groups": 3, "top_groups": 1, "group_score": "max", "score": score}
        assert route(logits, 2, implementation=implementation, **groups).experts.tolist() == [
            [1, 0]
        ]


def test_scales_of_experts():
    logits, scales, d_weights = draw(6, (7, 9)), draw(7, (9,)), draw(8, (7, 3))
    router = moe.Router(3)

    @jax.jit
    def both(scales):
        op = lambda scales: moe.route(logits, router, expert_scale=scales).weights
        routed, pull = jax.vjp(op, scales)
        return routed, pull(d_weights)[0]

    routed, d_scales = both(scales)
    plain = route(logits, 3)
    np.testing.assert_allclose(routed, plain.weights * scales[plain.experts], rtol=1e-6)
    expected = np.zeros(9)
    np.add.at(expected, plain.experts, d_weights * plain.weights)
    assert_close(d_scales, expected, terms=21)


@pytest.mark.sampled(1, 2)
@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("options", [{}, {"score": "sigmoid", "normalize": True}], ids=str)
def test_small_floats(dtype, options, implementation):
    """Ties are many, and the choice is exact; the gradient has the dtype of the logits."""
    logits = draw(3, (40, 300), dtype)
    d_weights = draw(4, (40, 8))
    routed, d_logits = call(logits, 8, d_weights, implementation, **options)
    assert_same_bits(routed.experts, jax.lax.top_k(logits, 8)[1])
    full = {"score": "softmax", "normalize": False, "scale": 1.0, **options}
    experts = np.asarray(routed.experts)
    assert_close(routed.weights, oracle.weigh(logits, experts, **full))
    assert d_logits.dtype == dtype
    assert_close(d_logits, oracle.gradient(logits, experts, d_weights, **full))


HOSTILE = np.array(
    [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 1.0 + 2**-23, 1.0 - 2**-24, 1e-45, -1e-45],
    np.float32,
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_ties_and_what_is_no_number_as_top_k_has_them(dtype, implementation):
    rng = np.random.default_rng(5)
    logits = HOSTILE[rng.integers(0, len(HOSTILE), (64, 37))].astype(jnp.dtype(dtype))
    order = np.asarray(jax.lax.top_k(logits, 37)[1])
    for top_k in (1, 6, 37):
        routed = route(logits, top_k, implementation=implementation)
        assert_same_bits(routed.experts, order[:, :top_k])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("top_k", [4, 20])  # many are not unrolled
@pytest.mark.parametrize("close", ["first", "last", "all", "all below zero"])
def test_logits_that_differ_in_their_last_bit(close, top_k, implementation):
    """What the kernel's short keys leave out decides: within the choice, and at its end."""
    rng = np.random.default_rng(6)
    logits = rng.standard_normal((20, 100)).astype(np.float32)
    # Experts in the reverse order of their logits, so that a tie broken by number is wrong.
    steps = np.float32(5) + np.arange(12, dtype=np.float32) * np.spacing(np.float32(5))
    assert len(set(steps)) == len(steps)
    if close == "first":
        logits[:, [10, 80]] = steps[:2]
    elif close == "last":
        logits[:, : top_k - 1] += 10
        logits[:, [20, 90]] = steps[:2]
    elif close == "all":
        logits[:, 30:42] = steps
    else:
        logits -= 20
        logits[:, 60:72] = -steps[::-1]
    routed = route(logits, top_k, implementation=implementation)
    assert_same_bits(routed.experts, jax.lax.top_k(logits, top_k)[1])


@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_nan_stays_in_its_token(score, implementation):
    """A sigmoid's even in its weight; and with a bias and groups NaN is still a choice."""
    logits = draw(7, (6, 32))
    logits[2, 5] = 0
    clean = route(logits, 4, score=score, implementation=implementation)
    groups = {"bias": np.zeros(32, np.float32), "num_groups": 4, "top_groups": 2}
    for options, nan in ({}, np.nan), (groups, np.nan), (groups, -np.nan):
        logits[2, 5] = nan
        routed = route(logits, 4, score=score, implementation=implementation, **options)
        others = np.arange(6) != 2
        if not options:
            assert_same_bits(routed.weights[others], clean.weights[others])
        assert np.isfinite(routed.weights[others]).all()
        number = ~np.isnan(routed.weights[2])
        assert not number.any() if score == "softmax" else number.sum() == 3
        assert sorted(set(routed.experts[2].tolist())) == sorted(routed.experts[2].tolist())
        if score == "sigmoid":
            assert routed.experts[2, 0] == 5
            # The group of the NaN is the best.
            assert options == {} or (routed.experts[2] // 8 == 0).any()


@pytest.mark.parametrize("implementation", PATHS)
def test_groups_left_out_are_below_infinity(implementation):
    """What is kept is chosen before what is not, also where it is -inf or the least of all NaNs."""
    least = np.int32([-1]).view(np.float32)[0]
    close = 1 + np.float32(2**-23)
    logits = np.float32(
        [[0.5, *[-np.inf] * 3, 1, *[-np.inf] * 3], [0.5] * 4 + [1, least, 1, close]]
    )
    op = functools.partial(route, logits, 4, num_groups=2, top_groups=1)
    # A softmax with a NaN is NaN throughout, and all groups are as good.
    for score, second in (("softmax", [0, 1, 2, 3]), ("sigmoid", [7, 4, 6, 5])):
        routed = op(score=score, implementation=implementation)
        np.testing.assert_array_equal(routed.experts, [[4, 5, 6, 7], second])


@pytest.mark.parametrize("implementation", PATHS)
def test_equal_groups_in_their_order(implementation):
    logits = np.zeros((1, 12), np.float32)
    op = functools.partial(route, logits, 4, num_groups=4, top_groups=2)
    routed = op(bias=logits[0], score="sigmoid", implementation=implementation)
    np.testing.assert_array_equal(routed.experts, [[0, 1, 2, 3]])


@pytest.mark.parametrize("implementation", PATHS)
def test_a_group_is_worth_its_two_best(implementation):
    """Not its best, and not all of it."""
    scores = np.array([[0.9, 0.1, 0.1, 0.6, 0.6, 0.1, 0.5, 0.5, 0.5]], np.float32)
    logits = np.log(scores / (1 - scores))
    op = functools.partial(route, logits, 2, score="sigmoid", num_groups=3, top_groups=1)
    np.testing.assert_array_equal(op(implementation=implementation).experts, [[3, 4]])


@pytest.mark.parametrize("implementation", PATHS)
def test_equal_scores_of_groups_and_of_experts(implementation):
    """Sigmoids of 1: groups in their order, and in a group the logits decide."""
    logits = np.float32([[20, 21, 22, 23, 24, 25, 26, 27]])
    op = functools.partial(route, logits, 3, score="sigmoid", num_groups=2, top_groups=1)
    np.testing.assert_array_equal(op(implementation=implementation).experts, [[3, 2, 1]])


@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("normalize", [False, True])
def test_gradients_of_sigmoids_near_zero_and_one(normalize, implementation):
    """Where 1 - sigmoid is rounded to zero, its gradient is still a number."""
    logits = np.float32([[17, 18, 20, 25], [-20, -25, -18, -17], [40, -40, 0, 18]])
    d_weights = draw(13, (3, 4))
    options = {"score": "sigmoid", "normalize": normalize}
    routed, d_logits = call(logits, 4, d_weights, implementation, **options)
    order = np.asarray(routed.experts)
    taken = np.take_along_axis(logits, order, 1).astype(np.float64)
    weights, upstream = 1 / (1 + np.exp(-taken)), d_weights
    if normalize:
        weights /= weights.sum(1, keepdims=True)
        upstream = d_weights - (d_weights * weights).sum(1, keepdims=True)
    expected = weights * upstream / (1 + np.exp(taken))
    actual = np.take_along_axis(np.asarray(d_logits), order, 1)
    np.testing.assert_allclose(actual, expected, rtol=2e-5 if not normalize else 1e-3)


FAR_AWAY = {
    "sums that are below the smallest float": [[-1e9, -1e9 - 64, -2e9, -1e9]],
    "sums of about 1e-26": [[-60, -61, -62, -60]],
    "padding beside a token": [[-np.inf] * 4, [1, -np.inf, 2, -np.inf]],
    "one left": [[-np.inf, -np.inf, -60, -np.inf]],
    "sigmoids of one": [[100, 90, 120, 110]],
}


@pytest.mark.sampled
@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("case", FAR_AWAY)
def test_tiny_scores_have_shares_and_none_are_zeros(case, score, implementation):
    """Normalised: the softmax of the scores' logarithms, zeros where all logits are -inf."""
    logits = np.float32(FAR_AWAY[case])
    d_weights = draw(14, (len(logits), 2))
    routed, d_logits = call(
        logits, 2, d_weights, implementation, score=score, normalize=True, scale=3.0
    )
    wide = logits.astype(np.float64)
    logs = wide if score == "softmax" else -np.logaddexp(0, -wide)
    logs = np.take_along_axis(logs, np.asarray(routed.experts), 1)
    parts = np.exp(logs - np.maximum(logs.max(1, keepdims=True), -1e300))
    weights = parts / np.maximum(parts.sum(1, keepdims=True), 1e-300)
    np.testing.assert_allclose(routed.weights, 3 * weights, rtol=1e-5)
    moved = 3 * weights * (d_weights - (weights * d_weights).sum(1, keepdims=True))
    if score == "sigmoid":
        moved /= 1 + np.exp(np.take_along_axis(wide, np.asarray(routed.experts), 1))
    expected = np.zeros_like(wide)
    np.put_along_axis(expected, np.asarray(routed.experts), moved, 1)
    np.testing.assert_allclose(d_logits, expected, rtol=1e-4, atol=1e-6)
    router = moe.Router(2, score=score, normalize=True, scale=3.0)
    op = lambda x: moe.route(x, router, implementation=implementation)
    along = jax.jit(lambda x, by: jax.jvp(lambda x: op(x).weights, (x,), (by,))[1])
    assert np.isfinite(along(logits, np.ones_like(logits))).all()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("biased", [False, True])
def test_padding_has_no_weights_and_no_gradient(biased, score, implementation):
    """Tokens whose logits are all -inf, not normalised; with a bias the best of it are chosen."""
    logits = np.full((2, 8), -np.inf, np.float32)
    logits[1] = draw(15, 8)
    bias = np.arange(8, dtype=np.float32) if biased else None
    routed, d_logits = call(logits, 3, draw(16, (2, 3)), implementation, score=score, bias=bias)
    assert_same_bits(np.asarray(routed.weights)[0], np.zeros(3, np.float32))
    assert_same_bits(np.abs(np.asarray(d_logits)[0]), np.zeros(8, np.float32))
    assert np.isfinite(routed.weights).all()
    assert np.isfinite(d_logits).all()
    np.testing.assert_array_equal(routed.experts[0], [7, 6, 5] if biased else [0, 1, 2])


@pytest.mark.parametrize("implementation", PATHS)
def test_bias_chooses_and_does_not_weigh(implementation):
    logits = draw(8, (4, 8))
    bias = np.where(np.arange(8) == 3, np.float32(100), 0)

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def loss(logits, bias):
        how = {"bias": bias, "implementation": implementation}
        routed = moe.route(logits, moe.Router(2, score="sigmoid"), **how)
        return jnp.sum(routed.weights), routed

    (_, routed), grads = loss(logits, bias)
    routed = jax.tree.map(np.asarray, routed)
    np.testing.assert_array_equal(routed.experts[:, 0], 3)
    np.testing.assert_allclose(routed.weights[:, 0], 1 / (1 + np.exp(-logits[:, 3])), rtol=1e-6)
    assert_same_bits(grads[1], np.zeros(8, np.float32))


@pytest.mark.parametrize("implementation", PATHS)
def test_softmax_of_the_chosen_is_the_softmax_of_all_normalised(implementation):
    """The routers of Mixtral and gpt-oss, written as their own code has them."""
    logits = draw(9, (16, 32))
    routed = route(logits, 4, normalize=True, implementation=implementation)

    @jax.jit
    def routers(logits):
        taken, experts = jax.lax.top_k(logits, 4)
        probs, same_experts = jax.lax.top_k(jax.nn.softmax(logits), 4)
        return (experts, jax.nn.softmax(taken)), (same_experts, probs / probs.sum(1, keepdims=True))

    for experts, weights in routers(logits):
        assert_same_bits(routed.experts, experts)
        np.testing.assert_allclose(routed.weights, weights, rtol=2e-6)


@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("normalize", [False, True])
def test_small_weights_do_not_vanish(normalize, implementation):
    """Logits far below the best: normalised, the chosen have their shares of each other."""
    logits = np.array([[0, *[-500] * 7]], np.float32)
    bias = np.array([-1e3, *[0] * 7], np.float32)
    op = functools.partial(route, logits, 2, bias=bias, normalize=normalize)
    weights = op(implementation=implementation).weights
    np.testing.assert_allclose(weights, [[0.5, 0.5]] if normalize else [[0, 0]])


@pytest.mark.parametrize("implementation", [*PATHS, None])
def test_no_tokens(implementation):
    routed, d_logits = call(draw(0, (0, 8)), 2, draw(0, (0, 2)), implementation)
    assert routed.weights.shape == routed.experts.shape == (0, 2)
    assert d_logits.shape == (0, 8)


def test_every_run_gives_the_same_bits():
    logits, d_weights = draw(10, (32, 64)), draw(11, (32, 4))
    runs = [call(logits, 4, d_weights, "interpret") for _ in range(2)]
    jax.tree.map(assert_same_bits, *runs)


# The laws, on plain JAX and on the kernel.
sizes = st.tuples(st.integers(1, 6), st.integers(1, 24), st.integers(0, 2**31 - 1))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("implementation", PATHS)
@given(sizes=sizes, score=st.sampled_from(["softmax", "sigmoid"]), data=st.data())
def test_laws(implementation, sizes, score, data):
    num_tokens, num_experts, seed = sizes
    top_k = data.draw(st.integers(1, num_experts))
    scale = data.draw(st.sampled_from([0.0, 1.0, 2.5, -3.0]))
    logits = draw(seed, (num_tokens, num_experts))
    op = functools.partial(route, top_k=top_k, score=score, implementation=implementation)
    routed = op(logits, normalize=True, scale=scale)

    # Normalised weights sum up to the scale, and stand in the order of their logits.
    np.testing.assert_allclose(routed.weights.sum(1), scale, rtol=1e-5, atol=1e-6)
    taken = np.take_along_axis(logits, routed.experts, 1)
    assert (np.diff(taken, axis=1) <= 0).all()

    # Experts that are named otherwise are chosen alike: no logits are equal.
    names = np.random.default_rng(seed).permutation(num_experts)
    renamed = op(logits[:, names], normalize=True, scale=scale)
    assert_same_bits(names[renamed.experts].astype(np.int32), routed.experts)
    np.testing.assert_allclose(renamed.weights, routed.weights, rtol=1e-5, atol=1e-7)

    # A softmax does not see what is added to all logits.
    if score == "softmax":
        # Without negative zeros, which top_k puts below zero: both are 16 when moved.
        eighths = np.round(logits * 8) / 8 + np.float32(0)
        moved = op(eighths + 16)
        rounded = op(eighths)
        assert_same_bits(moved.experts, rounded.experts)
        np.testing.assert_allclose(moved.weights, rounded.weights, rtol=1e-5, atol=1e-7)


def test_a_policy_keeps_the_routing(capsys):
    policy = jax.checkpoint_policies.save_only_these_names("triax_routing")
    layer = lambda x: jnp.sin(moe.route(x, moe.Router(3), implementation="xla").weights)
    jax.ad_checkpoint.print_saved_residuals(jax.checkpoint(layer, policy=policy), draw(12, (6, 12)))
    lines = capsys.readouterr().out.splitlines()
    kept = {line.split()[0] for line in lines if "argument" not in line and "constant" not in line}
    assert kept == {"f32[6,3]", "i32[6,3]"}
