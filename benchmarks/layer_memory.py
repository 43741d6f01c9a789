"""What the layer keeps for its backward pass, what it has in memory at its peak, and what it takes.

Forward and backward of `feed_forward` in bfloat16, with a router and all gradients: as it is, and
keeping all that it makes (`keep=`). `kept_bytes` are those of what `jax.vjp` holds beyond the
arguments, for each token; `peak_bytes` XLA's temporaries and results. Each program is timed in turn
with the layer's dense products, in bursts after a rest; of the layer as it is, the kernels' times
are summed up by kind. Both ways give the same bits, else nothing is written.

    python -m benchmarks.layer_memory [--output FILE]
"""

from __future__ import annotations

import collections
import functools
import time

import jax

from benchmarks.harness import record
from benchmarks.harness.inputs import LAYERS, Layer, dense_products, with_gradients
from benchmarks.harness.timing import in_turn, kernels
from triax import moe

SHAPES = {
    "DeepSeek-V3": LAYERS["deepseek-v3"],
    "Mixtral": LAYERS["mixtral-8x7b"],
    "128 experts": Layer(32768, 4096, 128, 8, 1024),
    "fine-grained": LAYERS["fine-grained"],
}
WAYS = {"as it is": (), "keeping all": ("triax_permuted_rows", "triax_glu")}


def layer(given, top_k, keep):
    return moe.feed_forward(*given, moe.Router(top_k, normalize=True), keep=keep).tokens


def num_bytes(tree):
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))


def kernels_us(program, given, calls=5):
    """The kernels' times of a call by kind, right after a rest."""
    time.sleep(1)
    sums = collections.Counter()
    for name, start, end in kernels(program, given, calls=calls):
        kind = name.strip("_").partition("_kernel")[0] if "_kernel_" in name else "others"
        sums[kind] += (end - start) / 1000 / calls
    return dict(sums.most_common())


def measure_layer(shape):
    given = shape.inputs()
    found, programs, results = {}, {}, []
    for way, keep in WAYS.items():
        run = functools.partial(layer, top_k=shape.top_k, keep=keep)
        held = jax.eval_shape(lambda given, run=run: jax.vjp(run, given)[1], given)
        program = jax.jit(with_gradients(run))
        memory = program.lower(given).compile().memory_analysis()
        found[way] = {
            "kept_bytes": (num_bytes(held) - num_bytes(given)) / shape.tokens,
            "peak_bytes": memory.temp_size_in_bytes + memory.output_size_in_bytes,
        }
        programs[way] = program, given
        results.append(program(given))
    record.check("what is made again", *results)
    del results
    programs["dense"] = jax.jit(functools.partial(dense_products, top_k=shape.top_k)), given
    us = in_turn(programs, rounds=7, bursts=True)
    for way, each in us.items():
        figures = {"median_us": each, "of_dense": us["dense"] / each}
        found[way] = found.get(way, {}) | figures
    found["as it is"]["kernels_us"] = kernels_us(programs["as it is"][0], given)
    return found


def measure():
    for name, shape in SHAPES.items():
        yield name, measure_layer(shape)


if __name__ == "__main__":
    record.main(measure, shapes=SHAPES)
