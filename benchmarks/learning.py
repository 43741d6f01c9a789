"""Whether a model learns as well in 8 bits: the losses of training by each recipe, paired by seed.

A transformer of two layers, with 16 experts of which each token takes two, learns to predict the
next byte of Python's standard library, whose text lies on every machine. Every recipe has the same
seeds: the same first parameters and the same batches. The loss is that of text held out, in nats
per byte.

    python -m benchmarks.learning [--output FILE]
"""

from __future__ import annotations

import functools
import platform
import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import record
from triax import moe

RECIPES = {
    "bfloat16": None,
    "rows": "rows",
    "rows, weights' gradients too": moe.Recipe(weight_gradient="rows"),
    "blocks": "blocks",
}
SEEDS, STEPS, AT_ONCE = 5, 1000, 50
LAYERS, HIDDEN, HEADS, WIDTH, EXPERTS = 2, 256, 4, 256, 16
ROUTER = moe.Router(2, normalize=True)
BATCH, LENGTH, HELD_OUT = 16, 256, 16  # sequences, their bytes, batches of text held out
RATE, BALANCE = 1e-3, 0.01


def text():
    """Python's own modules in one array of bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    parts = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    return np.frombuffer(b"\n".join(parts), np.uint8).astype(np.int32)


def first(key):
    """Parameters, in float32."""
    keys = iter(jax.random.split(key, 16))
    normal = lambda *shape: jax.random.normal(next(keys), shape) * shape[-2] ** -0.5
    return {
        "embed": jax.random.normal(next(keys), (256, HIDDEN)) * 0.02,
        "positions": jax.random.normal(next(keys), (LENGTH, HIDDEN)) * 0.02,
        "qkv": normal(LAYERS, HIDDEN, 3 * HIDDEN),
        "out": normal(LAYERS, HIDDEN, HIDDEN) * 0.5,
        "router": normal(LAYERS, HIDDEN, EXPERTS),
        "gate_up": normal(LAYERS, EXPERTS, HIDDEN, 2 * WIDTH),
        "down": normal(LAYERS, EXPERTS, WIDTH, HIDDEN) * 0.5,
        "head": normal(HIDDEN, 256),
    }


def normalised(x):
    wide = x.astype("float32")
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def losses(params, tokens, recipe):
    """Cross-entropy in nats per byte, and the load-balancing loss."""
    half = jax.tree.map(lambda a: a.astype("bfloat16"), params)
    x = half["embed"][tokens[:, :-1]] + half["positions"]
    balance = 0.0
    for i in range(LAYERS):
        heads = (normalised(x) @ half["qkv"][i]).reshape(*x.shape[:2], 3, HEADS, -1)
        attended = jax.nn.dot_product_attention(*jnp.moveaxis(heads, 2, 0), is_causal=True)
        x += attended.reshape(x.shape) @ half["out"][i]
        y = normalised(x)
        logits = y.astype("float32") @ params["router"][i]
        experts = moe.Experts(half["gate_up"][i], half["down"][i])
        out = moe.feed_forward(y, logits, experts, ROUTER, recipe=recipe)
        x += out.tokens
        balance += moe.load_balancing_loss(logits.reshape(-1, EXPERTS), out.group_counts)
    scores = jax.nn.log_softmax((normalised(x) @ half["head"]).astype("float32"))
    return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], 2)), balance


def steps(state, batches, recipe):
    """Steps of Adam, and the loss of each."""

    def loss(params, batch):
        told, balance = losses(params, batch, recipe)
        return told + BALANCE * balance, told

    def step(state, batch):
        params, mean, square, number = state
        (_, told), gradient = jax.value_and_grad(loss, has_aux=True)(params, batch)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradient)
        square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, square, gradient)
        number += 1
        rate = RATE * jnp.minimum(number / 50, 0.5 + 0.5 * jnp.cos(jnp.pi * number / STEPS))
        rate *= jnp.sqrt(1 - 0.99**number) / (1 - 0.9**number)
        update = lambda p, m, s: p - rate * m / (jnp.sqrt(s) + 1e-8)
        return (jax.tree.map(update, params, mean, square), mean, square, number), told

    return jax.lax.scan(step, state, batches)


def batches_of(data, rng, count):
    starts = rng.integers(0, len(data) - LENGTH - 1, (count, BATCH, 1))
    return data[starts + np.arange(LENGTH + 1)]


def train(recipe, seed, data, held_out, run, evaluate):
    """The losses of the steps, and of the text held out at the end."""
    rng = np.random.default_rng(seed)
    params = first(jax.random.key(seed))
    zeros = jax.tree.map(jnp.zeros_like, params)
    state, told = (params, zeros, jax.tree.map(jnp.copy, zeros), jnp.float32(0)), []
    for _ in range(STEPS // AT_ONCE):
        state, some = run(state, batches_of(data, rng, AT_ONCE))
        told.append(some)
    return np.concatenate(jax.device_get(told)), float(np.mean(evaluate(state[0], held_out)))


def measure():
    data = text()
    held_out = batches_of(data[-len(data) // 10 :], np.random.default_rng(0), HELD_OUT)
    data = data[: -len(data) // 10]
    plain = None
    for name, recipe in RECIPES.items():
        run = jax.jit(functools.partial(steps, recipe=recipe), donate_argnums=0)
        # All are measured in bfloat16: what was learnt counts, not how it is read.
        evaluate = jax.jit(jax.vmap(lambda p, b: losses(p, b, None)[0], (None, 0)))
        each = [train(recipe, seed, data, held_out, run, evaluate) for seed in range(SEEDS)]
        curves, finals = zip(*each, strict=True)
        plain = np.array(finals) if plain is None else plain
        change = np.array(finals) / plain - 1
        yield (
            name,
            {
                "held_out": finals,
                "curve": np.mean(curves, 0).reshape(-1, AT_ONCE).mean(1).round(4).tolist(),
                "change": change.mean(),
                "largest_change": np.abs(change).max(),
            },
        )


if __name__ == "__main__":
    record.main(
        measure,
        text=f"the standard library of Python {platform.python_version()}",
        steps=STEPS,
        seeds=SEEDS,
        tokens_per_step=BATCH * LENGTH,
        layers=LAYERS,
        hidden=HIDDEN,
        width=WIDTH,
        experts=EXPERTS,
    )
