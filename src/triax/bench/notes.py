"""The notes of a record: what a reader is to know of a run beside its results.

They name flags of `triax bench` as they are typed.
"""

from __future__ import annotations

from collections.abc import Sequence

from triax.bench import machine
from triax.bench.cases import Case, Stream
from triax.bench.presets import Suite
from triax.bench.selection import Request, competes


def of_selection(request: Request, suite: Suite, cases: Sequence[Case]) -> list[str]:
    """What was asked for, and what the cases that `select` found have no use for."""
    found = []
    if all(case.preset is None for case in cases):
        asked = {
            "--presets": request.presets,
            "--tokens": request.tokens,
            "--routing": request.routings,
        }
        flags = [flag for flag, values in asked.items() if values is not None]
        if flags:
            found.append(
                f"without effect: {', '.join(flags)}; the chunk sort has a shape of its own, "
                f"{suite.chunks}"
            )
        if request.memory:
            found.append("without effect: --memory; it is of a model's route, and no model is run")
    if request.competitors and not any(competes(case, suite) for case in cases):
        where = suite.competition
        measures = "measures none" if where is None else f"measures them {where}"
        found.append(f"no competitors: suite `{request.suite}` {measures}")
    return found


def on_host(request: Request, cases: Sequence[Case]) -> str:
    """What times from a machine without a GPU are."""
    tokens = dict.fromkeys(f"{case.tokens:,}" for case in cases if case.preset is not None)
    sizes = "sizes are small"
    if tokens and request.tokens is None:
        sizes += f" ({', '.join(tokens)} tokens; --tokens chooses others)"
    elif tokens:
        sizes = f"models get {', '.join(tokens)} tokens"
    return (
        f"There is no NVIDIA GPU here: {sizes}, the ops run as plain JAX, times are the host's, "
        "and nothing is compared with them."
    )


def too_large(case: Case) -> str:
    """That a case was not tried, for it takes more memory than there is."""
    return f"left out, too large: {case.label}; it needs about {_of_memory(case.memory_bytes)}"


def out_of_memory(case: Case, implementation: str | None, error: Exception) -> str:
    """That the memory was too small for an implementation of a case; None is Triax itself."""
    what = f"left out, out of memory: {case.label}"
    needed = f"needs about {_of_memory(case.memory_bytes)}"
    if implementation is None:
        return f"{what}; it {needed}"
    if type(error).__module__.partition(".")[0] == "torch":
        return f"{what} by {implementation}, which has the memory that JAX leaves"
    return f"{what} by {implementation}; Triax {needed}"


def without_limit(cases: Sequence[Case], stream: Stream, problem: str) -> str | None:
    """What a stream that could not be measured costs cases of one shape; None for nothing."""
    ops = [case.op for case in cases if stream in dict(case.streams)]
    if not ops:
        return None
    case = cases[0]
    shape = "the chunk sort"
    if case.preset is not None:
        shape = f"{case.preset.name} at {case.tokens:,} tokens"
    if machine.is_out_of_memory(problem):
        num_bytes = (stream.reads + stream.writes) * stream.unit_bytes
        problem = f"out of memory; it needs about {_of_memory(num_bytes)}"
    return (
        f"no fraction of a stream for {', '.join(ops)} of {shape}, {case.dtype}: the stream that "
        f"reads {stream.reads} and writes {stream.writes} arrays of "
        f"{machine.gigabytes(stream.unit_bytes)} could not be measured: {problem}"
    )


def _of_memory(num_bytes: int) -> str:
    """So many bytes, how many there are, and how there can be more."""
    needed, limit = machine.gigabytes(num_bytes), machine.memory_limit_bytes()
    if limit is None:
        return needed
    return f"{needed}, JAX may use {machine.gigabytes(limit)}: {machine.FRACTION} raises that"
