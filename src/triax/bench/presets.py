"""What is measured: the shapes of models people run, and the suites that pick from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from triax.bridge.errors import ArgumentValueError


@dataclasses.dataclass(frozen=True)
class Preset:
    """The shape of one model's MoE layers."""

    name: str
    hidden: int
    experts: int
    top_k: int


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset("mixtral-8x7b", 4096, 8, 2),
        Preset("deepseek-v3", 7168, 256, 8),
        Preset("qwen3-235b", 4096, 128, 8),
        Preset("gpt-oss-120b", 2880, 128, 4),
        Preset("kimi-k2", 7168, 384, 8),
        Preset("llama4-maverick", 5120, 128, 1),
    )
}


def find(name: str) -> Preset:
    """The preset of that name.

    Raises:
      ArgumentValueError: there is none.
    """
    if name not in PRESETS:
        raise ArgumentValueError(
            f"`--presets` must name some of {', '.join(PRESETS)}; got {name!r}."
        )
    return PRESETS[name]


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The shape of a chunk sort: rows [tokens, hidden] in `count` uneven chunks."""

    tokens: int
    hidden: int
    count: int

    def __str__(self) -> str:
        return f"{self.tokens:,} × {self.hidden:,} in {self.count} chunks"


@dataclasses.dataclass(frozen=True)
class Competition:
    """The cases that competitors are measured on; None for all."""

    presets: tuple[str, ...] | None = None
    tokens: tuple[int, ...] | None = None
    ops: tuple[str, ...] | None = None
    routings: tuple[str, ...] | None = None

    def covers(self, op: str, preset: str | None, tokens: int, routing: str | None) -> bool:
        """Whether a case is among them; a chunk sort, which has no preset, if its op is."""
        is_in = lambda value, values: values is None or value in values
        return is_in(op, self.ops) and (
            preset is None
            or (
                is_in(preset, self.presets)
                and is_in(tokens, self.tokens)
                and is_in(routing, self.routings)
            )
        )

    def __str__(self) -> str:
        where, what = [], []
        if self.tokens is not None:
            where.append(_at(self.tokens))
        if self.routings is not None:
            where.append(f"{', '.join(self.routings)} routing")
        if self.presets is not None:
            what.append(", ".join(self.presets))
        if self.ops is not None:
            what.append(f"ops {', '.join(self.ops)}")
        return ", ".join([*where, *(["for " + " and ".join(what)] if what else [])]) or "everywhere"


@dataclasses.dataclass(frozen=True)
class Suite:
    """A named selection of cases: all combinations of the tuples, and a chunk sort.

    As a string it says what it covers.

    `also` holds more pairs of preset and tokens, with uniform routing. `competition` is None
    where competitors are left out. `target_ms` is the device time that one case is measured for.
    """

    presets: tuple[str, ...]
    tokens: tuple[int, ...]
    routings: tuple[str, ...]
    chunks: Chunks | None
    competition: Competition | None
    target_ms: float
    also: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        names = "all presets" if self.presets == tuple(PRESETS) else ", ".join(self.presets)
        parts = [f"{names} {_at(self.tokens)}, {' and '.join(self.routings)} routing"]
        also: dict[str, tuple[int, ...]] = {}
        for name, tokens in self.also:
            also[name] = (*also.get(name, ()), tokens)
        for counts in dict.fromkeys(also.values()):
            names = ", ".join(name for name in also if also[name] == counts)
            parts.append(f"{names} {_at(counts)}, uniform routing")
        if self.chunks is not None:
            parts.append(f"a chunk sort of {self.chunks}")
        who = "none" if self.competition is None else str(self.competition)
        return "; ".join([*parts, f"competitors: {who}"])


def _at(tokens: Sequence[int]) -> str:
    *first, last = (f"{count:,}" for count in tokens)
    return f"at {', '.join(first)}{' and ' if first else ''}{last} tokens"


# Rows of a large all-to-all: 8.6 GB to read and as much to write.
_CHUNKS = Chunks(tokens=524288, hidden=4096, count=64)

SUITES: dict[str, Suite] = {
    "quick": Suite(
        presets=("deepseek-v3",),
        tokens=(8192,),
        routings=("uniform",),
        chunks=_CHUNKS,
        competition=Competition(),
        target_ms=80.0,
    ),
    "full": Suite(
        presets=tuple(PRESETS),
        tokens=(8192, 32768),
        routings=("uniform", "skewed"),
        chunks=_CHUNKS,
        competition=Competition(
            presets=("deepseek-v3", "qwen3-235b", "mixtral-8x7b"),
            tokens=(16384,),
            ops=("route+grad", "permute", "unpermute", "sort_chunks"),
            routings=("uniform",),
        ),
        target_ms=50.0,
        also=(
            *(("deepseek-v3", tokens) for tokens in (128, 512, 2048, 16384, 131072, 524288)),
            ("qwen3-235b", 16384),
            ("mixtral-8x7b", 16384),
        ),
    ),
    "scaling": Suite(
        presets=("deepseek-v3",),
        tokens=(128, 512, 2048, 8192, 32768, 131072, 524288),
        routings=("uniform",),
        chunks=None,
        competition=None,
        target_ms=80.0,
    ),
}


def on_host(suite: Suite) -> Suite:
    """The same suite at sizes that a CPU moves in milliseconds."""
    return dataclasses.replace(
        suite,
        tokens=tuple(sorted({min(tokens, 128) for tokens in suite.tokens})),
        also=(),
        chunks=None if suite.chunks is None else Chunks(tokens=4096, hidden=256, count=16),
        target_ms=20.0,
    )
