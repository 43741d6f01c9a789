"""The losses in cases whose results are plain, and of arrays of more dimensions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.moe.router.case import scores_of
from triax import moe
from triax.testing import assert_close

TOKENS, EXPERTS, TOP_K = 50, 12, 3


def draw(dtype="float32"):
    logits = np.random.default_rng(0).standard_normal((TOKENS, EXPERTS)) * 2
    return logits.astype(jnp.dtype(dtype))


def test_load_balancing_loss_is_one_where_all_is_even():
    loss = jax.jit(moe.load_balancing_loss)
    counts = np.full(EXPERTS, 7)
    np.testing.assert_allclose(loss(draw(), counts), 1, rtol=1e-6)
    one = np.zeros(EXPERTS, int)
    one[2] = 9
    alone = np.zeros((4, EXPERTS), np.float32)
    alone[:, 2] = 100
    np.testing.assert_allclose(loss(alone, one), EXPERTS, rtol=1e-6)


def test_load_balancing_loss_drives_tokens_away():
    counts = np.zeros(EXPERTS, int)
    counts[2] = 9
    gradient = np.asarray(jax.jit(jax.grad(moe.load_balancing_loss))(draw(), counts))
    assert (gradient[:, 2] > 0).all()
    np.testing.assert_allclose(gradient.sum(1), 0, atol=1e-7)


@pytest.mark.parametrize("lead", [(5, 10), (2, 5, 5)])
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "none"])
def test_leading_dimensions_are_of_tokens_too(lead, score):
    """As `feed_forward` takes them, with a loss that is a scalar all the same."""
    logits, counts = np.abs(draw()), np.arange(EXPERTS)
    counts[3] = 0

    def both(logits):
        balance = moe.load_balancing_loss(logits, counts, score=score)
        return jnp.stack([balance, moe.router_z_loss(logits)])

    expected, pull = jax.vjp(both, logits)
    losses, pull_batched = jax.vjp(jax.jit(both), logits.reshape(*lead, EXPERTS))
    assert losses.shape == (2,)
    assert_close(losses, expected, terms=TOKENS)
    seed = np.float32([1, 2])
    assert_close(pull_batched(seed)[0].reshape(logits.shape), pull(seed)[0], terms=4)


def test_the_losses_of_a_layer_of_sequences():
    rng = np.random.default_rng(1)
    x, logits = rng.standard_normal((4, 6, 8)), rng.standard_normal((4, 6, EXPERTS))
    weights = rng.standard_normal((EXPERTS, 8, 8)).astype(np.float32)
    experts = moe.Experts(weights, weights, activation="relu2")
    x, logits = x.astype(np.float32), logits.astype(np.float32)
    out = moe.feed_forward(x, logits, experts, moe.Router(TOP_K))
    flat = logits.reshape(24, EXPERTS)
    balance = [moe.load_balancing_loss(of, out.group_counts) for of in (logits, flat)]
    assert_close(*balance, terms=24)
    assert_close(*map(moe.router_z_loss, (logits, flat)), terms=24)


@pytest.mark.parametrize("cut", [P("a", "b"), P(None, "a", "b"), P(("a", "b"))])
def test_sequences_that_are_cut_over_explicit_axes(cut):
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    logits, counts = draw()[:48].reshape(4, 12, EXPERTS), np.arange(EXPERTS)
    both = lambda of: jnp.stack([moe.load_balancing_loss(of, counts), moe.router_z_loss(of)])
    with jax.set_mesh(mesh):
        found = jax.jit(both)(jax.device_put(logits, NamedSharding(mesh, cut)))
    assert_close(found, both(logits), terms=48)


def test_without_tokens_there_is_no_loss():
    for lead in ((0,), (3, 0)):
        logits = np.zeros((*lead, EXPERTS), np.float32)
        assert jax.jit(moe.router_z_loss)(logits) == 0
        assert jax.jit(moe.load_balancing_loss)(logits, np.zeros(EXPERTS, np.int32)) == 0


def test_losses_of_one_token():
    logits = draw()[:1]
    counts = np.bincount([np.argmax(logits[0])], minlength=EXPERTS)
    scores = scores_of(np.asarray(logits, np.float64), "softmax")[0]
    size = np.log(np.exp(logits[0].astype(float)).sum())
    expected = EXPERTS * scores.max()
    assert_close(jax.jit(moe.load_balancing_loss)(logits, counts), expected, terms=EXPERTS)
    assert_close(jax.jit(moe.router_z_loss)(logits), size**2, terms=EXPERTS)
