"""What a step of decoding takes: few tokens, on a GPU that holds some of DeepSeek-V3's experts.

Times the routing (route, plan, permute, unpermute) as a part of a program, by programs that repeat
it: launches of a CUDA graph, without what starting a program takes. Times the layer's two matmuls
alone, with groups as a router makes them, and eight layers in one program, against a sequential
read of the weights of the experts in use.

    python -m benchmarks.decode [--output FILE]
"""

from __future__ import annotations

import functools

import jax

from benchmarks.harness import record
from benchmarks.harness.inputs import LAYERS as MODELS
from benchmarks.harness.inputs import normal
from benchmarks.harness.streams import Stream, find_limit
from benchmarks.harness.timing import MANY, median_us, one_of_many_us
from triax import moe

_, HIDDEN, _, TOP_K, WIDTH = MODELS["deepseek-v3"]
ROUTER = moe.Router(TOP_K, normalize=True)
TOKENS, EXPERTS = (8, 32, 128, 256), (32, 128)
ROUTING_TOKENS, LAYERS = 128, 8


def routing(x, logits):
    """There and back, without experts between: [tokens, hidden]."""
    weights, experts = moe.route(logits, ROUTER)
    plan = moe.make_plan(experts, logits.shape[1])
    rows = jax.lax.optimization_barrier(moe.permute(x, plan))
    return moe.unpermute(rows, plan, weights)


def measure_routing(experts):
    """One routing of those in a program, each of what the last one returned, by other logits."""
    logits = [normal(seed, ROUTING_TOKENS, experts, dtype="float32") for seed in range(MANY)]
    x = normal(MANY, ROUTING_TOKENS, HIDDEN)
    # Weights that sum up to 1 give the tokens back.
    record.check("routing", jax.jit(routing)(x, logits[0]), x, 0.01)
    repeated = lambda count: jax.jit(
        lambda given: functools.reduce(routing, given[1][:count], given[0])
    )
    return {"experts": experts, "median_us": one_of_many_us(repeated, (x, logits))}


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
        print(record.shown(found[-1]), flush=True)

    for tokens in TOKENS:
        logits = [normal(3 + i, tokens, experts, dtype="float32") for i in range(LAYERS)]
        x = normal(0, tokens, HIDDEN)
        sizes = [layer(x, each, *both).group_counts for each in logits]
        in_use = [int((each > 0).sum()) for each in sizes]
        for name, w in zip(("gate and up", "down"), both, strict=True):
            rows = normal(4, tokens * TOP_K, w.shape[1])
            program = jax.jit(lambda operands: moe.ragged_dot(*operands))
            us = median_us(program, (rows, w, sizes[0]))
            add(name, tokens, in_use[0], w.nbytes / experts * in_use[0] / rate, us)

        def layers(operands):
            x, logits, *both = operands
            return functools.reduce(lambda x, chosen: layer(x, chosen, *both).tokens, logits, x)

        us = median_us(jax.jit(layers), (x, logits, *both), target_ms=80.0)
        read = sum(w.nbytes for w in both) / experts * sum(in_use) / rate
        add("layer", tokens, sum(in_use) / LAYERS, read / LAYERS, us / LAYERS)
    return found


if __name__ == "__main__":
    output = record.parse(record.parser(__file__, __doc__)).output
    routings = [measure_routing(experts) for experts in (32, 256)]
    print(*routings, sep="\n")
    # 32 bytes are read for each one written: as near to a read alone as a checked stream comes.
    stream = find_limit(Stream(32, 1, 30_000_000))
    rate = stream["bytes"] / stream["median_us"]
    found = [each for experts in EXPERTS for each in measure_weights(experts, rate)]
    shape = {"hidden": HIDDEN, "width": WIDTH, "top_k": TOP_K, "layers": LAYERS}
    record.write(output, **shape, routing=routings, weights=found, stream=stream)
