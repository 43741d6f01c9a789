"""Which cases a run has: those of a suite, with lists of one's own in place of the suite's.

Errors name the flags of `triax bench`, which is where requests come from.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TypeVar

from triax.bench import presets
from triax.bench.cases import DTYPES, ROUTINGS, Case
from triax.bench.presets import Suite
from triax.bench.programs import CHUNK_OPS, OPS
from triax.bridge.errors import ArgumentValueError
from triax.moe import arguments

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Request:
    """What to measure: a suite, and what stands in place of its own lists where not None.

    What a list names twice is measured once.

    Attributes:
      suite: a key of `presets.SUITES`.
      ops, presets, tokens, dtypes, routings: lists to take the place of the suite's.
      competitors: whether to measure them where the suite does.
      first_call: whether to measure what the first call costs.
      memory: whether to measure what memory a route takes.
      command: as the record names it.
    """

    suite: str = "quick"
    ops: Sequence[str] | None = None
    presets: Sequence[str] | None = None
    tokens: Sequence[int] | None = None
    dtypes: Sequence[str] | None = None
    routings: Sequence[str] | None = None
    competitors: bool = True
    first_call: bool = False
    memory: bool = False
    command: str = "triax bench"


def select(request: Request, suite: Suite) -> list[Case]:
    """The cases of a request: by shape, so that inputs are shared, then by op.

    A chunk sort is left out where models were asked for by name, unless its op was too.

    Raises:
      ArgumentValueError: the request names something that there is not, or nothing is left.
    """
    ops = tuple(OPS) if request.ops is None else _once(request.ops)
    _check("--ops", ops, tuple(OPS))
    routings = suite.routings if request.routings is None else _once(request.routings)
    _check("--routing", routings, ROUTINGS)
    dtypes = _once(request.dtypes or ())
    _check("--dtypes", dtypes, DTYPES)
    names = suite.presets if request.presets is None else _once(request.presets)
    tokens = suite.tokens if request.tokens is None else _once(request.tokens)
    for count in tokens:
        arguments.integer("--tokens", count, 1)
    shapes = list(itertools.product(names, tokens, dtypes or ("bfloat16",), routings))
    if request.presets is None and request.tokens is None and "uniform" in routings:
        also = itertools.product(suite.also, dtypes or ("bfloat16",))
        shapes += [(name, count, dtype, "uniform") for (name, count), dtype in also]
    cases = [
        Case.routed(op, presets.find(name), count, dtype, routing)
        for name, count, dtype, routing in shapes
        for op in OPS
        if op in ops and op not in CHUNK_OPS
    ]
    if suite.chunks is not None and (request.presets is None or request.ops is not None):
        cases += [
            Case.chunked(op, suite.chunks, dtype)
            for dtype in dtypes or ("float32",)
            for op in CHUNK_OPS
            if op in ops
        ]
    if not cases:
        raise ArgumentValueError(
            f"`--ops {' '.join(ops)}` leaves nothing of suite `{request.suite}`, which has no "
            "chunk sort; name another suite, or other ops."
        )
    return cases


def competes(case: Case, suite: Suite) -> bool:
    """Whether the suite has competitors of a case measured."""
    name = None if case.preset is None else case.preset.name
    found = suite.competition
    return found is not None and found.covers(case.op, name, case.tokens, case.routing)


def _once(values: Sequence[T]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(values))


def _check(flag: str, values: Sequence[str], choices: Sequence[str]) -> None:
    for value in values:
        if value not in choices:
            raise ArgumentValueError(
                f"`{flag}` must name some of {', '.join(choices)}; got {value!r}."
            )
