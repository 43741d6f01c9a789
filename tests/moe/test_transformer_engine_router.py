"""TransformerEngine's router names against what its documentation tells, written in plain JAX."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.moe.router.case import scores_of
from triax import moe
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe import transformer_engine as te

PATHS = ["xla", "interpret"]
TOKENS, EXPERTS = 20, 16


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32) * 2


def dense(
    logits, topk, pre=False, groups=-1, group_topk=-1, factor=1.0, score="softmax", bias=None
):
    """The documented steps, one after the other: score, bias, groups, top-k, softmax, scale."""
    scores = logits
    if score == "sigmoid":
        scores = jax.nn.sigmoid(logits)
    elif pre:
        scores = jax.nn.softmax(logits)
    choice = scores if bias is None else scores + bias
    if groups > 0 and group_topk > 0:
        grouped = choice.reshape(len(logits), groups, -1)
        sums = jax.lax.top_k(grouped, topk // group_topk)[0].sum(2)
        kept = jax.nn.one_hot(jax.lax.top_k(sums, group_topk)[1], groups).sum(1) > 0
        choice = jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(logits.shape)
    chosen = jax.nn.one_hot(jax.lax.top_k(choice, topk)[1], logits.shape[1]).sum(1) > 0
    if score == "softmax" and not pre:
        probs = jax.nn.softmax(jnp.where(chosen, scores, -jnp.inf))
    else:
        probs = jnp.where(chosen, scores, 0)
        if score == "sigmoid" and topk > 1:
            probs = probs / probs.sum(1, keepdims=True)
    return probs * factor, chosen


@pytest.mark.sampled(2, 2)
@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize(
    ("kind", "topk", "groups"),  # a group's score is that of its topk // group_topk best
    [
        ("softmax", 1, None),
        ("softmax", 8, (4, 2)),
        ("pre", 4, None),
        ("pre", 2, (4, 2)),
        ("sigmoid", 1, None),
        ("sigmoid", 8, (4, 2)),
        ("bias", 4, None),
        ("bias", 2, (4, 2)),
    ],
)
def test_probs_and_map(kind, topk, groups, implementation):
    grouped = dict(zip(("num_groups", "group_topk"), groups or (), strict=False))
    logits = draw(0, TOKENS, EXPERTS)
    logits[::2, 1::4] = logits[::2, 0::4]  # two of each group are equal
    bias = draw(1, EXPERTS) * np.float32(0.1) if kind == "bias" else None
    if bias is not None:
        bias[1::4] = bias[0::4]
    pre, score = kind == "pre", "sigmoid" if kind in ("sigmoid", "bias") else "softmax"
    d_probs = draw(2, TOKENS, EXPERTS)

    def ours(logits):
        return te.fused_topk_with_score_function(
            logits, topk, pre, scaling_factor=1.2, score_function=score, expert_bias=bias,
            implementation=implementation, **grouped,
        )  # fmt: skip

    def theirs(logits):
        return dense(logits, topk, pre, *(groups or (-1, -1)), 1.2, score, bias)

    def with_gradient(function):
        (probs, chosen), pull = jax.vjp(function, logits)
        none = np.zeros(chosen.shape, jax.dtypes.float0)
        return probs, chosen, pull((d_probs, none))[0]

    (probs, chosen, d_logits), (e_probs, e_chosen, e_d_logits) = (
        jax.jit(with_gradient, static_argnums=0)(function) for function in (ours, theirs)
    )
    assert chosen.dtype == jnp.bool_
    np.testing.assert_array_equal(chosen, e_chosen)
    np.testing.assert_array_equal(np.asarray(probs) != 0, e_chosen)
    np.testing.assert_allclose(probs, e_probs, rtol=2e-6)
    np.testing.assert_allclose(d_logits, e_d_logits, atol=2e-6)


@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("score", [te.ScoreFunction.SOFTMAX, "sigmoid"])
def test_scores_for_the_auxiliary_loss(score, implementation):
    """Those of all experts, whatever the other arguments say; and the loss made of them."""
    logits = draw(3, TOKENS, EXPERTS)

    @jax.jit
    def choose(logits):
        return te.fused_topk_with_score_function(
            logits, 4, True, 4, 2, 3.0, score, None, True, implementation=implementation
        )

    scores, chosen = map(np.asarray, choose(logits))
    name = "sigmoid" if score == "sigmoid" else "softmax"
    expected = scores_of(logits, name)
    expected /= expected.sum(1, keepdims=True)
    np.testing.assert_allclose(scores, expected, rtol=2e-6)
    np.testing.assert_array_equal(chosen, logits >= np.sort(logits)[:, -4:-3])

    counts = chosen.sum(0)
    loss = jax.jit(te.fused_moe_aux_loss, static_argnums=(2, 3))(scores, counts, 4, 0.01)
    total = (expected.sum(0) * counts).sum() * EXPERTS * 0.01 / (4 * TOKENS**2)
    np.testing.assert_allclose(loss, total, rtol=1e-5)
    balance = jax.jit(functools.partial(moe.load_balancing_loss, score=name))
    same = 0.01 * balance(logits, counts)
    np.testing.assert_allclose(loss, same, rtol=1e-5)


def test_the_map_as_bits():
    logits = draw(4, TOKENS, 13)
    call = functools.partial(te.fused_topk_with_score_function, logits, 3)
    names = "bitmap_u8", 1, te.RoutingMapFormat.BITMAP_U8
    plain, *maps = jax.jit(
        lambda: [call()[1]] + [call(routing_map_format=name)[1] for name in names]
    )()
    for bits in maps:
        assert bits.dtype == jnp.uint8
        unpacked = np.unpackbits(np.asarray(bits), axis=1, count=13, bitorder="little")
        np.testing.assert_array_equal(unpacked, plain)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (
            {"score_function": "relu"},
            ArgumentValueError,
            "'sqrtsoftplus', or a ScoreFunction",
        ),
        ({"routing_map_format": 7}, ArgumentValueError, "or a RoutingMapFormat; got 7"),
        (
            {"expert_bias": np.zeros(EXPERTS, np.float32)},
            ArgumentValueError,
            "needs score_function='sigmoid'",
        ),
        ({"scaling_factor": jnp.ones(())}, ArgumentTypeError, "`scaling_factor` must be a Python"),
        ({"topk": 17}, ArgumentValueError, "`topk` must be at most the 16 experts"),
        (
            {"topk": 17, "compute_aux_scores": True},
            ArgumentValueError,
            "`topk` must be at most the 16 experts of `logits`",
        ),
        ({"num_groups": 5, "group_topk": 2}, ArgumentValueError, "`num_groups` must divide"),
        ({"num_groups": 4, "group_topk": 5}, ArgumentValueError, "`group_topk` must be at most"),
        (
            {"num_groups": 4, "group_topk": 3, "topk": 2},
            ArgumentValueError,
            "least `group_topk`",
        ),
    ],
)
def test_what_is_wrong_is_named(change, error, text):
    arguments = {"logits": draw(5, TOKENS, EXPERTS), "topk": 4, **change}
    with pytest.raises(error) as caught:
        te.fused_topk_with_score_function(**arguments)
    assert text in str(caught.value)
