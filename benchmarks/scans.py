"""A scan over MoE layers, against the same layers one after the other in one program.

Forward and backward of `x + feed_forward(x)` for several layers, each with logits and experts of
its own: by `jax.lax.scan` over the stacked layers, and unrolled, the layers a list. A scan copies a
layer's experts out of the stack, and their gradients into one. Both are measured as they are and
with `jax.checkpoint` around each layer; experts in bfloat16, with the recipe "rows" (8 bits), and
frozen in 4 bits, where the gradients are those of the tokens and the logits.

Before it is timed, the scan's result and each gradient, layer by layer, are compared with those of
the unrolled layers. What is wrong or zero gets no speed, and the script ends with status 1.

    python -m benchmarks.scans [--json FILE] [--shapes NAME ...] [--formats NAME ...]
    JAX_PLATFORMS=cpu python -m benchmarks.scans --shapes tiny --implementation xla --json FILE
"""

from __future__ import annotations

import argparse
import concurrent.futures
import statistics
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks.eight_bits import WEIGHTS, quantized
from benchmarks.harness import record
from benchmarks.harness.inputs import LAYERS, Layer, normal, with_gradients
from benchmarks.harness.timing import wall_ms
from triax import moe

SHAPES = {
    "DeepSeek-V3": LAYERS["deepseek-v3"]._replace(experts=8, top_k=2),
    "Mixtral": LAYERS["mixtral-8x7b"]._replace(tokens=4096, experts=4),
    "Qwen3-30B": LAYERS["qwen3-30b"]._replace(tokens=8192, experts=32),
}
TINY = Layer(tokens=48, hidden=64, experts=4, top_k=2, width=32)  # tries the script
RECIPES = {"bfloat16": None, "rows": "rows"}
FROZEN = {"int4": WEIGHTS["int4, 32 deep"], "MXFP4": WEIGHTS["MXFP4"]}
# Of the largest element of each result: eight roundings of bfloat16. XLA may leave out a rounding
# between layers in one of the programs; 8-bit rows make more of such a difference.
TOLERANCE = 8 * float(jnp.finfo("bfloat16").eps)
KEEP = ("triax_permuted_rows", "triax_glu")  # as docs/moe.md says for a layer in `jax.checkpoint`


def scanned(body, x, logits, experts):
    return jax.lax.scan(lambda x, layer: (body(x, *layer), None), x, (logits, experts))[0]


def unrolled(body, x, logits, experts):
    for layer in zip(logits, experts, strict=True):
        x = body(x, *layer)
    return x


WAYS = {"scan": scanned, "unrolled": unrolled}


def layer_body(top_k, recipe, implementation, is_checkpointed):
    """One layer: a function of x, logits and experts."""
    how = {"recipe": recipe, "implementation": implementation}
    how |= {"keep": KEEP} if is_checkpointed else {}

    def body(x, logits, experts):
        router = moe.Router(top_k, normalize=True)
        return x + moe.feed_forward(x, logits, experts, router, **how).tokens

    return jax.checkpoint(body) if is_checkpointed else body


def program(way, body, is_frozen):
    """The result, and the gradients by tokens and logits, and by the experts unless frozen."""

    def run(given):
        count = 2 if is_frozen else 3
        function = lambda moving: WAYS[way](body, *moving, *given[count:])
        return with_gradients(function)(given[:count])

    return jax.jit(run)


def split(stacked):
    """A list of the layers of stacked arrays."""
    num_layers = len(jax.tree.leaves(stacked)[0])
    return [jax.tree.map(lambda a: a[i], stacked) for i in range(num_layers)]  # noqa: B023


@jax.jit
def worst_difference(of_scan, of_unrolled):
    """The largest difference of any array, of its largest element; NaN where that is zero."""
    out, (by_x, *by_layers) = of_scan
    found = out, (by_x, *map(split, by_layers))
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(of_unrolled), strict=True)
    wide = [(a.astype("float32"), b.astype("float32")) for a, b in pairs]
    return jnp.max(jnp.stack([jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)) for a, b in wide]))


def inputs(shape, num_layers):
    """x, and stacked logits and experts, made on the device."""
    x = normal(0, shape.tokens, shape.hidden)
    logits = normal(1, num_layers, shape.tokens, shape.experts, dtype="float32")
    wide = num_layers, shape.experts, shape.hidden, 2 * shape.width
    narrow = num_layers, shape.experts, shape.width, shape.hidden
    up = normal(2, *wide, scale=shape.hidden**-0.5)
    return x, logits, moe.Experts(up, normal(3, *narrow, scale=shape.width**-0.5))


def freeze(experts, kind):
    """Experts in 4 bits, quantized layer by layer."""
    each = lambda w: jax.lax.map(lambda of_layer: quantized(of_layer, *kind), w)
    return moe.Experts(each(experts.w_gate_up), each(experts.w_down))


def measure_format(name, shape, given, format_name, options):
    """Yields the format's figures, without and with checkpoints."""
    is_frozen = format_name in FROZEN
    if is_frozen:
        given = *given[:2], freeze(given[2], FROZEN[format_name])
    layers = jax.jit(lambda stacked: [split(part) for part in stacked])(given[1:])
    operands = {"scan": given, "unrolled": (given[0], *layers)}
    lowered = {}
    for kind in ("", ", checkpoint"):
        recipe = RECIPES.get(format_name)
        body = layer_body(shape.top_k, recipe, options.implementation, bool(kind))
        for way in WAYS:
            lowered[kind, way] = program(way, body, is_frozen).lower(operands[way])
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiled = pool.map(lambda one: one.compile(), lowered.values())
        programs = dict(zip(lowered, compiled, strict=True))
    for kind in ("", ", checkpoint"):
        of_kind = {way: programs[kind, way] for way in WAYS}
        yield f"{name}, {format_name}{kind}", measure_pair(of_kind, operands, options.rounds)


def measure_pair(programs, operands, rounds):
    """Times of the scan and of the unrolled layers in turn, if their results agree."""
    off = float(worst_difference(*(programs[way](operands[way]) for way in WAYS)))
    if not off <= TOLERANCE:
        return {"error": f"off by {off:.3g} of the largest element; {TOLERANCE:.3g} is allowed"}
    times = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, each in times.items():
            each.append(wall_ms(programs[way], operands[way], samples=1, calls=2))
    found = {f"{way}_ms": statistics.median(each) for way, each in times.items()}
    found["of_unrolled"] = found["scan_ms"] / found["unrolled_ms"]
    for way, compiled in programs.items():
        found[f"{way}_temporary_bytes"] = compiled.memory_analysis().temp_size_in_bytes
    return found | {"difference": off}


def measure(options):
    for name in options.shapes:
        shape = SHAPES.get(name, TINY)
        given = inputs(shape, options.layers)
        for format_name in options.formats:
            yield from measure_format(name, shape, given, format_name, options)
        del given


def main():
    formats = [*RECIPES, *FROZEN]
    parser = record.parser(__file__, __doc__)
    json = {"type": Path, "dest": "output", "default": argparse.SUPPRESS}
    parser.add_argument("--json", **json, help="the same as --output")
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES, "tiny"], default=[*SHAPES])
    parser.add_argument("--formats", nargs="+", choices=formats, default=formats)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--implementation", default="triton", help="others try the script on a CPU")
    options = parser.parse_args()
    options = record.parse(parser) if options.implementation == "triton" else options
    shapes = {name: SHAPES.get(name, TINY) for name in options.shapes}
    found = record.keep(options.output, measure(options), layers=options.layers, shapes=shapes)
    return int(any("error" in figures for figures in found.values()))


if __name__ == "__main__":
    sys.exit(main())
