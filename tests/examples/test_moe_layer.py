"""The example layer against its dense form: every expert for every token, masked by one-hots."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TOKENS, WIDTH, HIDDEN, EXPERTS = 21, 6, 10, 5


def load(name):
    """An example as a module. Examples are files, not a package."""
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_is_in_the_gallery(name, printed):
    """The page shows what the example prints, but for numbers, which differ by version."""
    shown = (EXAMPLES.parent / "docs" / "outputs" / f"{name}.txt").read_text(encoding="utf-8")
    words = lambda text: re.sub(r"\d[\w.,+-]*|-(?=\d)", "#", text).split()
    again = "run python tools/gallery_outputs.py"
    assert words(printed) == words(shown), again


layers = load("moe_layer")


def dense_layer(params, x, *, top_k, capacity=None):
    """The same, from one-hots: no plan, no rows."""
    logits = x @ params["router"]
    probs = jnp.exp(logits) / jnp.sum(jnp.exp(logits), axis=1, keepdims=True)
    selected = jnp.argsort(-probs, axis=1)[:, :top_k]
    chosen = jax.nn.one_hot(selected, EXPERTS, dtype=x.dtype)  # [tokens, top_k, experts]
    weights = jnp.sum(chosen * probs[:, None], axis=2)
    if top_k > 1:
        weights /= jnp.sum(weights, axis=1, keepdims=True)
    load = jnp.sum(chosen, axis=(0, 1))
    kept = chosen
    if capacity is not None:
        pairs = chosen.reshape(-1, EXPERTS)
        kept = (pairs * (jnp.cumsum(pairs, axis=0) <= capacity)).reshape(chosen.shape)
    gate, up = jnp.split(jnp.einsum("tw,ewh->teh", x, params["experts"].w_gate_up), 2, axis=2)
    each = jnp.einsum("teh,ehw->tew", gate / (1 + jnp.exp(-gate)) * up, params["experts"].w_down)
    y = jnp.einsum("tk,tke,tew->tw", weights, kept, each)
    share = load / (TOKENS * top_k)
    return y, layers.Usage(EXPERTS * jnp.sum(share * jnp.mean(probs, axis=0)), load)


def make(dtype=jnp.float32, num_layers=None):
    init = functools.partial(
        layers.init_layer, width=WIDTH, hidden=HIDDEN, num_experts=EXPERTS, dtype=dtype
    )

    @jax.jit
    def draw(key):
        params = (
            init(key) if num_layers is None else jax.vmap(init)(jax.random.split(key, num_layers))
        )
        return params, jax.random.normal(key, (TOKENS, WIDTH), dtype)

    return draw(jax.random.key(0))


def loss_of(layer, **options):
    def loss(params, x):
        y, usage = layer(params, x, **options)
        return jnp.sum(jnp.sin(y)) + jnp.sum(usage.balance_loss), (y, usage)

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))


def check_close(actual, expected, tolerance):
    def check(actual, expected):
        scale = max(1.0, np.max(np.abs(np.asarray(expected))))
        np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * scale)

    jax.tree.map(check, actual, expected)


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize(
    ("top_k", "capacity", "dtype", "tolerance"),
    [
        (1, None, "float64", 2e-6),  # the router's weights are float32
        (2, 4, "float64", 2e-6),
        (EXPERTS, None, "float32", 5e-6),
    ],
)
def test_layer_is_its_dense_form(top_k, capacity, dtype, tolerance):
    with jax.enable_x64(dtype == "float64"):
        params, x = make(dtype)
        options = {"top_k": top_k, "capacity": capacity}
        actual = loss_of(layers.moe_layer, **options)(params, x)
        expected = loss_of(dense_layer, **options)(params, x)
        assert actual[0][1][0].dtype == dtype
        check_close(actual, expected, tolerance)


@pytest.mark.slow("what it calls has tests of its own")
def test_layer_through_the_kernels():
    params, x = make()
    actual = loss_of(layers.moe_layer, top_k=2, implementation="interpret")(params, x)
    check_close(actual, loss_of(layers.moe_layer, top_k=2)(params, x), 5e-6)


@pytest.mark.slow("what it calls has tests of its own")
def test_stack_is_the_loop():
    """`scan` and `jax.checkpoint` change nothing."""
    params, x = make(num_layers=2)

    def loop(params, x):
        usages = []
        for i in range(2):
            layer = jax.tree.map(lambda leaf, i=i: leaf[i], params)
            y, usage = dense_layer(layer, layers.normalise(x), top_k=2)
            x = x + y
            usages.append(usage)
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *usages)

    actual = loss_of(layers.moe_stack, top_k=2)(params, x)
    assert actual[0][1][1].load.shape == (2, EXPERTS)
    check_close(actual, loss_of(loop)(params, x), 2e-5)


def test_policy_keeps_what_was_routed(capsys):
    """The tokens in expert order and integers of the plan, and nothing else."""
    params, x = make()
    layer = jax.checkpoint(
        lambda params, x: layers.moe_layer(params, x, top_k=2)[0], policy=layers.KEEP_ROUTED
    )
    jax.ad_checkpoint.print_saved_residuals(layer, params, x)
    lines = capsys.readouterr().out.splitlines()
    kept = [line for line in lines if "argument" not in line and "constant" not in line]
    floats = [line for line in kept if not line.startswith("i32")]
    assert len(floats) == 1, kept
    assert floats[0].startswith(f"f32[{TOKENS * 2},{WIDTH}]")


def test_bfloat16_layer_keeps_its_dtype():
    loss = loss_of(layers.moe_layer, top_k=2)
    (_, (y, _)), (d_params, d_x) = jax.eval_shape(loss, *make(jnp.bfloat16))
    for array in jax.tree.leaves((y, d_x, d_params)):
        assert array.dtype == jnp.bfloat16
