"""What the ops compile to on each card, lowered without one: registers, spills, shared memory.

    python -m tests.cards [--cards 90 120] [--output benchmarks/cards.json]

Lowers programs of every op, forward and backward, for each compute capability, and has each kernel
assembled. Prints a line for each kernel and card, and what is wrong: programs that do not lower,
registers that are spilled, products that are serialized, registers that are overwritten while
tensor cores read them. Needs a JAX that encodes TMA descriptors and JAX's CUDA plugin, but no GPU.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import datetime
import functools
import importlib.metadata
import json
import math
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax

from tests import sass
from tests.moe import flat, launches
from tests.moe.activations.case import ACTIVATIONS, glu
from tests.moe.chunk_sort.case import sort_chunks
from tests.moe.launches import (
    E4M3,
    FAST,
    HALF,
    WIDE,
    array,
    of_case,
    packed,
    product,
    product_of,
    scaled,
)
from tests.moe.permutation.case import permute, unpermute
from tests.moe.plans.case import Sizes
from tests.moe.quantization.case import quantize
from triax import lowering, moe
from triax.binding.launch import CompiledKernel, Launch
from triax.compat import ptxas
from triax.compiling import ahead
from triax.emitting.reading import triton_calls

CARDS = (80, 86, 89, 90, 100, 103, 120, 121)
Program = tuple[Callable[..., Any], tuple[Any, ...]]


def _layer(
    tokens: int, dtype: str = HALF, top_k: int = 4, gradient: bool = True, **how: Any
) -> Program:
    """A layer of 8 experts, 512 wide; `how` as in `flat`, arrays among them."""
    experts, hidden, width = 8, 512, 512
    given = {
        "x": array(tokens, hidden, dtype=dtype),
        "logits": array(tokens, experts, dtype=WIDE),
        "w_gate_up": array(experts, hidden, 2 * width, dtype=dtype),
        "w_down": array(experts, width, hidden, dtype=dtype),
    }
    given |= {name: how.pop(name) for name in [*how] if name[:2] in ("w_", "b_")}

    def run(*arrays: Any, implementation: str) -> Any:
        named = dict(zip(given, arrays, strict=True))
        return flat.layer(**named, top_k=top_k, implementation=implementation, **how).tokens

    arrays = tuple(given.values())
    return (launches.with_gradient(run) if gradient else run), arrays


def _biased(tokens: int) -> Program:
    """gpt-oss' layer."""
    biases = {"b_gate_up": array(8, 1024), "b_down": array(8, 512)}
    how = {"activation": moe.Swiglu(alpha=1.702, limit=7.0, up_offset=1.0), "interleaved": True}
    return _layer(tokens, normalize=True, **biases, **how)


def _in_tiles(tokens: int, kind: str) -> Program:
    """A layer whose weights are in 8 or 4 bits, in tiles, without gradients."""
    weights = {"w_gate_up": (8, 1024, 512), "w_down": (8, 512, 512)}

    def of(groups: int, columns: int, depth: int) -> Any:
        how = {"transposed": True}
        if kind in ("float4_e2m1fn", "int4"):
            mx = ("float8_e8m0fnu", 32) if kind == "float4_e2m1fn" else (WIDE, 128)
            bytes_of = array(groups, columns, depth // 2, dtype="uint8")
            return scaled(bytes_of, (1, mx[1], 1), mx[0], packed=kind, **how)
        return scaled(array(groups, columns, depth, dtype=kind), (1, None, 1), **how)

    tiles = {n: jax.eval_shape(moe.ScaledArray.tile, of(*shape)) for n, shape in weights.items()}
    return _layer(tokens, gradient=False, **tiles)


def _eight_bits(rows: int, block: Any, dtype: str = E4M3, **how: Any) -> Program:
    """Both sides in 8 bits: a scale for each row and column, or for blocks of 128."""
    blocks = ((1, 128), (1, 128, 128)) if block else ((1, None), (1, None, 1))
    x = scaled(array(rows, 512, dtype=dtype), blocks[0])
    w = scaled(array(5, 1024, 512, dtype=E4M3), blocks[1], transposed=True)
    return product_of(x, w, **how)


def _weights_alone(rows: int, dtype: str, block: Any = (1, None, 1)) -> Program:
    w = scaled(array(5, 1024, 512, dtype=dtype), block, transposed=True)
    return product_of(array(rows, 512), w)


FEW, SOME, MANY = 40, 500, 4000  # rows of five groups
TOKENS = (32, 4096)
PROGRAMS: dict[str, Program] = {
    **launches.CASES,
    **{
        f"ragged_dot, {rows} rows, {dtype}{how or ''}": launches.gradient(
            product(rows, 512, 1024, dtype, **(how or {}))
        )
        for rows in (FEW, SOME, MANY)
        for dtype, how in (
            (HALF, {"transpose_weights": True}),
            ("float16", None),
            (WIDE, None),
            (WIDE, {"precision": "high"}),
            (WIDE, {"precision": "tensorfloat32"}),
        )
    },
    **{
        f"ragged_dot, {rows} rows in 8 bits, {dtype}, {block or 'rows'}, {how or ''}": _eight_bits(
            rows, block, dtype, **how
        )
        for rows in (FEW, SOME, MANY)
        for dtype in (E4M3, "float8_e5m2")
        for block, how in ((None, {}), (None, {"precision": FAST}), ("blocks", {}))
    },
    **{
        f"ragged_dot, {rows} rows, weights in {dtype}, {block}": _weights_alone(rows, dtype, block)
        for rows in (FEW, SOME, MANY)
        for dtype in (E4M3, "float8_e5m2", "int8")
        for block in ((1, None, 1), (1, 32, 1), (1, 128, 128))
    },
    # Blocks of 128 rows, of which groups have fewer.
    "ragged_dot, 200 rows, weights in blocks": _weights_alone(200, E4M3, (1, 128, 128)),
    **{
        f"ragged_dot, {rows} rows, {numbers} in {block}{', zeros' * zeros}, in tiles": (
            launches.in_tiles(packed(rows, kind, block, numbers, zeros, columns=128))
        )
        for rows in (FEW, SOME, MANY)
        for numbers, kind, block, zeros in (
            ("int4", WIDE, 32, False),
            ("int4", WIDE, 32, True),
            ("int4", WIDE, 64, False),
            ("int4", WIDE, 128, False),
            ("float4_e2m1fn", "float8_e8m0fnu", 32, False),
        )
    },
    **{
        f"ragged_dot, {FEW} rows, {numbers}": packed(FEW, kind, 32, numbers)
        for numbers, kind in (("int4", WIDE), ("float4_e2m1fn", "float8_e8m0fnu"))
    },
    **{
        f"ragged_dot, {rows} rows, NVFP4 in tiles": launches.nvfp4(rows)
        for rows in (10, FEW, SOME, MANY)
    },
    **{
        f"ragged_dot, {rows} rows, {dtype} in tiles, {block}": launches.in_tiles(
            _weights_alone(rows, dtype, block)
        )
        for rows in (FEW, SOME, MANY)
        for dtype in (E4M3, "int8")
        for block in ((1, None, 1), (1, 32, 1), (1, 128, 128))
    },
    **{
        f"{of.__name__}, {tokens} tokens, {d}": of_case(
            of, sizes=Sizes(tokens, 4, 16, align=8), width=512, dtype=d
        )
        for of in (permute, unpermute)
        for tokens in TOKENS
        for d in (HALF, WIDE)
    },
    **{
        f"sort_chunks_by_index, {d}": of_case(sort_chunks, rows=5000, width=512, chunks=8, dtype=d)
        for d in (HALF, WIDE)
    },
    **{
        f"glu, {kind.source}, {layout}, {d}": of_case(
            glu, rows=300, width=768, kind=kind, layout=layout, dtype=d
        )
        for kind, layout, d in (
            *((kind, "halves", HALF) for kind in ACTIVATIONS),
            (ACTIVATIONS[4], "interleaved", HALF),
            (ACTIVATIONS[0], "halves", WIDE),
        )
    },
    **{
        f"quantize to {dtype}, {block}": of_case(
            quantize,
            shape=(4, 512, 768)[3 - len(block) :],
            block=block,
            transposed=len(block) == 3,
            to=dtype,
            dtype=HALF,
        )
        for dtype in (E4M3, "float8_e5m2", "int8")
        for block in ((1, None), (1, 128), (1, None, 1), (1, 128, 128))
    },
    **{
        f"layer, {tokens} tokens, {d}": _layer(tokens, d) for tokens in TOKENS for d in (HALF, WIDE)
    },
    **{f"gpt-oss' layer, {tokens} tokens": _biased(tokens) for tokens in TOKENS},
    **{
        f"layer, {tokens} tokens, {name}": _layer(tokens, recipe=recipe)
        for tokens in TOKENS
        for name, recipe in (
            ("rows", "rows"),
            ("blocks", "blocks"),
            ("all in 8 bits", moe.Recipe(weight_gradient="rows", fast_sums=False)),
            ("e5m2", moe.Recipe(gradient_dtype="float8_e5m2", weight_gradient="rows")),
        )
    },
    **{
        f"layer, {tokens} tokens, weights in {kind}": _in_tiles(tokens, kind)
        for tokens in TOKENS
        for kind in (E4M3, "int8", "int4", "float4_e2m1fn")
    },
}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What one kernel is for one card. `products` and `loads` name the instructions it uses.

    `serialized` says that the assembler lets only one product run at a time, `overwritten` how
    many instructions write to registers that a product still reads.
    """

    kernel: str
    config: str
    shared_bytes: int
    registers: int
    spilled_bytes: int
    products: str
    loads: str
    serialized: bool
    overwritten: int


def lower(program: Program, card: int) -> dict[str, tuple[Launch, CompiledKernel]]:
    """The launches of a program that is lowered for a card, and their kernels, by entry name."""
    function, arrays = program
    found = {}
    compile_launch = ahead.compile_launch

    def noted(launch: Launch, capability: int) -> CompiledKernel:
        kernel = compile_launch(launch, capability)
        found[kernel.name] = launch, kernel
        return kernel

    with (
        mock.patch.dict(os.environ, TRIAX_CUDA_ARCH=str(card)),
        mock.patch.object(lowering.ahead, "compile_launch", noted),
    ):
        traced = jax.jit(functools.partial(function, implementation=None)).trace(*arrays)
        calls = triton_calls(traced.lower(lowering_platforms=("cuda",)))
    if unfenced := [call.kernel for call in calls if not call.fenced]:
        raise AssertionError(f"not fenced from slices and updates: {', '.join(unfenced)}")
    return found


_PRODUCTS = ("wgmma.mma_async", "tcgen05.mma", "mma.sync")
_LOADS = {"cp.async.bulk.tensor": "descriptors", "cp.async.c": "cp.async", "ld.global": "ld.global"}


def assembled(launch: Launch, kernel: CompiledKernel, card: int) -> Compiled:
    """What the assembler that comes with Triton makes of a kernel."""
    with tempfile.TemporaryDirectory() as folder:
        cubin, said = ptxas.assemble(kernel.ptx, Path(folder))
        overwritten = len(sass.hazards(sass.disassemble(cubin))) if card == 90 else 0
    registers, spilled = ptxas.counts(said)
    sizes = [f"{n}={v}" for n, v in launch.constants.items() if n.startswith("BLOCK")]
    stages = dict(launch.options).get("num_stages")
    return Compiled(
        launch.kernel.name.strip("_").removesuffix("_kernel"),
        ", ".join(
            [*sizes, f"num_warps={kernel.num_warps}", *[f"num_stages={stages}"] * bool(stages)]
        ),
        kernel.shared_bytes,
        registers,
        spilled,
        next((name for name in _PRODUCTS if name in kernel.ptx), "none"),
        next((name for of, name in _LOADS.items() if of in kernel.ptx), "none"),
        "C7515" in said,
        overwritten,
    )


def survey(card: int) -> tuple[list[Compiled], list[str]]:
    """Every kernel of all programs on a card, and what of these is wrong."""
    kernels, problems = {}, []
    for name, program in PROGRAMS.items():
        try:
            kernels |= lower(program, card)
        except Exception as error:
            problems.append(f"{card}: {name}: {type(error).__name__}: {error}")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        work = [pool.submit(assembled, *pair, card) for pair in kernels.values()]
        found = [each.result() for each in work]
    for each in found:
        problems += [f"{card}: {each.kernel} [{each.config}] {what}" for what in wrong(each)]
    return found, problems


MAY_SPILL = {
    # float32 without tensor cores: products of registers with each other
    "ragged_dot": math.inf,
    # a map's pairs are counted in registers: one pass, faster than through memory
    "place_mask": math.inf,
    # MXFP4 in tiles: three or four programs share a multiprocessor
    "few_rows": 64,
    # once a tile: a second loop, which is rarely taken
    "very_few_rows": 64,
}
"""Kernels of which some configs spill registers: of a thread, at most as many bytes."""
_FEW_BYTES = 32


def wrong(compiled: Compiled) -> Iterator[str]:
    most = MAY_SPILL.get(compiled.kernel, _FEW_BYTES)
    if compiled.kernel == "ragged_dot" and compiled.products != "none":
        most = _FEW_BYTES
    if compiled.spilled_bytes > most:
        yield f"spills {compiled.spilled_bytes} bytes of registers"
    if compiled.overwritten:
        yield f"writes {compiled.overwritten} times to registers that are still read"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cards", nargs="+", type=int, choices=CARDS, default=CARDS)
    parser.add_argument("--output", type=Path, help="a file for the record")
    options = parser.parse_args()
    everything, problems = {}, []
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), context) as pool:
        for card, (found, bad) in zip(options.cards, pool.map(survey, options.cards), strict=True):
            everything[card] = found
            problems += bad
            for each in sorted(found, key=str):
                print(card, *dataclasses.astuple(each), sep="  ", flush=True)
    print(*problems, sep="\n")
    if options.output is not None:
        text = json.dumps(record(everything, problems))
        options.output.write_text(text.replace("{", "\n{") + "\n")  # a kernel on each line
    return 1 if problems else 0


def record(everything: dict[int, list[Compiled]], problems: list[str]) -> dict[str, Any]:
    versions = {name: importlib.metadata.version(name) for name in ("jax", "triton")}
    return {
        "written": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "versions": versions,
        "programs": len(PROGRAMS),
        "problems": problems,
        "cards": {
            str(card): [dataclasses.asdict(each) for each in sorted(found, key=str)]
            for card, found in everything.items()
        },
    }


if __name__ == "__main__":
    sys.exit(main())
