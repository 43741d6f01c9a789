"""How fast `dispatch` and `combine` are on all GPUs of this host, and the layer with them.

Each GPU has 16,384 tokens of DeepSeek-V3's width, 8 of 256 experts each. Against them stands what
one would write by hand: `permute` to a row per (token, expert), two `all_to_all`s of these rows in
equal parts, `unpermute`. Times are the host's, of many calls after one another, in milliseconds.
Triax's results are checked before anything is timed. Prints a table and writes `--output`.

    python benchmarks/expert_parallel.py [--output FILE]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import gpu_record
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from triax import moe

TOKENS, HIDDEN, EXPERTS, TOP_K, WIDTH = 16384, 7168, 256, 8, 2048
LAYER_EXPERTS = 64  # of the whole layer: what the GPUs can hold with gradients
SAMPLES, CALLS = 7, 8
WAYS = {
    "triax": {},
    "tokens, padded": {"scheme": "token", "exchange": "padded"},
    "tokens, ragged": {"scheme": "token", "exchange": "ragged"},
    "choices": {"scheme": "choice"},
}
AXIS = "expert"


def exchange(rows):
    return jax.lax.all_to_all(rows, AXIS, split_axis=0, concat_axis=0, tiled=True)


def by_hand(x, weights, experts):
    """One row per (token, expert), as if every GPU got as many."""
    plan = moe.make_plan(experts, EXPERTS)
    rows = exchange(moe.permute(x, plan))
    rows = exchange(jax.lax.optimization_barrier(rows))
    return moe.unpermute(rows, plan, weights)


def by_triax(**options):
    def run(x, weights, experts):
        sent = moe.dispatch(x, weights, experts, EXPERTS, AXIS, num_rows=num_rows(), **options)
        rows = jax.lax.optimization_barrier(sent.rows)
        return moe.combine(rows, sent.plan)

    return run


def num_rows():
    """A fiftieth more than a GPU gets on average, which even choices never reach."""
    return TOKENS * TOP_K * 51 // 50


def with_gradients(function):
    def run(x, weights, experts, gradient):
        y, pull = jax.vjp(lambda x, weights: function(x, weights, experts), x, weights)
        return y, *pull(gradient)

    return run


def layer(x, logits, w_gate_up, w_down):
    weights, experts = moe.route(logits, TOP_K, normalize=True)
    sent = moe.dispatch(x, weights, experts, LAYER_EXPERTS, AXIS, num_rows=num_rows())
    h = moe.glu(moe.ragged_dot(sent.rows, w_gate_up, sent.group_sizes), sent.weights)
    return moe.combine(moe.ragged_dot(h, w_down, sent.group_sizes), sent.plan, weighted=True)


def layer_with_gradients(x, logits, w_gate_up, w_down, gradient):
    y, pull = jax.vjp(layer, x, logits, w_gate_up, w_down)
    return y, *pull(gradient)


def time_ms(program, *operands):
    """The median over samples of several calls."""
    jax.block_until_ready(program(*operands))
    samples = []
    for _ in range(SAMPLES):
        start = time.perf_counter()
        for _ in range(CALLS):
            out = program(*operands)
        jax.block_until_ready(out)
        samples.append(1e3 * (time.perf_counter() - start) / CALLS)
    return statistics.median(samples)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if problem := gpu_record.missing_gpu():
        sys.exit(problem)
    count = jax.device_count()
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    sharding = NamedSharding(mesh, P(AXIS))

    def on_all(function):
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS)))

    def normal(seed, *shape, dtype=jnp.bfloat16, scale=1.0):
        make = lambda: (jax.random.normal(jax.random.key(seed), shape) * scale).astype(dtype)
        return jax.jit(make, out_shardings=sharding)()

    x, gradient = (normal(seed, count * TOKENS, HIDDEN) for seed in (0, 1))
    route = on_all(lambda logits: tuple(moe.route(logits, TOP_K, normalize=True)))
    weights, experts = route(normal(2, count * TOKENS, EXPERTS, dtype=jnp.float32))
    found = {}

    def compare(name, functions, *operands):
        """Times them against the last one, and prints and keeps their shares of its time."""
        times = {key: time_ms(on_all(function), *operands) for key, function in functions.items()}
        *_, by_hand_ms = times.values()
        found[name] = {key: {"ms": ms, "ratio": ms / by_hand_ms} for key, ms in times.items()}
        print(
            name,
            *(f"{key} {ms:.3f} ms {ms / by_hand_ms:.3f}" for key, ms in times.items()),
            sep="\n  ",
        )

    functions = {name: by_triax(**options) for name, options in WAYS.items()}
    for name, function in functions.items():
        y = on_all(function)(x, weights, experts)
        error = jnp.abs(y.astype("float32") - x.astype("float32")).max()
        if not error < 0.1:
            sys.exit(f"{name}: weights that sum up to 1 do not give the tokens back: {error}")
    functions["by hand"] = by_hand
    compare("forward", functions, x, weights, experts)
    functions = {name: with_gradients(function) for name, function in functions.items()}
    compare("forward and backward", functions, x, weights, experts, gradient)
    found["exchange_of_tokens_ms"] = time_ms(
        on_all(exchange), normal(3, count * count * TOKENS, HIDDEN)
    )
    print(f"one exchange of a row per token and GPU: {found['exchange_of_tokens_ms']:.3f} ms")

    gate_up = normal(4, LAYER_EXPERTS, HIDDEN, 2 * WIDTH, scale=HIDDEN**-0.5)
    down = normal(5, LAYER_EXPERTS, WIDTH, HIDDEN, scale=WIDTH**-0.5)
    logits = normal(6, count * TOKENS, LAYER_EXPERTS, dtype=jnp.float32)
    found["layer_ms"] = time_ms(on_all(layer_with_gradients), x, logits, gate_up, down, gradient)
    print(f"the layer of {LAYER_EXPERTS} experts, with gradients: {found['layer_ms']:.2f} ms")
    shape = {"tokens": TOKENS, "hidden": HIDDEN, "experts": EXPERTS, "top_k": TOP_K}
    output = options.output or Path(__file__).with_name(f"expert_parallel_{count}.json")
    gpu_record.write(output, gpus=count, **shape, layer_experts=LAYER_EXPERTS, results=found)


if __name__ == "__main__":
    main()
