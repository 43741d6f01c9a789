"""Products and layers in 8 bits, against bfloat16 and dense 8-bit matmuls.

- `products`: TFLOP/s of `ragged_dot` of scaled arrays, over even and uneven groups, and of torch's
  dense matmul of as many numbers with a scale for each row and column; in bursts after a rest, as
  what runs right after something else does so at lower clocks.
- `errors`: against float64 of the quantized numbers and of those before, as a share of the result's
  root mean square.
- `weight_gradients`: TFLOP/s of the weights' gradients: in bfloat16, of groups that are in 8 bits
  already, and with rounding to them; rounding also as a fraction of a copy's speed (two bytes in
  and one out).
- `layers`: forward and backward of the layer by recipe, quantizing included, against bfloat16.
- `decode`: 16-bit rows times weights of 8 and 4 bits, few tokens, groups as a router makes them,
  against reading the quantized weights of the experts in use, their scales and their zeros; and
  8,192 tokens, against bfloat16.

    python -m benchmarks.eight_bits [--output FILE] [--only PART ...]
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import record
from benchmarks.harness.inputs import LAYERS as MODELS
from benchmarks.harness.inputs import normal, with_gradients
from benchmarks.harness.streams import Stream, find_limit
from benchmarks.harness.timing import in_turn, median_us
from triax import moe
from triax.benchmark import BURSTS, REST_S
from triax.moe.products import any_gpu_gradients
from triax.moe.products import ops as products
from triax.moe.products import quantized_outer_ops as outer
from triax.moe.products.options import FAST_SUMS as FAST
from triax.moe.products.options import Groups, Options
from triax.moe.shared.target import for_target

# rows, experts, depth, columns
PRODUCTS = {
    "DeepSeek-V3, gate and up": (65536, 32, 7168, 4096),
    "DeepSeek-V3, down": (65536, 32, 2048, 7168),
    "fine-grained": (65536, 64, 2560, 2560),
    "Qwen3": (65536, 16, 4096, 3072),
}
LAYERS = {"DeepSeek-V3": MODELS["deepseek-v3"], "Mixtral": MODELS["mixtral-8x7b"]}
RECIPES = {
    "bfloat16": None,
    "rows": "rows",
    "rows, weights' gradients too": moe.Recipe(weight_gradient="rows"),
    "rows, float32 sums": moe.Recipe(fast_sums=False),
    "blocks": "blocks",
}
# A model's hidden, width and experts of a token; tokens, experts
DEEPSEEK, GPT_OSS = ([MODELS[of][i] for i in (1, 4, 3)] for of in ("deepseek-v3", "gpt-oss-120b"))
DECODE = {
    "DeepSeek-V3, 128 tokens, 32 experts": (*DEEPSEEK, 128, 32),
    "DeepSeek-V3, 128 tokens, 256 experts": (*DEEPSEEK, 128, 256),
    "gpt-oss-120b, 8 tokens, 128 experts": (*GPT_OSS, 8, 128),
    "gpt-oss-120b, 128 tokens, 128 experts": (*GPT_OSS, 128, 128),
    "DeepSeek-V3, 8,192 tokens, 32 experts": (*DEEPSEEK, 8192, 32),
}
# The dtype, and `block`, dtype of scales and zeros where a column of each expert has not one scale.
WEIGHTS = {
    "bfloat16": ("bfloat16",),
    "float8_e4m3fn": ("float8_e4m3fn",),
    "float8_e4m3fn, 128 × 128": ("float8_e4m3fn", (1, 128, 128)),
    "int8": ("int8",),
    "int4": ("int4",),
    "int4, 32 deep": ("int4", (1, 32, 1)),
    "int4, 128 deep, with zeros": ("int4", (1, 128, 1), "float32", "int8"),
    "MXFP4": ("float4_e2m1fn", (1, 32, 1), "float8_e8m0fnu"),
}


def operands(rows, experts, depth, columns):
    """Rows and weights in bfloat16, with scales of rows and columns, and of blocks."""
    x, w = normal(0, rows, depth), normal(1, experts, depth, columns, scale=depth**-0.5)
    quantize = functools.partial(jax.jit, static_argnames=("block", "transposed"))(moe.quantize)
    lines = quantize(x, block=(1, None)), quantize(w, block=(1, None, 1), transposed=True)
    blocks = quantize(x, block=(1, 128)), quantize(w, block=(1, 128, 128), transposed=True)
    return {
        "bfloat16": ((x, w), None),
        "rows, fast sums": (lines, FAST),
        "rows, float32 sums": (lines, None),
        "blocks": (blocks, None),
    }


def sizes_of(experts, rows):
    """Sizes of groups, even and uneven."""
    rng = np.random.default_rng(0)
    drawn = rng.multinomial(rows, rng.dirichlet(np.full(experts, 4.0)))
    even = np.full(experts, rows // experts)
    return {"even": jnp.asarray(even, jnp.int32), "uneven": jnp.asarray(drawn, jnp.int32)}


def dense_rate(rows, depth, columns):
    """TFLOP/s of torch's dense matmul of 8-bit floats, in bursts after a rest."""
    import torch

    a = torch.randn(rows, depth, device="cuda").to(torch.float8_e4m3fn)
    b = torch.randn(columns, depth, device="cuda").to(torch.float8_e4m3fn).t()
    scales = torch.ones(rows, 1, device="cuda"), torch.ones(1, columns, device="cuda")
    run = functools.partial(
        torch._scaled_mm, a, b, *scales, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    times = []
    for _ in range(2 * BURSTS + 1):
        torch.cuda.synchronize()
        time.sleep(REST_S)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        run()
        start.record()
        for _ in range(10):
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 10)
    return 2 * rows * depth * columns / statistics.median(times) / 1e9


def measure_products():
    found = {}
    for name, (rows, experts, depth, columns) in PRODUCTS.items():
        ways, groups = operands(rows, experts, depth, columns), sizes_of(experts, rows)
        programs = {}
        for way, (pair, precision) in ways.items():
            program = jax.jit(lambda given, p=precision: moe.ragged_dot(*given, precision=p))
            for kind, sizes in groups.items():
                programs[way, kind] = program, (*pair, sizes)
        us = in_turn(programs, rounds=3, bursts=True)
        rate = lambda us, of=2 * rows * depth * columns: of / us / 1e6
        found[name] = {way: {kind: rate(us[way, kind]) for kind in groups} for way in ways}
        found[name]["dense"] = {"even": dense_rate(rows, depth, columns)}
    return found


def outer_programs(sides, sizes):
    """Programs for a product's weights' gradient, with their operands."""
    how, e4m3 = {"implementation": "triton"}, jnp.dtype("float8_e4m3fn")
    bfloat16 = jnp.dtype("bfloat16")
    groups = Groups(sizes)

    def rounded(sides):
        bounds = any_gpu_gradients.group_bounds(groups, len(sides[0]), "triton")
        return *(
            any_gpu_gradients.quantize_groups(a, bounds, dtype=e4m3, **how) for a in sides
        ), bounds

    def multiplied(given, precision):
        shape = len(sizes), *(side.shape[1] for side in sides)
        return for_target(
            any_gpu_gradients.multiply,
            *given,
            out_type=jax.ShapeDtypeStruct(shape, bfloat16),
            options=Options(bfloat16, precision),
            **how,
        )

    def both(sides, precision):
        options = {"options": Options(bfloat16, precision), "dtypes": (e4m3, e4m3)}
        return outer.quantized_outer(False, False)(*sides, None, None, groups, **options, **how)

    plain = products.group_outer.of("triton", options=Options(bfloat16, None))
    rounded = jax.jit(rounded)
    programs = {"bfloat16": (jax.jit(lambda sides: plain(*sides, groups)), sides)}
    for name, precision in (("fast sums", FAST), ("float32 sums", None)):
        product = jax.jit(functools.partial(multiplied, precision=precision))
        programs[f"8 bits, {name}"] = product, rounded(sides)
        with_rounding = jax.jit(functools.partial(both, precision=precision))
        programs[f"with rounding, {name}"] = with_rounding, sides
    return programs | {"rounding": (rounded, sides)}


def measure_weight_gradients():
    found = {}
    for name, (rows, experts, left, right) in PRODUCTS.items():
        copy = find_limit(Stream(2, 1, rows * (left + right)))
        sides = normal(0, rows, left), normal(1, rows, right)
        found[name] = {}
        for kind, sizes in sizes_of(experts, rows).items():
            programs = outer_programs(sides, sizes)
            plain = programs["bfloat16"][0](sides)
            for way, (program, given) in programs.items():
                if way != "rounding":
                    record.check(f"{name}, {way}", program(given), plain, 0.06)
            del plain
            us = in_turn(programs, rounds=3, bursts=True)
            rounding = us.pop("rounding")
            for way, each in us.items():
                found[name].setdefault(way, {})[kind] = 2 * rows * left * right / each / 1e6
            of_copy = found[name].setdefault("rounding, of a copy's speed", {})
            of_copy[kind] = copy["median_us"] / rounding
        found[name]["dense"] = {"even": dense_rate(rows, left, right)}
    return found


def measure_errors():
    """Of 256 rows times 128 columns, by depth."""
    found = {}
    for depth in (2048, 7168):
        for way, (pair, precision) in operands(256, 1, depth, 128).items():
            sizes = jnp.array([256])
            out = moe.ragged_dot(
                *pair, sizes, precision=precision, preferred_element_type="float32"
            )
            whole = [np.asarray(a, np.float64) for a in operands(256, 1, depth, 128)["bfloat16"][0]]
            given = whole
            if way != "bfloat16":
                given = [np.asarray(a.dequantize("float32"), np.float64) for a in pair]
            wanted, before = given[0] @ given[1][0], whole[0] @ whole[1][0]
            size = np.sqrt(np.mean(before**2))
            error = lambda to, out=out, size=size: float(
                np.sqrt(np.mean((np.asarray(out, np.float64) - to) ** 2)) / size
            )
            found[f"{way}, {depth} deep"] = {"of sums": error(wanted), "in all": error(before)}
    assert all(errors["in all"] < 0.06 for errors in found.values()), found
    return found


def layer(given, top_k, recipe):
    return moe.feed_forward(*given, moe.Router(top_k, normalize=True), recipe=recipe).tokens


def measure_layers():
    found = {}
    for name, shape in LAYERS.items():
        given, run = shape.inputs(), functools.partial(layer, top_k=shape.top_k)
        programs = {
            way: jax.jit(with_gradients(functools.partial(run, recipe=recipe)))
            for way, recipe in RECIPES.items()
        }
        plain = programs["bfloat16"](given)
        for way, program in programs.items():
            record.check(f"{name}, {way}", program(given), plain, 0.1)
        del plain
        timed = {way: (program, given) for way, program in programs.items()}
        us = in_turn(timed, rounds=5, target_ms=60.0)
        ms = {way: time / 1000 for way, time in us.items()}
        found[name] = {way: {"ms": t, "speedup": ms["bfloat16"] / t} for way, t in ms.items()}
    return found


def quantized(w, dtype, block=(1, None, 1), scale_dtype="float32", zeros=None):
    """Weights whose experts are quantized one by one, as 4 bits take float32 temporaries."""
    how = {"block": block[1:], "transposed": True, "scale_dtype": scale_dtype}
    found = jax.jit(lambda w: jax.lax.map(lambda one: moe.quantize(one, dtype, **how), w))(w)
    zeros = None if zeros is None else jnp.zeros(found.scales.shape, zeros)
    return dataclasses.replace(found, block=(1, *found.block), zeros=zeros)


def ways_of(w):
    """The weights in each way, quantized ones in tiles."""
    for way, kind in WEIGHTS.items():
        if way == "bfloat16":
            yield way, w
        else:
            yield f"{way}, in tiles", jax.jit(moe.ScaledArray.tile)(quantized(w, *kind))


def measure_decode():
    """Of both products: what they take, and a read of the weights of the experts in use."""
    found = {}
    stream = find_limit(Stream(32, 1, 30_000_000))
    program = jax.jit(lambda given: moe.ragged_dot(*given))
    for name, (hidden, width, top_k, tokens, experts) in DECODE.items():
        logits = normal(3, tokens, experts, dtype="float32")
        _, chosen = moe.route(logits, moe.Router(top_k))
        sizes = jnp.bincount(chosen.ravel(), length=experts).astype("int32")
        used = int((sizes > 0).sum())
        sums = {}
        for depth, columns in ((hidden, 2 * width), (width, hidden)):
            x = normal(0, tokens * top_k, depth)
            w = normal(1, experts, depth, columns, scale=depth**-0.5)
            exact = program((x, w, sizes))
            for way, weights in ways_of(w):
                out = program((x, weights, sizes))
                allowed = 0.2 if weights.dtype.name in ("int4", "float4_e2m1fn") else 0.05
                record.check(f"{name}, {depth} deep, {way}", out, exact, allowed)
                num_bytes = sum(a.nbytes for a in jax.tree.leaves(weights)) * used // experts
                us, read_us = sums.get(way, (0, 0))
                us += median_us(program, (x, weights, sizes))
                sums[way] = us, read_us + stream["median_us"] * num_bytes / stream["bytes"]
        for way, (us, read_us) in sums.items():
            figures = {"median_us": us, "read_us": read_us, "fraction_of_read": read_us / us}
            found[f"{name}, {way}"] = figures | {"speedup": sums["bfloat16"][0] / us}
    return found


PARTS = {
    "errors": measure_errors,
    "weight_gradients": measure_weight_gradients,
    "layers": measure_layers,
    "decode": measure_decode,
    "products": measure_products,
}


def main():
    parser = record.parser(__file__, __doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, help="keep the record's other parts")
    options = record.parse(parser)
    recipes = {way: r and dataclasses.asdict(r) for way, r in RECIPES.items() if type(r) is not str}
    known = record.known(options.output) if options.only else {}
    found = {part: known.get(part) for part in PARTS}
    for part in options.only or PARTS:
        found[part] = PARTS[part]()
        print(part, record.shown(found[part]), flush=True)
        record.write(options.output, recipes=recipes, **found)


if __name__ == "__main__":
    main()
