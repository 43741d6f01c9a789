"""Decoding with quantized weights, against what servers run: Marlin and triton_kernels.

- Marlin is vLLM's `moe_wna16_marlin_gemm`. Its scales are bfloat16 but for MXFP4, and its weights
  are padded to multiples of 128, which is less than vLLM pads those of gpt-oss.
- triton_kernels is OpenAI's `matmul_ogs`, on its own or as vLLM bundles it. MXFP4 has Hopper's
  layouts, with scales for 8 and for 4 warps, and the depth whole, as in vLLM, or split as the
  library chooses; the fastest of the four counts.

All multiply the same rows, sorted by expert, by the same weights: gate and up, then down, without
gathers, activations or biases. Sizes of groups, and the rivals' tables of blocks, are there before,
as they depend on the router alone. Each product is timed by itself, and the two are added. Rivals
run as CUDA graphs. Weights that fit in a GPU's L2 cache stay there from call to call, for all.

`of_read` is what a plain read of the weights in use takes, as Triax stores them and with scales,
as a share of a library's time; `over_triax` is a rival's time over Triax's. A rival that is not
installed, or whose result is wrong, gets the reason in place of times.

    python -m benchmarks.decode_rivals [--models M ...] [--formats F ...] [--tokens N ...]
        [--add] [--output FILE]
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import os
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import record, rivals
from benchmarks.harness.inputs import LAYERS, normal
from benchmarks.harness.streams import Stream, find_limit
from triax import moe
from triax.benchmark import HOST_BOUND, time_calls

MODELS = {
    "gpt-oss-120b": LAYERS["gpt-oss-120b"]._replace(experts=128),
    "deepseek-v3-32": LAYERS["deepseek-v3"],
    "deepseek-v3-256": LAYERS["deepseek-v3"]._replace(experts=256),
    "qwen3-30b": LAYERS["qwen3-30b"],
}
# The dtype, and how deep and wide the block of a scale is; None is all of the depth.
FORMATS: dict[str, tuple[str, int | None, int]] = {
    "MXFP4": ("float4_e2m1fn", 32, 1),
    "NVFP4": ("float4_e2m1fn", 16, 1),
    "int4-32": ("int4", 32, 1),
    "int4-64": ("int4", 64, 1),
    "int4-128": ("int4", 128, 1),
    "int8": ("int8", None, 1),
    "e4m3": ("float8_e4m3fn", None, 1),
    "e4m3-128x128": ("float8_e4m3fn", 128, 128),
    "bfloat16": ("bfloat16", None, 1),
}
TOKENS = 1, 8, 16, 32, 64, 128, 256, 512
CHECKED_ROWS, TOLERANCE, ROUNDS, TARGET_MS = 256, 0.01, 3, 15.0


class Product(NamedTuple):
    """One of a layer's products: each library's µs, or why there are none, and a read's."""

    times_us: dict[str, float | str]
    read_us: float


@functools.partial(jax.jit, static_argnums=range(4))
def weights(name: str, experts: int, depth: int, columns: int) -> Any:
    """Random weights [experts, depth, columns] of a format, whose scales bfloat16 holds.

    4-bit weights keep them so, as checkpoints and rivals do; NVFP4 has them in float8_e4m3fn.
    """
    dtype, deep, wide = FORMATS[name]
    packed = dtype if dtype in ("int4", "float4_e2m1fn") else None
    keys = jax.random.split(jax.random.key(1))
    stored = experts, columns, depth // 2 if packed else depth
    values = jax.random.bits(keys[0], stored, jnp.uint8)
    if not packed:  # floats without their second bit are below 2, and numbers
        values = values & 0xBF if dtype == "float8_e4m3fn" else values
        values = jax.lax.bitcast_convert_type(values, dtype)
    blocks = experts, -(-columns // wide), -(-depth // (deep or depth))
    scales = jax.random.uniform(keys[1], blocks, "bfloat16", 0.01, 0.02)
    scales = scales if packed else scales.astype("float32")
    if name == "MXFP4":
        codes = jax.random.randint(keys[1], blocks, 118, 124).astype("uint8")
        scales = jax.lax.bitcast_convert_type(codes, jnp.float8_e8m0fnu)
    array = moe.ScaledArray(values, scales, (1, deep, wide), transposed=True, packed=packed)
    if name != "NVFP4":
        return array
    of_all = jnp.full((*blocks[:-1], 1), 2.0**-10, "float32")
    of_blocks = (1024 * scales).astype(jnp.float8_e4m3fn)
    return dataclasses.replace(array, scales=of_blocks, global_scales=of_all)


def triax(w: Any) -> dict[str, rivals.Way]:
    """Triax, with quantized weights in tiles."""
    tiled = w if isinstance(w, jax.Array) else jax.jit(moe.ScaledArray.tile)(w)
    program = jax.jit(lambda given: moe.ragged_dot(*given))
    return {"Triax": lambda x, sizes: functools.partial(program, (x, tiled, jnp.asarray(sizes)))}


def libraries_of(name: str) -> dict[str, Any]:
    """The libraries that have kernels for a format."""
    found = {"Triax": triax}
    if FORMATS[name][0] in rivals.MARLIN_TYPES and name != "NVFP4":  # has other scales there
        found["Marlin"] = rivals.marlin
    if name in ("MXFP4", "bfloat16"):
        found["triton_kernels"] = rivals.triton_kernels
    return found


@jax.jit
def expected(x: jax.Array, w: Any, experts: jax.Array) -> jax.Array:
    """Each row times its expert's dequantized weights, in float32."""
    wide = lambda a: a.astype("float32")
    dot = lambda given: jnp.dot(wide(given[0]), wide(w[given[1]]), precision="highest")
    return jax.lax.map(dot, (x, experts))


def ready(call: rivals.Call, is_own: bool, rows: np.ndarray, wanted: jax.Array) -> rivals.Call:
    """The call to time, if its result is right."""
    out = jax.block_until_ready(call())
    if not is_own:
        call = rivals.as_graph(call)
        out = rivals.result(call())
    off = record.difference(out[rows, : wanted.shape[1]], wanted)
    if not off <= TOLERANCE:
        raise ArithmeticError(f"wrong by {off:.3g} of what is expected, which may be {TOLERANCE}")
    return call


def median_us(call: rivals.Call, is_own: bool) -> float:
    """The median of a call's times on the device."""
    timing = time_calls(call, rivals.clock(is_own), TARGET_MS)
    if timing.method == HOST_BOUND:
        raise RuntimeError("the host is too slow to measure it")
    return timing.median_us


def fastest(times_us: dict[str, float | str]) -> dict[str, float | str]:
    """The shortest time of each library's ways, or why there is none."""
    best: dict[str, float | str] = {}
    for way, us in sorted(times_us.items(), key=lambda item: (isinstance(item[1], str), item[1])):
        best.setdefault(way.partition(",")[0], us)
    return best


def measure_product(
    name: str, shape: tuple[int, int, int], top_k: int, all_tokens: Any, read_us: float
) -> Iterator[Product]:
    """For each number of tokens, rows times weights of a shape; `read_us` is a byte's."""
    gc.collect()  # a cycle somewhere may still hold arrays of gigabytes
    experts, depth, _ = shape
    w = normal(1, *shape) if name == "bfloat16" else weights(name, *shape)
    all_rows = normal(2, top_k * max(all_tokens), depth)
    ways: dict[str, rivals.Way] = {}
    failed: dict[str, float | str] = {}
    for library, prepare in libraries_of(name).items():
        try:
            ways |= prepare(w)
        except Exception as error:  # importing a library can raise anything
            failed[library] = record.reason(error)
    for tokens in all_tokens:
        chosen = np.random.default_rng(tokens).random((tokens, experts)).argsort(1)[:, :top_k]
        chosen = np.sort(chosen, axis=None).astype(np.int32)
        sizes = np.bincount(chosen, minlength=experts).astype(np.int32)
        x = jax.block_until_ready(all_rows[: len(chosen)])
        rows = np.linspace(0, len(chosen) - 1, CHECKED_ROWS).round().astype(np.int32)
        wanted = expected(x[rows], w, chosen[rows])
        calls: dict[str, rivals.Call] = {}
        samples: dict[str, list[float]] = {way: [] for way in ways}
        found = dict(failed)
        for turn, (way, prepare) in itertools.product(range(ROUNDS), ways.items()):
            try:
                if not turn:
                    calls[way] = ready(prepare(x, sizes), way == "Triax", rows, wanted)
                if way not in found:
                    samples[way].append(median_us(calls[way], way == "Triax"))
            except Exception as error:  # out of memory, or anything in a library
                found[way] = record.reason(error)
        found |= {way: statistics.median(us) for way, us in samples.items() if way not in found}
        yield Product(fastest(found), read_us * w.nbytes * np.count_nonzero(sizes) / experts)


def figures(up: Product, down: Product) -> dict[str, Any]:
    """Of both products: times, shares of a read, and rivals' times over Triax's."""
    read_us = up.read_us + down.read_us
    found: dict[str, Any] = {"read_us": read_us}
    for library in up.times_us:
        times = up.times_us[library], down.times_us[library]
        reasons = [why for why in times if isinstance(why, str)]
        us = 0.0 if reasons else sum(times)
        found[library] = reasons[0] if reasons else {"us": us, "of_read": read_us / us}
    own = found["Triax"]
    for library in up.times_us.keys() - {"Triax"}:
        if isinstance(own, dict) and isinstance(found[library], dict):
            found[library]["over_triax"] = found[library]["us"] / own["us"]
    return found


def measure(models: Any, formats: Any, all_tokens: Any) -> Iterator[tuple[str, Any]]:
    """Times by model, format and tokens."""
    stream = find_limit(Stream(32, 1, 30_000_000))
    byte_us = stream["median_us"] / stream["bytes"]
    for model, name in itertools.product(models, formats):
        layer, (_, deep, wide) = MODELS[model], FORMATS[name]
        if deep and wide == 1 and (layer.hidden % deep or layer.width % deep):
            continue  # checkpoints have whole groups
        shapes = (layer.hidden, 2 * layer.width), (layer.width, layer.hidden)
        up, down = (
            [*measure_product(name, (layer.experts, *shape), layer.top_k, all_tokens, byte_us)]
            for shape in shapes
        )
        for tokens, *both in zip(all_tokens, up, down, strict=True):
            yield f"{model}, {name}, {tokens} tokens", figures(*both)


def main() -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory too
    parser = record.parser(__file__, __doc__ or "")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=[*FORMATS])
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--add", action="store_true", help="keep the record's other results")
    options = record.parse(parser)
    before = record.known(options.output)["results"] if options.add else {}
    found = measure(options.models, options.formats, options.tokens)
    record.keep(options.output, found, before, checked_rows=CHECKED_ROWS, tolerance=TOLERANCE)


if __name__ == "__main__":
    main()
