"""How fast `dispatch` and `combine` are on all GPUs of this host, and the layer with them.

Each GPU has 16,384 tokens of DeepSeek-V3's width, 8 of 256 experts each. Against them stands what
one would write by hand: `permute` to a row per (token, expert), two `all_to_all`s of these rows in
equal parts, `unpermute`. Times are the host's, of many calls after one another, in milliseconds.
Triax's results are checked before anything is timed. The same is timed where all tokens choose
experts of one GPU, for which there is no such way by hand: parts are not equal.

Of 8-bit tokens with their scales `dispatch` alone is timed, against bfloat16.

The layer with its experts spread over the GPUs is profiled, in one part and with its tokens in two,
so that one part could be exchanged while experts work on the other. The layer with its tokens
cut over an explicit axis, and all experts on each GPU, is compared with one GPU that has all
tokens. Prints what it finds and writes `--output`.

    python benchmarks/expert_parallel.py [--output FILE]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from pathlib import Path

import gpu_record
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from triax import moe

TOKENS, HIDDEN, EXPERTS, TOP_K, WIDTH = 16384, 7168, 256, 8, 2048
ROUTER = moe.Router(TOP_K, normalize=True)
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
        sent = moe.dispatch(x, weights, experts, EXPERTS, AXIS, **options)
        rows = jax.lax.optimization_barrier(sent.rows)
        return moe.combine(rows, sent.plan, weights=sent.weights)

    return run


def num_rows(tokens):
    """A fiftieth more than a GPU gets on average, which even choices never reach."""
    return tokens * TOP_K * 51 // 50


def with_gradients(function, fixed=0):
    """The function, and the gradients of its operands but the last `fixed`."""

    def run(*operands):
        *operands, gradient = operands
        moving = len(operands) - fixed
        y, pull = jax.vjp(lambda *some: function(*some, *operands[moving:]), *operands[:moving])
        return y, *pull(gradient)

    return run


def layer(exchange, parts):
    """The layer, one part of the tokens after the other."""

    def run(x, logits, w_gate_up, w_down):
        weights, experts = moe.route(logits, ROUTER)
        how = {"num_rows": num_rows(len(x)), "scheme": "token", "exchange": exchange}
        sent = moe.dispatch(x, weights, experts, LAYER_EXPERTS, AXIS, **how)
        h = moe.glu(moe.ragged_dot(sent.rows, w_gate_up, sent.group_sizes), sent.weights)
        y = moe.ragged_dot(h, w_down, sent.group_sizes)
        return moe.combine(y, sent.plan, weights=None)

    def run_parts(x, logits, w_gate_up, w_down):
        pairs = zip(jnp.split(x, parts), jnp.split(logits, parts), strict=True)
        return jnp.concatenate([run(*pair, w_gate_up, w_down) for pair in pairs])

    return run_parts


def whole_layer(x, logits, w_gate_up, w_down):
    """With all experts on each GPU."""
    return moe.feed_forward(x, logits, moe.Experts(w_gate_up, w_down), ROUTER).tokens


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


def profile_ms(program, *operands):
    """Of a call, how long the first GPU exchanges, how long it does other work, how long both."""
    spans = {True: [], False: []}
    for name, start, end in gpu_record.kernels(program, *operands, calls=CALLS):
        name = name.lower().replace("_", "")
        spans["nccl" in name or "raggedalltoall" in name].append((start, end))
    exchange, work = (length(found) * 1e-6 / CALLS for found in (spans[True], spans[False]))
    either = length(spans[True] + spans[False]) * 1e-6 / CALLS
    return {"exchange": exchange, "work": work, "both": exchange + work - either}


def length(spans):
    """Of all spans together; what they share counts once."""
    found, end = 0, 0
    for first, last in sorted(spans):
        found += max(0, last - max(first, end))
        end = max(end, last)
    return found


def measure_8_bits(on_all, x, weights, experts):
    """Dispatch of tokens that were quantized before, with their scales, against bfloat16."""

    def send(x, weights, experts):
        how = {"num_rows": num_rows(TOKENS)}
        return moe.dispatch(x, weights, experts, EXPERTS, AXIS, **how).rows

    program = on_all(send)
    found = {"bfloat16": {"ms": (whole_ms := time_ms(program, x, weights, experts)), "ratio": 1.0}}
    for name, block in {"a scale for each token": None, "for each 128 numbers": 128}.items():
        x8 = on_all(lambda x, block=block: moe.quantize(x, block=(1, block)))(x)
        rows = program(x8, weights, experts).dequantize("bfloat16")
        wanted = program(x8.dequantize("bfloat16"), weights, experts)
        if not jnp.array_equal(rows, wanted):
            sys.exit(f"dispatch of 8 bits, {name}: wrong rows")
        del rows, wanted
        ms = time_ms(program, x8, weights, experts)
        found[name] = {"ms": ms, "ratio": ms / whole_ms}
    return found


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
    route = on_all(lambda logits: tuple(moe.route(logits, ROUTER)))
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

    def check(name, function, *operands):
        y = on_all(function)(x, *operands)
        error = jnp.abs(y.astype("float32") - x.astype("float32")).max()
        if not error < 0.1:
            sys.exit(f"{name}: weights that sum up to 1 do not give the tokens back: {error}")

    rows = num_rows(TOKENS)
    functions = {name: by_triax(num_rows=rows, **options) for name, options in WAYS.items()}
    for name, function in functions.items():
        check(name, function, weights, experts)
    functions["by hand"] = by_hand
    compare("forward", functions, x, weights, experts)
    functions = {name: with_gradients(function, fixed=1) for name, function in functions.items()}
    compare("forward and backward", functions, x, weights, experts, gradient)
    all_to_one = route(normal(7, count * TOKENS, EXPERTS // count, dtype=jnp.float32))
    for way in ("padded", "ragged"):
        name = f"all tokens to one GPU, {way}"
        function = by_triax(scheme="token", exchange=way)
        check(name, function, *all_to_one)
        both = with_gradients(function, fixed=1)
        found[name] = {
            "forward_ms": time_ms(on_all(function), x, *all_to_one),
            "forward_and_backward_ms": time_ms(on_all(both), x, *all_to_one, gradient),
        }
        print(f"{name}: {found[name]}")
    found["dispatch of 8 bits"] = measure_8_bits(on_all, x, weights, experts)
    print(f"dispatch of 8 bits: {found['dispatch of 8 bits']}")
    found["exchange_of_tokens_ms"] = time_ms(
        on_all(exchange), normal(3, count * count * TOKENS, HIDDEN)
    )
    print(f"one exchange of a row per token and GPU: {found['exchange_of_tokens_ms']:.3f} ms")

    gate_up = normal(4, LAYER_EXPERTS, HIDDEN, 2 * WIDTH, scale=HIDDEN**-0.5)
    down = normal(5, LAYER_EXPERTS, WIDTH, HIDDEN, scale=WIDTH**-0.5)
    logits = normal(6, count * TOKENS, LAYER_EXPERTS, dtype=jnp.float32)
    operands = x, logits, gate_up, down, gradient
    for way, parts in itertools.product(("padded", "ragged"), (1, 2)):
        program = on_all(with_gradients(layer(way, parts)))
        times = {"ms": time_ms(program, *operands), "profile_ms": profile_ms(program, *operands)}
        name = f"layer in {parts} parts, {way}, forward and backward"
        found[name] = times
        print(f"{name}: {times}")

    explicit = jax.make_mesh((count,), (AXIS,), axis_types=(AxisType.Explicit,))
    specs = P(AXIS), P(AXIS), P(), P(), P(AXIS)
    operands = x, logits, gate_up, down, gradient
    cut = [
        jax.device_put(operand, NamedSharding(explicit, spec))
        for operand, spec in zip(operands, specs, strict=True)
    ]
    one = jax.device_put(operands, jax.devices()[0])
    programs = {
        "forward": (whole_layer, 4),
        "forward and backward": (with_gradients(whole_layer), 5),
    }
    for name, (function, number) in programs.items():
        program = jax.jit(function)
        results = (jax.tree.leaves(program(*given[:number])) for given in (cut, one))
        for actual, expected in zip(*results, strict=True):
            whole = jax.device_put(actual, NamedSharding(explicit, P())).addressable_data(0)
            error = jnp.abs(whole - expected).max()
            if not error <= 0.03 * jnp.abs(expected).max():
                sys.exit(f"tokens cut, {name}: not what one GPU gives, by {error}")
        cut_ms, one_ms = (time_ms(program, *given[:number]) for given in (cut, one))
        times = {"ms": cut_ms, "one_gpu_ms": one_ms, "speedup": one_ms / cut_ms}
        found[f"tokens cut, {name}"] = times
        print(f"tokens cut, {name}: {times}")

    shape = {"tokens": TOKENS, "hidden": HIDDEN, "experts": EXPERTS, "top_k": TOP_K}
    output = options.output or Path(__file__).with_name(f"expert_parallel_{count}.json")
    gpu_record.write(output, gpus=count, **shape, layer_experts=LAYER_EXPERTS, results=found)


if __name__ == "__main__":
    main()
