"""moe.ragged_dot and its gradients against a dense matmul, in TFLOP/s, as one JSON on stdout.

    python benchmarks/ragged_dot.py [shape …]

Each figure is the median of bursts of 30 ms after 120 ms of rest: without the rest a GPU that is at
its limit of power is measured, and what ran before decides. What is wrong is not timed.
"""

from __future__ import annotations

import functools
import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from triax import moe

SHAPES = {
    "mixtral": (32768, 4096, 14336, 8),
    "deepseek-v3": (65536, 7168, 2048, 32),
    "qwen3-235b": (65536, 4096, 1536, 16),
    "gpt-oss-120b": (65536, 2880, 2880, 16),
    "fine-grained": (65536, 2560, 1280, 64),
}
ROUNDS, BURST_S, REST_S = 3, 0.03, 0.12


def group_sizes(kind: str, rows: int, groups: int) -> jax.Array:
    rng = np.random.default_rng(1)
    shares = {
        "even": np.full(groups, 1 / groups),
        "uneven": rng.dirichlet(np.ones(groups)),
        "half in one": np.array([0.5] + [0.5 / (groups - 1)] * (groups - 1)),
    }[kind]
    sizes = rng.multinomial(rows, shares) if kind != "even" else np.full(groups, rows // groups)
    return jnp.asarray(sizes, jnp.int32)


def gradient(which, rows, weights, upstream, sizes):
    _, pull = jax.vjp(lambda x, w: moe.ragged_dot(x, w, sizes), rows, weights)
    return pull(upstream)[which]  # jit leaves the other one out


PRODUCTS = {
    "forward": lambda x, w, g, sizes: moe.ragged_dot(x, w, sizes),
    "rows' gradient": functools.partial(gradient, 0),
    "weights' gradient": functools.partial(gradient, 1),
}


@functools.partial(jax.jit, static_argnums=0)
def error(product, out, x, w, g, first, size, group):
    """Of one group, relative to its norm."""
    row = jnp.arange(x.shape[0])
    mine = ((row >= first) & (row < first + size))[:, None]
    x, g = jnp.where(mine, x, 0), jnp.where(mine, g, 0)
    if product == "weights' gradient":
        out, expected = out[group], x.T @ g
    else:
        expected = x @ w[group] if product == "forward" else g @ w[group].T
        out = jnp.where(mine, out, 0)
    expected = expected.astype(jnp.float32)
    return jnp.linalg.norm(out.astype(jnp.float32) - expected) / jnp.linalg.norm(expected)


def seconds(function, *args) -> float:
    time.sleep(REST_S)
    start = time.perf_counter()
    jax.block_until_ready(function(*args))
    calls = max(5, int(BURST_S / (time.perf_counter() - start)))
    start = time.perf_counter()
    for _ in range(calls):
        out = function(*args)
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / calls


def measure(name: str) -> dict[str, float]:
    rows, depth, columns, groups = SHAPES[name]
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(rows, depth), (groups, depth, columns), (rows, columns), (depth, columns)]
    x, w, g, one = (
        jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True)
    )
    calls = {"dense": (jax.jit(lambda x, w: x @ w), (x, one))}
    for product, function in PRODUCTS.items():
        jitted = jax.jit(function)
        for kind in ("even", "uneven", "half in one"):
            sizes = group_sizes(kind, rows, groups)
            out = jitted(x, w, g, sizes)
            ends = np.cumsum(sizes)
            for group in (0, int(np.argmax(sizes)), groups - 1):
                size = int(sizes[group])
                wrong = error(product, out, x, w, g, int(ends[group]) - size, size, group)
                if size and not wrong < 0.01:
                    sys.exit(f"{name}, {product}, {kind}: group {group} is wrong by {wrong}")
            calls[f"{product}, {kind}"] = (jitted, (x, w, g, sizes))
    calls["dense"][0](*calls["dense"][1]).block_until_ready()
    times = [{key: seconds(f, *args) for key, (f, args) in calls.items()} for _ in range(ROUNDS)]
    work = 2e-12 * rows * depth * columns
    return {key: round(work / float(np.median([t[key] for t in times])), 1) for key in calls}


if __name__ == "__main__":
    figures = {name: measure(name) for name in sys.argv[1:] or SHAPES}
    print(json.dumps({"device": jax.devices()[0].device_kind, "tflops": figures}, indent=1))
