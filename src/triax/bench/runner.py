"""Runs the cases of a suite: results checked, then timed, competitors beside them.

In: what was asked for on the command line. Out: the record that `report` writes and prints. A
case that fails is a line in the record, and the others go on.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from triax.bench import checks, machine, notes, presets
from triax.bench.cases import Case
from triax.bench.inputs import Inputs
from triax.bench.presets import Suite
from triax.bench.programs import OPS
from triax.bench.progress import steps
from triax.bench.selection import Request, competes, select
from triax.bench.streams import Limits
from triax.bench.timing import Timing, time_program
from triax.bridge.devices import is_cuda
from triax.bridge.errors import UnsupportedError

SCHEMA = 1
OWN = "triax"


def run(request: Request) -> dict[str, Any]:
    """Measures what was asked for; returns the record.

    Raises:
      ArgumentValueError: the request makes no sense.
      UnsupportedError: JAX has no device here.
    """
    suite = presets.SUITES[request.suite]
    try:
        on_gpu = is_cuda(jax.devices()[0])
    except (RuntimeError, AssertionError) as error:  # the latter for "cuda" without a GPU
        raise UnsupportedError(
            f"JAX finds no device to measure on ({_first_line(error)}). Is JAX_PLATFORMS right?"
        ) from error
    bench = _Bench(suite if on_gpu else presets.on_host(suite), request, on_gpu)
    cases = select(request, bench.suite)
    if not on_gpu:
        bench.note(notes.on_host(request, cases))
    for text in notes.of_selection(request, bench.suite, cases):
        bench.note(text)
    first_call: list[Any] = []
    memory: list[Any] = []
    complete = True
    try:
        if request.first_call:
            first_call = bench.attempt("first calls", _first_calls)
        if request.memory:
            memory = _memory(cases, bench)
        for case in steps(_in_groups(cases, bench), len(cases), lambda case: case.label):
            bench.measure(case)
    except KeyboardInterrupt:  # what has been measured is worth keeping
        bench.note("interrupted: the record is not whole")
        complete = False
    return {
        "schema": SCHEMA,
        "written": machine.now(),
        "command": request.command,
        "machine": machine.describe(),
        "versions": machine.versions(),
        "results": bench.results,
        "streams": bench.limits.records(),
        "first_call": first_call,
        "memory": memory,
        "notes": bench.notes,
        "complete": complete,
    }


def _in_groups(cases: Sequence[Case], bench: _Bench) -> Iterator[Case]:
    """The cases, with what neighbours of one shape share made ready before the first of them."""
    shape = lambda case: dataclasses.replace(case, op="")
    for _, group in itertools.groupby(cases, shape):
        members = list(group)
        bench.start_group(members)
        yield from members


class _Ready(NamedTuple):
    """An implementation with its inputs in place: what runs it once, and what times it."""

    run: Callable[[], Any]
    time: Callable[[], Timing]


class _Bench:
    """One run: what its cases share, and what has been found so far."""

    def __init__(self, suite: Suite, request: Request, on_gpu: bool):
        self.suite = suite
        self.limits = Limits(suite.target_ms / 4)
        self.results: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self._competitors = request.competitors
        self._on_gpu = on_gpu
        self._memory_bytes = machine.memory_limit_bytes()
        self._pool: Inputs = {}

    def start_group(self, cases: Sequence[Case]) -> None:
        """Before cases that differ in nothing but their op."""
        self._pool = {}
        gc.collect()  # a cycle somewhere may still hold arrays of gigabytes
        if not self._on_gpu:
            return
        for case in cases:
            if self._fits(case):
                self.limits.measure(case)
        for stream, problem in self.limits.problems.items():
            if (text := notes.without_limit(cases, stream, problem)) is not None:
                self.note(text)

    def measure(self, case: Case) -> None:
        """All implementations of one case."""
        if not self._fits(case):
            self.note(notes.too_large(case))
            return
        self._make_room(case)
        self._measure(case, OWN, lambda inputs: self._of_program(case, case.compiled(), inputs))
        if self._competitors and competes(case, self.suite):
            self.attempt("competitors", lambda: self._measure_competitors(case))

    def attempt(self, what: str, function: Callable[[], Any]) -> list[Any]:
        """What `function` returns, or nothing and a note of why."""
        try:
            return function() or []
        except Exception as error:
            self.note(f"no {what}: {_first_line(error)}")
            return []

    def _measure_competitors(self, case: Case) -> None:
        from triax.bench import competitors, torch_competitor

        for name, competitor in competitors.competitors(case).items():
            self._measure(case, name, functools.partial(self._of_competitor, case, competitor))
        for name, reason in competitors.left_out(case).items():
            self.note(f"{name} is left out: {reason}")
        if (problem := torch_competitor.problem(case)) is not None:
            self.note(f"{torch_competitor.NAME} is left out: {problem}")
        elif case.op in torch_competitor.OPS:
            self._measure(case, torch_competitor.NAME, functools.partial(self._of_torch, case))

    def _measure(
        self, case: Case, implementation: str, make_ready: Callable[[Inputs], _Ready]
    ) -> None:
        """One implementation: its results, and its time if they are right."""
        timing = None
        try:
            inputs = case.make_inputs(pool=self._pool)
            ready = make_ready(inputs)
            outputs = ready.run()
            error = checks.problem(case, inputs, outputs)
            outputs = None  # its memory is wanted
            if error is None:
                timing = ready.time()
        except Exception as exception:
            if machine.is_out_of_memory(exception):
                competitor = None if implementation == OWN else implementation
                self.note(notes.out_of_memory(case, competitor, exception))
                return
            error = f"failed: {_first_line(exception)}"
        stream_us = self.limits.time_us(case)
        self.results.append(_record(case, implementation, timing, stream_us, error))

    def _of_program(self, case: Case, program: Callable[[Any], Any], inputs: Any) -> _Ready:
        # What a competitor prepares may be no such dict, and then its runs cannot be chained.
        chain = case.chain if isinstance(inputs, dict) else None
        target_ms = self.suite.target_ms
        return _Ready(
            run=lambda: program(inputs),
            time=lambda: time_program(program, inputs, chain=chain, target_ms=target_ms),
        )

    def _of_competitor(self, case: Case, competitor: Any, inputs: Inputs) -> _Ready:
        prepared = jax.block_until_ready(competitor.prepare(inputs))
        return self._of_program(case, jax.jit(competitor.program), prepared)

    def _of_torch(self, case: Case, inputs: Inputs) -> _Ready:
        from triax.bench.torch_competitor import TorchMove

        move = TorchMove(case, inputs)
        return _Ready(run=move.output, time=lambda: move.time(self.suite.target_ms))

    def _fits(self, case: Case) -> bool:
        return self._memory_bytes is None or case.memory_bytes <= self._memory_bytes

    def _make_room(self, case: Case) -> None:
        """Drops inputs that other ops want where they and this op do not fit together."""
        if self._memory_bytes is None:
            return
        own = OPS[case.op].inputs
        others = {name: array for name, array in self._pool.items() if name not in own}
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(others))
        if case.memory_bytes + held > self._memory_bytes:
            for name in others:
                del self._pool[name]
            gc.collect()

    def note(self, text: str) -> None:
        """Something to be read beside the results, once."""
        if text not in self.notes:
            self.notes.append(text)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"


def _record(
    case: Case,
    implementation: str,
    timing: Timing | None,
    stream_us: float | None,
    error: str | None,
) -> dict[str, Any]:
    """One entry of the record's `results`."""
    fraction = None
    # The host's time says nothing about how near the device is to its limit.
    if timing is not None and stream_us is not None and timing.method != "host-bound":
        fraction = stream_us / timing.median_us
    return {
        "op": case.op,
        "preset": None if case.preset is None else case.preset.name,
        "tokens": case.tokens,
        "hidden": case.hidden,
        "experts": case.experts,
        "top_k": case.top_k,
        "dtype": case.dtype,
        "routing": case.routing,
        "implementation": implementation,
        "median_us": timing and timing.median_us,
        "p10_us": timing and timing.p10_us,
        "p90_us": timing and timing.p90_us,
        "graph_us": timing and timing.graph_us,
        "samples": timing.samples if timing else 0,
        "bytes": case.num_bytes,
        "terabytes_per_second": timing and case.num_bytes / timing.median_us * 1e-6,
        "stream_us": stream_us,
        "fraction_of_stream": fraction,
        "error": error,
        "seconds_method": timing and timing.method,
    }


def _first_calls() -> list[dict[str, Any]]:
    from triax.bench.first_call import measure_first_calls

    return measure_first_calls()


def _memory(cases: Sequence[Case], bench: _Bench) -> list[dict[str, Any]]:
    """The memory of a route by each implementation, at the largest size of each model: of those
    that have competitors, if any have."""
    from triax.bench.memory import IMPLEMENTATIONS, OP, measure_memory

    routed = [case for case in cases if case.preset is not None]
    compared = [case for case in routed if competes(dataclasses.replace(case, op=OP), bench.suite)]
    largest = {case.preset: case for case in sorted(compared or routed, key=lambda c: c.tokens)}

    def measure(preset: presets.Preset, implementation: str) -> list[Any]:
        case = largest[preset]
        return [measure_memory(preset, case.tokens, case.dtype, implementation)]

    found = []
    for preset, name in itertools.product(filter(None, largest), IMPLEMENTATIONS):
        what = f"memory of {name} at {preset.name}"
        found += bench.attempt(what, functools.partial(measure, preset, name))
    return found
