"""route by examples, and what case.py does not see: NaNs, scales of experts, what is kept."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.moe import flat
from triax import moe
from triax.moe.router import ops
from triax.moe.router.configs import RouterSpec
from triax.testing import assert_close, assert_same_bits

PATHS = ["xla", "interpret"]
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


def draw(seed, shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32) * 2


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


# Logits, options, and the experts, where scores of groups or of experts are equal or NaN.
SCORES = np.float32([[0.9, 0.1, 0.1, 0.6, 0.6, 0.1, 0.5, 0.5, 0.5]])
GROUPED = {
    "equal groups in their order": ([[0] * 12], {"num_groups": 4, "top_groups": 2}, [0, 1, 2, 3]),
    "a group is worth its two best": (
        np.log(SCORES / (1 - SCORES)),  # not its best, and not all of it
        {"num_groups": 3, "top_groups": 1},
        [3, 4],
    ),
    "a group is worth its best once": (
        [[3, 3, 1, 4, 2, 0]],
        {"num_groups": 2, "top_groups": 1, "group_score": "max", "score": "none"},
        [3, 4],
    ),
    # Of 128 places keys lack eight bits.
    "the first bit that keys lack": ([[5, 5 + 2**-14] + [0] * 98], {"score": "softmax"}, [1, 0]),
    "in a group the logits decide between sigmoids of one": (
        [[20, 21, 22, 23, 24, 25, 26, 27]],
        {"num_groups": 2, "top_groups": 1},
        [3, 2, 1],
    ),
    "a NaN with the sign bit makes its group the best": (
        [[-np.nan, 1, 0.5, 0.4, 0.3, 2]],
        {"num_groups": 3, "top_groups": 1, "group_score": "max"},
        [1, 0],
    ),
    "also of scores that are given": (
        [[-np.nan, 1, 0.5, 0.4, 0.3, 2]],
        {"num_groups": 3, "top_groups": 1, "group_score": "max", "score": "none"},
        [1, 0],
    ),
}


@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("name", GROUPED)
def test_groups(name, implementation):
    logits, options, experts = GROUPED[name]
    router = {"score": "sigmoid"} | options
    routed = route(np.float32(logits), len(experts), implementation=implementation, **router)
    assert routed.experts.tolist() == [experts]


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


def test_a_policy_keeps_the_routing(capsys):
    policy = jax.checkpoint_policies.save_only_these_names("triax_routing")
    layer = lambda x: jnp.sin(moe.route(x, moe.Router(3), implementation="xla").weights)
    jax.ad_checkpoint.print_saved_residuals(jax.checkpoint(layer, policy=policy), draw(12, (6, 12)))
    lines = capsys.readouterr().out.splitlines()
    kept = {line.split()[0] for line in lines if "argument" not in line and "constant" not in line}
    assert kept == {"f32[6,3]", "i32[6,3]"}


def test_gradients_by_experts_that_are_given_are_rounded_once():
    """Those of a chosen logit and of the softmax's sum nearly cancel."""
    logits = jnp.array([[10.0, 3.0, 0.0, 1.0]], jnp.float16)
    experts, router = jnp.array([[0, 2]]), moe.Router(2, scale=3.0)
    total = lambda logits: jnp.sum(moe.route(logits, router, experts=experts).weights)
    wanted = jax.grad(total)(logits.astype(jnp.float32)).astype(jnp.float16)
    np.testing.assert_array_equal(jax.grad(total)(logits), wanted)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "none"])
def test_experts_that_there_are_not_weigh_nothing_beside_a_nan(score):
    logits, experts = jnp.array([[jnp.nan, 1.0, 2.0]]), jnp.array([[-1, 3, 0]])
    weights = moe.route(logits, moe.Router(3, score=score), experts=experts).weights
    np.testing.assert_array_equal(weights, [[0, 0, np.nan]])


@pytest.mark.parametrize("implementation", PATHS)
def test_of_equal_scores_no_more_count_than_a_group_is_worth(implementation):
    """3 + 3 + 1 is less than 4 + 2 + 1.5."""
    spec = RouterSpec(2, "none", num_groups=2, top_groups=1, group_best=3)
    logits = jnp.float32([[3, 3, 1, 1, 4, 2, 1.5, 0]])
    assert ops.choose(logits, None, spec, implementation).experts.tolist() == [[4, 5]]
