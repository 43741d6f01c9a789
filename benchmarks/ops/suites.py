"""What is measured: the shapes of models people run, and the suites that pick from them."""

from __future__ import annotations

import argparse
import dataclasses
import itertools

from benchmarks.harness.inputs import LAYERS
from benchmarks.ops.cases import OPS, Case

# Hidden size, experts, and experts of a token.
PRESETS = {
    "mixtral-8x7b": (4096, 8, 2),
    "deepseek-v3": (7168, 256, 8),
    "qwen3-235b": (4096, 128, 8),
    "gpt-oss-120b": (2880, 128, 4),
    "kimi-k2": (7168, 384, 8),
    "llama4-maverick": (5120, 128, 1),
}
NAMES = tuple(dict.fromkeys((*PRESETS, *LAYERS)))
# Rows of a large all-to-all, 8.6 GB to read and as much to write: tokens, hidden size, chunks.
CHUNKS = (524288, 4096, 64)
ROUTINGS = ("uniform", "skewed", "even", "uneven", "half")
DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class Suite:
    """A named selection of cases: moves by preset, tokens and routing, matmuls, and a chunk sort.

    `also` holds more pairs of preset and tokens, with uniform routing. Moves have competitors if
    `rivals_of` names the op, at `RIVALS_AT` tokens and uniform routing, or if it is None.
    """

    about: str
    presets: tuple[str, ...] = ("deepseek-v3",)
    tokens: tuple[int, ...] = (8192,)
    routings: tuple[str, ...] = ("uniform", "even", "uneven")
    only_moves: bool = False
    rivals_of: tuple[str, ...] | None = None
    also: tuple[tuple[str, int], ...] = ()

    def competes(self, case: Case) -> bool:
        """Whether the suite has competitors of a case measured."""
        if self.rivals_of is None or OPS[case.op].matmuls:
            return True
        at = (case.tokens, case.routing) == (RIVALS_AT, "uniform")
        return case.op in self.rivals_of and (at or case.preset is None)


RIVALS_AT = 16384
SCALES = (128, 512, 2048, 8192, 32768, 131072, 524288)
SUITES = {
    "quick": Suite(
        "deepseek-v3 at 8,192 tokens and its matmuls, and the chunk sort, all with competitors"
    ),
    "full": Suite(
        "all presets at 8,192 and 32,768 tokens, uniform and skewed; deepseek-v3 from 128 to "
        "524,288, qwen3-235b and mixtral-8x7b at 16,384, where moves+grad, permute, unpermute and "
        "the router have competitors; the chunk sort and all matmuls, with competitors",
        presets=NAMES,
        tokens=(8192, 32768),
        routings=ROUTINGS,
        rivals_of=("moves+grad", "permute", "unpermute", "sort_chunks", "router", "router+grad"),
        also=(
            *(("deepseek-v3", tokens) for tokens in SCALES),
            *((name, RIVALS_AT) for name in ("deepseek-v3", "qwen3-235b", "mixtral-8x7b")),
        ),
    ),
    "scaling": Suite(
        "deepseek-v3 from 128 to 524,288 tokens, without competitors",
        tokens=SCALES,
        only_moves=True,
        rivals_of=(),
    ),
}


def select(options: argparse.Namespace, suite: Suite, small: bool) -> list[Case]:
    """The cases of a command line: by shape, then by op; at `small` sizes, for a CPU.

    A chunk sort is left out where models were asked for by name, unless its op was too.
    """
    shapes = []
    presets, routings = options.presets or suite.presets, options.routing or suite.routings
    dtypes = options.dtypes or ["bfloat16"]
    for name, dtype, routing in itertools.product(presets, dtypes, routings):
        if name in PRESETS:
            counts = options.tokens or ([128] if small else suite.tokens)
            if routing == "uniform" and not (small or options.tokens or options.presets):
                counts = [*counts, *(count for preset, count in suite.also if preset == name)]
            shapes += [Case("", name, n, *PRESETS[name], dtype, routing) for n in counts]
        if name in LAYERS and not suite.only_moves:
            count, hidden, experts, top_k, width = LAYERS[name]
            if small:
                count, hidden, experts, top_k, width = 64, hidden // 64, 4, 2, width // 64
            for n in options.tokens or [count]:
                shapes.append(Case("", name, n, hidden, experts, top_k, dtype, routing, width))
    if not suite.only_moves and (options.ops or not options.presets):
        rows, hidden, chunks = (4096, 256, 16) if small else CHUNKS
        for dtype in options.dtypes or ["float32"]:
            shapes.append(Case("", None, rows, hidden, chunks, 1, dtype, None))
    return [
        dataclasses.replace(shape, op=name)
        for shape in dict.fromkeys(shapes)
        for name, op in OPS.items()
        if (not options.ops or name in options.ops)
        and shape.routing in op.routings
        and bool(shape.width) == bool(op.matmuls)
    ]
