"""What is measured: the shapes of models people run, and the suites that pick from them."""

from __future__ import annotations

import argparse
import dataclasses
import itertools

from triax.bench.cases import OPS, Case

# Hidden size, experts, and experts of a token.
PRESETS = {
    "mixtral-8x7b": (4096, 8, 2),
    "deepseek-v3": (7168, 256, 8),
    "qwen3-235b": (4096, 128, 8),
    "gpt-oss-120b": (2880, 128, 4),
    "kimi-k2": (7168, 384, 8),
    "llama4-maverick": (5120, 128, 1),
}
# What the matmuls are measured on, one GPU of some: tokens, hidden size, width, experts that it
# holds, and experts of a token.
LAYERS = {
    "mixtral-8x7b": (16384, 4096, 14336, 8, 2),
    "deepseek-v3": (8192, 7168, 2048, 32, 8),
    "qwen3-235b": (8192, 4096, 1536, 16, 8),
    "gpt-oss-120b": (16384, 2880, 2880, 16, 4),
    "fine-grained": (8192, 2560, 1280, 64, 8),
}
NAMES = tuple(dict.fromkeys((*PRESETS, *LAYERS)))
# Rows of a large all-to-all, 8.6 GB to read and as much to write: tokens, hidden size, chunks.
CHUNKS = (524288, 4096, 64)
ROUTINGS = ("uniform", "skewed", "even", "uneven")
DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class Suite:
    """A named selection of cases: the moves in all combinations, the matmuls, and a chunk sort.

    `also` holds more pairs of preset and tokens, with uniform routing. Where `rivals_of` is given,
    only those of the moves have competitors, at `rivals_at` tokens with uniform routing.
    `target_ms` is the device time that one case is measured for.
    """

    about: str
    presets: tuple[str, ...]
    tokens: tuple[int, ...]
    routings: tuple[str, ...] = ROUTINGS
    layers: tuple[str, ...] = ()
    chunks: tuple[int, int, int] | None = CHUNKS
    competitors: bool = True
    rivals_of: tuple[str, ...] | None = None
    rivals_at: int | None = None
    target_ms: float = 80.0
    also: tuple[tuple[str, int], ...] = ()

    def competes(self, case: Case) -> bool:
        """Whether the suite has competitors of a case measured."""
        if self.rivals_of is None or OPS[case.op].matmuls:
            return self.competitors
        at = (case.tokens, case.routing) == (self.rivals_at, "uniform")
        return case.op in self.rivals_of and (at or case.preset is None)


_MIDDLE = ("deepseek-v3", "qwen3-235b", "mixtral-8x7b")
SUITES = {
    "quick": Suite(
        "deepseek-v3 at 8,192 tokens, and the chunk sort, with competitors",
        ("deepseek-v3",),
        (8192,),
        routings=("uniform", "even", "uneven"),
        layers=("deepseek-v3",),
    ),
    "full": Suite(
        "all presets at 8,192 and 32,768 tokens, uniform and skewed; deepseek-v3 from 128 to "
        "524,288, qwen3-235b and mixtral-8x7b at 16,384, where route+grad, permute, unpermute and "
        "the router have competitors; the chunk sort and the matmuls, with competitors",
        tuple(PRESETS),
        (8192, 32768),
        layers=tuple(LAYERS),
        rivals_of=("route+grad", "permute", "unpermute", "sort_chunks", "router", "router+grad"),
        rivals_at=16384,
        target_ms=50.0,
        also=(
            *(("deepseek-v3", count) for count in (128, 512, 2048, 16384, 131072, 524288)),
            ("qwen3-235b", 16384),
            ("mixtral-8x7b", 16384),
        ),
    ),
    "scaling": Suite(
        "deepseek-v3 from 128 to 524,288 tokens",
        ("deepseek-v3",),
        (128, 512, 2048, 8192, 32768, 131072, 524288),
        routings=("uniform",),
        chunks=None,
        competitors=False,
    ),
}


def on_host(suite: Suite) -> Suite:
    """The same suite at sizes that a CPU moves in milliseconds; `select` makes matmuls small."""
    tokens = tuple(sorted({min(count, 128) for count in suite.tokens}))
    chunks = suite.chunks and (4096, 256, 16)
    return dataclasses.replace(suite, tokens=tokens, also=(), chunks=chunks, target_ms=20.0)


def select(options: argparse.Namespace, suite: Suite, small: bool = False) -> list[Case]:
    """The cases of a command line: by shape, so that inputs are shared, then by op.

    A chunk sort is left out where models were asked for by name, unless its op was too.
    """
    ops = [op for op in OPS if op in (options.ops or OPS)]
    routings = options.routing or suite.routings
    dtypes = options.dtypes or ["bfloat16"]
    presets = [name for name in options.presets or suite.presets if name in PRESETS]
    layers = [name for name in options.presets or suite.layers if name in LAYERS]
    moved = [*itertools.product(presets, options.tokens or suite.tokens, dtypes, routings)]
    if not options.presets and not options.tokens and "uniform" in routings:
        moved += [(*at, dtype, "uniform") for at, dtype in itertools.product(suite.also, dtypes)]
    shapes = [
        Case("", name, count, *PRESETS[name], dtype, routing)
        for name, count, dtype, routing in moved
    ]
    for name, dtype, routing in itertools.product(layers, dtypes, routings):
        tokens, hidden, width, experts, top_k = LAYERS[name]
        if small:
            tokens, hidden, width, experts = 64, hidden // 64, width // 64, max(4, experts // 8)
        for count in options.tokens or [tokens]:
            top_k = min(top_k, experts)
            shapes.append(Case("", name, count, hidden, experts, top_k, dtype, routing, width))
    if suite.chunks is not None and (options.ops or not options.presets):
        tokens, hidden, chunks = suite.chunks
        for dtype in options.dtypes or ["float32"]:
            shapes.append(Case("", None, tokens, hidden, chunks, 1, dtype, None))
    return [
        dataclasses.replace(shape, op=op)
        for shape in shapes
        for op in ops
        if shape.routing in OPS[op].routings and bool(shape.width) == bool(OPS[op].matmuls)
    ]
