"""The example of Flax NNX on a mesh: it resumes with the same bits, and is right on one device."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.examples.test_moe_layer import assert_is_in_the_gallery, load
from triax import moe
from triax.errors import ArgumentTypeError

pytestmark = [
    pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices"),
    pytest.mark.slow("Flax and Orbax take seconds to import"),
]


@pytest.fixture(scope="module")
def example():
    assert importlib.util.find_spec("flax"), "the extra `dev` has Flax and Orbax"
    return load("moe_nnx")


def test_program_resumes_with_the_same_bits(example, tmp_path, capsys):
    losses, same = example.main(tmp_path)
    assert same
    assert losses[-1] < 0.75 * losses[0]
    assert_is_in_the_gallery("moe_nnx", capsys.readouterr().out)


def test_a_state_that_is_not_resumed_has_other_bits(example, tmp_path, monkeypatch):
    """So that "the same bits" says something: here the moments of AdamW are forgotten."""
    resume = example.resume

    def forgetful(checkpoints, mesh):
        step, (layer, optimizer) = resume(checkpoints, mesh)
        return step, (layer, type(optimizer)(layer, optax.adamw(1e-2), wrt=example.nnx.Param))

    monkeypatch.setattr(example, "resume", forgetful)
    assert not example.main(tmp_path)[1]


def test_variables_are_refused_with_what_unwraps_them(example):
    """With the stand-ins of `tests/test_mistakes.py`; here they are Flax's own."""
    nnx, x, router = example.nnx, jnp.ones((4, 8)), moe.Router(2)
    experts = moe.Experts(jnp.ones((4, 8, 32)), jnp.ones((4, 16, 8)))
    logits = jnp.arange(16.0).reshape(4, 4)
    expected = moe.feed_forward(x, logits, experts, router).tokens
    for variables in jax.tree.map(nnx.Param, experts), nnx.Param(experts):
        with pytest.raises(ArgumentTypeError, match=r"Use `nnx\.as_pure\(experts\)`\.$"):
            moe.feed_forward(x, logits, variables, router)
        found = moe.feed_forward(x, logits, nnx.as_pure(variables), router).tokens
        np.testing.assert_array_equal(found, expected)


def test_a_step_is_that_of_one_device(monkeypatch):
    """Loss, and parameters after a step with gradients of all microbatches, if nothing drops."""
    example = load("moe_nnx")  # whose programs are not traced yet
    monkeypatch.setattr(example, "CAPACITY", 100)

    def loss(params, x, y):
        logits = x @ params["w_router"]
        out = moe.feed_forward(x, logits, params["experts"], moe.Router(2, normalize=True))
        balance = moe.load_balancing_loss(logits, out.group_counts)
        return jnp.mean((x + out.tokens - y) ** 2) + 0.01 * balance

    @jax.jit
    def step(params, batch):
        mean = lambda params: jnp.mean(jnp.array([loss(params, x, y) for x, y in batch]))
        value, gradients = jax.value_and_grad(mean)(params)
        optimizer = optax.adamw(1e-2)
        updates, _ = optimizer.update(gradients, optimizer.init(params), params)
        return value, optax.apply_updates(params, updates)

    whole = lambda layer: jax.device_get(
        {"w_router": layer.w_router[...], "experts": example.nnx.as_pure(layer.experts)}
    )
    with jax.set_mesh(example.make_mesh()):
        layer, optimizer = example.make()
        before = whole(layer)
        batch = example.batch(0)
        value, dropped = example.train_step(layer, optimizer, *batch)
        after = whole(layer)
    assert dropped == 0
    expected, params = step(before, list(zip(*jax.device_get(batch), strict=True)))
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    # Adam's first step is the gradient's sign: where that is near zero it may differ.
    for found, wanted in zip(jax.tree.leaves(after), jax.tree.leaves(params), strict=True):
        assert np.mean(np.abs(found - wanted) > 1e-4) < 1e-3


def test_a_checkpoint_is_resumed_on_another_mesh(example, tmp_path):
    meshes = (
        example.make_mesh(),
        jax.make_mesh(
            (2, 2),
            example.ALL,
            axis_types=2 * (example.AxisType.Explicit,),
            devices=jax.devices()[:4],
        ),
    )
    with example.ocp.CheckpointManager(tmp_path) as checkpoints:
        with jax.set_mesh(meshes[0]):
            state = example.make()
            example.train(state, range(example.SAVED_AT), checkpoints)
            saved = jax.device_get(example.nnx.state(state))
            checkpoints.wait_until_finished()
        with jax.set_mesh(meshes[1]):
            step, again = example.resume(checkpoints, meshes[1])
            assert step == example.SAVED_AT
            found = example.nnx.state(again)
            jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), saved)
            assert again[0].experts.w_down[...].sharding.mesh == meshes[1]
            value, _ = example.train_step(*again, *example.batch(step))
        assert np.isfinite(value)
