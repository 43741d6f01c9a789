"""What a step of decoding takes: few tokens, on a GPU that holds some of DeepSeek-V3's experts.

Times the routing (route, plan, permute, unpermute) as a part of a program, by programs that repeat
it: launches of a CUDA graph, without what starting a program takes. Times the layer's two matmuls
alone, with groups as a router makes them, and eight layers in one program, against a sequential
read of the weights of the experts in use. Prints the figures and writes `benchmarks/decode.json`.

    python benchmarks/decode.py [--output FILE]
"""

from __future__ import annotations

import functools

import gpu_record
import jax
import jax.numpy as jnp

from triax import moe
from triax.bench.cases import Stream
from triax.bench.streams import find_limit
from triax.bench.timing import time_program

HIDDEN, WIDTH, TOP_K = 7168, 2048, 8
ROUTER = moe.Router(TOP_K, normalize=True)
TOKENS, EXPERTS = (8, 32, 128, 256), (32, 128)
ROUTING_TOKENS, REPEATS, LAYERS = 128, (4, 24), 8


def routing(x, logits):
    """There and back, without experts between: [tokens, hidden]."""
    weights, experts = moe.route(logits, ROUTER)
    plan = moe.make_plan(experts, logits.shape[1])
    rows = jax.lax.optimization_barrier(moe.permute(x, plan))
    return moe.unpermute(rows, plan, weights)


def measure_routing(experts):
    """One routing of those in a program, each of what the last one returned, by other logits."""
    keys = jax.random.split(jax.random.key(0), max(REPEATS))
    logits = [jax.random.normal(key, (ROUTING_TOKENS, experts)) for key in keys]
    x = jax.random.normal(jax.random.key(1), (ROUTING_TOKENS, HIDDEN), jnp.bfloat16)
    same = jnp.abs(jax.jit(routing)(x, logits[0]).astype("float32") - x.astype("float32")).max()
    assert same < 0.1, f"weights that sum up to 1 give the tokens back, to {same}"
    program = jax.jit(lambda operands: functools.reduce(routing, operands[1], operands[0]))
    few, many = (time_program(program, (x, logits[:n]), target_ms=50.0) for n in REPEATS)
    assert {few.method, many.method} == {"events"}, (few, many)
    median_us = (many.median_us - few.median_us) / (REPEATS[1] - REPEATS[0])
    return {"experts": experts, "median_us": median_us}


def normal(seed, *shape, scale=1.0):
    return (jax.random.normal(jax.random.key(seed), shape) * scale).astype("bfloat16")


def layer(x, logits, w_gate_up, w_down):
    return moe.feed_forward(x, logits, moe.Experts(w_gate_up, w_down), ROUTER)


def measure_weights(experts, rate):
    """Both matmuls and the layer, against a read of the weights in use at `rate` bytes per µs."""
    found = []
    both = (
        normal(1, experts, HIDDEN, 2 * WIDTH, scale=HIDDEN**-0.5),
        normal(2, experts, WIDTH, HIDDEN, scale=WIDTH**-0.5),
    )

    def add(name, tokens, used, read, us):
        figures = {"tokens": tokens, "experts": experts, "what": name, "experts_in_use": used}
        found.append(figures | {"median_us": us, "read_us": read, "fraction_of_read": read / us})
        print(found[-1], flush=True)

    for tokens in TOKENS:
        keys = jax.random.split(jax.random.key(3), LAYERS)
        logits = [jax.random.normal(key, (tokens, experts)) for key in keys]
        x = normal(0, tokens, HIDDEN)
        sizes = [layer(x, each, *both).group_counts for each in logits]
        in_use = [int((each > 0).sum()) for each in sizes]
        for name, w in zip(("gate and up", "down"), both, strict=True):
            rows = normal(4, tokens * TOP_K, w.shape[1])
            program = jax.jit(lambda operands: moe.ragged_dot(*operands))
            us = time_program(program, (rows, w, sizes[0]), target_ms=50.0).median_us
            add(name, tokens, in_use[0], w.nbytes / experts * in_use[0] / rate, us)

        def layers(operands):
            x, logits, *both = operands
            return functools.reduce(lambda x, chosen: layer(x, chosen, *both).tokens, logits, x)

        us = time_program(jax.jit(layers), (x, logits, *both), target_ms=80.0).median_us
        read = sum(w.nbytes for w in both) / experts * sum(in_use) / rate
        add("layer", tokens, sum(in_use) / LAYERS, read / LAYERS, us / LAYERS)
    return found


def main():
    output = gpu_record.output(__doc__, __file__)
    routings = [measure_routing(experts) for experts in (32, 256)]
    print(*routings, sep="\n")
    # 32 bytes are read for each one written: as near to a read alone as a checked stream comes.
    stream = find_limit(Stream(32, 1, 30_000_000))
    rate = stream["bytes"] / stream["median_us"]
    found = [each for experts in EXPERTS for each in measure_weights(experts, rate)]
    shape = {"hidden": HIDDEN, "width": WIDTH, "top_k": TOP_K, "layers": LAYERS}
    gpu_record.write(output, **shape, routing=routings, weights=found, stream=stream)


if __name__ == "__main__":
    main()
