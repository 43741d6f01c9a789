"""What the layer keeps for its backward pass, what it has in memory at its peak, and what it takes.

Forward and backward of `feed_forward` in bfloat16, with a router and all gradients: as it is, and
keeping all that it makes (`keep=`). `kept_bytes` are those of what `jax.vjp` holds beyond the
arguments, for each token; `peak_bytes` XLA's temporaries and results. Each program is timed in turn
with the layer's dense products, in bursts after a rest; of the layer as it is, the kernels' times
are summed up by kind. Both ways give the same bits, else nothing is written.

    python benchmarks/layer_memory.py [--output FILE]
"""

from __future__ import annotations

import collections
import functools
import sys
import time

import gpu_record
import jax
import jax.numpy as jnp

from triax import moe

# tokens, hidden, experts, top_k, width
SHAPES = {
    "DeepSeek-V3": (8192, 7168, 32, 8, 2048),
    "Mixtral": (16384, 4096, 8, 2, 14336),
    "128 experts": (32768, 4096, 128, 8, 1024),
    "fine-grained": (16384, 2560, 64, 4, 1280),
}
WAYS = {"as it is": (), "keeping all": ("triax_permuted_rows", "triax_glu")}


def normal(seed, *shape, scale=1.0):
    return (jax.random.normal(jax.random.key(seed), shape) * scale).astype("bfloat16")


def layer(given, top_k, keep):
    return moe.feed_forward(*given, moe.Router(top_k, normalize=True), keep=keep).tokens


def forward_and_backward(given, top_k, keep):
    out, pull = jax.vjp(functools.partial(layer, top_k=top_k, keep=keep), given)
    return out, pull(out)[0]  # which has to be there before


def dense(given, top_k):
    """The layer's six products, of rows that all have the weights of one expert."""
    x, _, experts = given
    rows = jnp.repeat(x, top_k, axis=0)
    up, down = experts.w_gate_up[0], experts.w_down[0]
    wide = rows @ up
    narrow = wide[:, : down.shape[0]]
    return wide @ up.T, rows.T @ wide, rows @ down.T, narrow @ down, narrow.T @ rows


def num_bytes(tree):
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))


def kernels_us(program, given, calls=5):
    """The kernels' times of a call by kind, right after a rest."""
    time.sleep(1)
    sums = collections.Counter()
    for name, start, end in gpu_record.kernels(program, given, calls=calls):
        kind = name.strip("_").partition("_kernel")[0] if "_kernel_" in name else "others"
        sums[kind] += (end - start) / 1000 / calls
    return dict(sums.most_common())


def measure(tokens, hidden, experts, top_k, width):
    weights = (
        normal(2, experts, hidden, 2 * width, scale=hidden**-0.5),
        normal(3, experts, width, hidden, scale=width**-0.5),
    )
    logits = normal(1, tokens, experts).astype("float32")
    given = normal(0, tokens, hidden), logits, moe.Experts(*weights)
    found, programs, results = {}, {}, []
    for way, keep in WAYS.items():
        run = functools.partial(layer, top_k=top_k, keep=keep)
        held = jax.eval_shape(lambda given, run=run: jax.vjp(run, given)[1], given)
        program = jax.jit(functools.partial(forward_and_backward, top_k=top_k, keep=keep))
        memory = program.lower(given).compile().memory_analysis()
        found[way] = {
            "kept_bytes": (num_bytes(held) - num_bytes(given)) / tokens,
            "peak_bytes": memory.temp_size_in_bytes + memory.output_size_in_bytes,
        }
        programs[way] = program, given
        results.append(jax.tree.leaves(program(given)))
    if not all((a == b).all() for a, b in zip(*results, strict=True)):
        sys.exit("what is made again is not the same")
    del results
    programs["dense"] = jax.jit(functools.partial(dense, top_k=top_k)), given
    us = gpu_record.in_turn(programs, rounds=7, bursts=True)
    for way, each in us.items():
        figures = {"median_us": each, "of_dense": us["dense"] / each}
        found[way] = found.get(way, {}) | figures
    found["as it is"]["kernels_us"] = kernels_us(programs["as it is"][0], given)
    return found


def main():
    output = gpu_record.output(__doc__, __file__)
    found = {}
    for name, shape in SHAPES.items():
        found[name] = measure(*shape)
        for way, figures in found[name].items():
            print(name, way, figures, flush=True)
        gpu_record.write(output, shapes=SHAPES, results=found)


if __name__ == "__main__":
    main()
