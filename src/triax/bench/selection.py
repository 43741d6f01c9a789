"""Which cases a run has: those of a suite, with lists of one's own in place of the suite's."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from triax.bench import presets
from triax.bench.cases import DTYPES, ROUTINGS, Case
from triax.bench.presets import Suite
from triax.bench.programs import CHUNK_OPS, OPS
from triax.bridge.errors import ArgumentValueError
from triax.moe import arguments


@dataclasses.dataclass(frozen=True)
class Request:
    """What to measure: a suite, and what stands in place of its own lists where not None.

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
    ops = tuple(OPS) if request.ops is None else tuple(request.ops)
    _check("ops", ops, tuple(OPS))
    routings = suite.routings if request.routings is None else tuple(request.routings)
    _check("routing", routings, ROUTINGS)
    _check("dtypes", request.dtypes or (), DTYPES)
    names = suite.presets if request.presets is None else tuple(request.presets)
    tokens = suite.tokens if request.tokens is None else tuple(request.tokens)
    for count in tokens:
        arguments.integer("tokens", count, 1)
    shapes = list(
        itertools.product(names, tokens, request.dtypes or ("bfloat16",), routings),
    )
    if request.presets is None and request.tokens is None and "uniform" in routings:
        also = itertools.product(suite.also, request.dtypes or ("bfloat16",))
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
            for dtype in request.dtypes or ("float32",)
            for op in CHUNK_OPS
            if op in ops
        ]
    if not cases:
        raise ArgumentValueError(
            f"Argument `ops` leaves nothing of suite {request.suite!r}; got {', '.join(ops)}."
        )
    return cases


def _check(name: str, values: Sequence[str], choices: Sequence[str]) -> None:
    for value in values:
        if value not in choices:
            raise ArgumentValueError(
                f"Argument `{name}` must name some of {', '.join(choices)}; got {value!r}."
            )
