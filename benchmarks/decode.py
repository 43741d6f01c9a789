"""What a step of decoding takes: few tokens, on one of eight GPUs that hold DeepSeek-V3's experts.

Times the routing (route, plan, permute, unpermute) as a part of a program, by programs that repeat
it: launches of a CUDA graph, without what starting a program takes. Times the layer's two matmuls
alone, and a sequential read of the weights that they need. Prints the figures and writes
`benchmarks/decode.json`.

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

TOKENS, HIDDEN, WIDTH, LOCAL_EXPERTS, TOP_K = 128, 7168, 2048, 32, 8
REPEATS = (4, 24)


def routing(x, logits):
    """There and back, without experts between: [tokens, hidden]."""
    weights, experts = moe.route(logits, TOP_K, normalize=True)
    plan = moe.make_plan(experts, logits.shape[1])
    rows = jax.lax.optimization_barrier(moe.permute(x, plan))
    return moe.unpermute(rows, plan, weights)


def measure_routing(experts):
    """One routing of those in a program, each of what the last one returned, by other logits."""
    keys = jax.random.split(jax.random.key(0), max(REPEATS))
    logits = [jax.random.normal(key, (TOKENS, experts)) for key in keys]
    x = jax.random.normal(jax.random.key(1), (TOKENS, HIDDEN), jnp.bfloat16)
    same = jnp.abs(jax.jit(routing)(x, logits[0]).astype("float32") - x.astype("float32")).max()
    assert same < 0.1, f"weights that sum up to 1 give the tokens back, to {same}"
    program = jax.jit(lambda operands: functools.reduce(routing, operands[1], operands[0]))
    few, many = (time_program(program, (x, logits[:n]), target_ms=50.0) for n in REPEATS)
    assert {few.method, many.method} == {"events"}, (few, many)
    median_us = (many.median_us - few.median_us) / (REPEATS[1] - REPEATS[0])
    return {"experts": experts, "median_us": median_us}


def measure_matmuls():
    """Both matmuls alone, with as many rows for each local expert as it gets on average."""
    rows_of_expert = TOKENS * TOP_K // 256
    sizes = jnp.full(LOCAL_EXPERTS, rows_of_expert, jnp.int32)
    num_bytes = LOCAL_EXPERTS * HIDDEN * WIDTH * 2
    # 32 bytes are read for each one written: as near to a read alone as a checked stream comes.
    stream = find_limit(Stream(32, 1, num_bytes // 32))
    read_us = stream["median_us"] * num_bytes / stream["bytes"]
    found = []
    for name, depth, columns in (("up", HIDDEN, WIDTH), ("down", WIDTH, HIDDEN)):
        keys = jax.random.split(jax.random.key(2))
        rows = jax.random.normal(keys[0], (LOCAL_EXPERTS * rows_of_expert, depth), jnp.bfloat16)
        weights = jax.random.normal(keys[1], (LOCAL_EXPERTS, depth, columns), jnp.bfloat16)
        program = jax.jit(lambda operands: moe.ragged_dot(*operands, sizes))
        timing = time_program(program, (rows, weights), target_ms=50.0)
        shape = {"rows": rows.shape[0], "depth": depth, "columns": columns}
        times = {"median_us": timing.median_us, "read_us": read_us}
        share = {"fraction_of_read": read_us / timing.median_us}
        found.append({"matmul": name, **shape, "weights_bytes": num_bytes, **times, **share})
    return {"matmuls": found, "stream": stream}


def main():
    output = gpu_record.output(__doc__, __file__)
    routings = [measure_routing(experts) for experts in (LOCAL_EXPERTS, 256)]
    print(*routings, sep="\n")
    found = measure_matmuls()
    print(*found["matmuls"], sep="\n")
    gpu_record.write(output, tokens=TOKENS, routing=routings, **found)


if __name__ == "__main__":
    main()
