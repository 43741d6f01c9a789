"""Weights in 8 bits that are made once for several calls of the layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.moe.layer.test_recipes import ALL, layer
from triax import moe
from triax.errors import TriaxError
from triax.moe.layer import products
from triax.testing import assert_same_bits

RECIPES = [
    "rows",
    "blocks",
    ALL,
    moe.Recipe(None, "rows"),
    moe.Recipe("blocks", None),
    moe.Recipe("rows", "blocks", "float8_e5m2"),
]


def loss(weights, x, logits, recipe, **how):
    out = moe.feed_forward(x, logits, *weights, top_k=2, recipe=recipe, **how).tokens
    return jnp.sum(jnp.sin(out.astype(jnp.float32)))


def quantized(weights, recipe, **how):
    return jax.tree.map(lambda w: moe.quantize_weights(w, recipe, **how), weights)


def given(two=False, transposed=False):
    x, logits, w_gate_up, w_down = layer()
    weights = (tuple(jnp.split(w_gate_up, 2, axis=2)) if two else w_gate_up), w_down
    if transposed:
        weights = jax.tree.map(lambda w: jnp.swapaxes(w, 1, 2), weights)
    return weights, x, logits


@pytest.mark.sampled(6)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("weights_on", ["output", "input"])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_the_same_bits(recipe, weights_on, two, transposed):
    weights, *others = given(two, transposed)
    how = {"transpose_weights": transposed}
    made = quantized(weights, recipe, **how)
    how |= {"weights_on": weights_on}
    plain = jax.value_and_grad(loss, (0, 1))(weights, *others, recipe, **how)
    found = jax.value_and_grad(loss, (0, 1))(
        weights, *others, recipe, **how, quantized_weights=made
    )
    jax.tree.map(assert_same_bits, found, plain)


def test_what_was_made_is_what_is_multiplied(monkeypatch):
    """That of other weights makes another result, and the gradient is still of the weights."""
    weights, *others = given()
    made = quantized(jax.tree.map(jnp.zeros_like, weights), "rows")
    monkeypatch.setattr(products, "in_8_bits", None)  # nothing is quantized again
    value, gradients = jax.value_and_grad(loss)(weights, *others, "rows", quantized_weights=made)
    assert value == 0
    assert all(g.dtype == w.dtype for g, w in zip(gradients, weights, strict=True))


@pytest.mark.parametrize("recipe", ["rows", ALL], ids=str)
def test_over_microbatches(recipe):
    """Quantized outside of the loop, whose body then quantizes no weights."""
    weights, x, logits = given()
    parts = jnp.split(x, 2), jnp.split(logits, 2)
    batches = jax.tree.map(lambda *of: jnp.stack(of), *zip(*parts, strict=True))

    def step(weights, once):
        how = {"quantized_weights": quantized(weights, recipe)} if once else {}

        def add(total, batch):
            gradients = jax.grad(loss)(weights, *batch, recipe, **how)
            return jax.tree.map(jnp.add, total, gradients), None

        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, weights), batches)[0]

    found, plain = (jax.jit(step, static_argnums=1)(weights, once) for once in (True, False))
    jax.tree.map(assert_same_bits, found, plain)


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_tokens_cut_over_devices(axis_type):
    weights, x, logits = given()
    mesh = jax.make_mesh((4,), ("a",), axis_types=(axis_type,), devices=jax.devices()[:4])
    plain = jax.grad(loss)(weights, x, logits, "rows")

    @jax.jit
    def run(weights, x, logits):
        made = quantized(weights, "rows")
        return jax.grad(loss)(weights, x, logits, "rows", quantized_weights=made)

    with jax.set_mesh(mesh):
        put = lambda array: jax.device_put(array, NamedSharding(mesh, PartitionSpec("a")))
        found = run(weights, put(x), put(logits))
    for a, b in zip(found, plain, strict=True):
        a, b = (np.asarray(array, np.float64) for array in (a, b))
        assert np.linalg.norm(a - b) < 5e-3 * np.linalg.norm(b)  # sums of parts, in bfloat16


def test_experts_cut_over_devices():
    weights, x, logits = given()
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    spec = PartitionSpec("a")

    def run(once):
        def part(weights, x, logits):
            how = {"quantized_weights": quantized(weights, "rows")} if once else {}
            return jax.grad(loss, (0, 1))(weights, x, logits, "rows", axis_name="a", **how)

        return jax.jit(jax.shard_map(part, mesh=mesh, in_specs=spec, out_specs=spec))

    jax.tree.map(assert_same_bits, *(run(once)(weights, x, logits) for once in (True, False)))


def square(**how):
    weights = jnp.ones((8, 96, 96), "bfloat16")
    return moe.quantize_weights(weights, "rows", **how)


ROWS = {"recipe": "rows"}


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({}, "`quantized_weights` is given, and `recipe` is not"),
        ({"recipe": "blocks"}, "for `w_gate_up` weights of another recipe"),
        (ROWS | {"transpose_weights": True}, "`w_gate_up`.* with transpose_weights=True"),
        (ROWS | {"quantized_weights": square()}, "must be a tuple of two"),
        (ROWS | {"quantized_weights": (square(), None)}, "makes of `w_down`"),
        (ROWS | {"quantized_weights": (jnp.ones(3), square())}, "makes of `w_gate_up`"),
        (
            ROWS | {"quantized_weights": (square(transpose_weights=True), square())},
            "`w_gate_up`, .* got one with transpose_weights=True",
        ),
        (
            ROWS | {"quantized_weights": (square(), quantized(given()[0], "rows")[1])},
            r"`w_down`, \(8, 96, 96\)",
        ),
    ],
)
def test_mistakes(how, match):
    """A square array of the wrong way round has the right shape."""
    x, logits = given()[1:]
    weights = [jnp.ones((8, 96, 96), "bfloat16")] * 2
    how = {"quantized_weights": (square(), square())} | how
    with pytest.raises(TriaxError, match=match):
        moe.feed_forward(x, logits, *weights, top_k=2, activation="relu2", **how)


@pytest.mark.parametrize(
    ("weights", "recipe", "match"),
    [
        (jnp.ones((8, 96)), "rows", "`weights` must have"),
        (jnp.ones((8, 96, 96), "float8_e4m3fn"), "rows", "`weights` .*float8_e4m3fn"),
        (jnp.ones((8, 96, 96)), None, "`recipe` must say"),
        (jnp.ones((8, 96, 96)), "columns", "`recipe` must be"),
    ],
)
def test_mistakes_of_quantize_weights(weights, recipe, match):
    with pytest.raises(TriaxError, match=match):
        moe.quantize_weights(weights, recipe)


def test_two_arrays_need_two():
    weights, x, logits = given(two=True)
    made = quantized(weights, "rows")
    with pytest.raises(TriaxError, match="must have two for `w_gate_up`"):
        loss(weights, x, logits, "rows", quantized_weights=(made[0][0], made[1]))
