"""Runs the cases of a suite: results checked, then timed, competitors beside them.

In: the command's arguments. Out: the record that is written and printed. A case that fails is a
line in the record, and the others go on.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.harness import record as records
from benchmarks.harness import rivals
from benchmarks.harness.streams import Stream, find_limit
from benchmarks.harness.timing import chained, one_of_many_us
from benchmarks.ops import checks, plots, report
from benchmarks.ops.cases import OPS, Case
from benchmarks.ops.competitors import DENSE, OWN, Competitor, competitors, dense
from benchmarks.ops.first_call import measure_first_calls
from benchmarks.ops.suites import DTYPES, NAMES, ROUTINGS, SUITES, Suite, select
from triax.benchmark import HOST_BOUND, CallTiming, time_bursts, time_calls, time_program
from triax.devices import is_cuda

# Part of messages of JAX and PyTorch. XLA uses the first also where a kernel wants more shared
# memory than a GPU has.
_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "OutOfMemoryError", "CUDA_ERROR_OUT_OF_MEMORY")
_SHORT_US = 100.0  # programs that take less are repeated inside one, too


def main(words: Sequence[str] | None = None) -> int:
    """Measures, prints the table, and writes the record where one was asked for; or draws one."""
    options = _parser().parse_args(words)
    if options.draw:
        file, folder = map(Path, options.draw)
        written = plots.draw(json.loads(file.read_text()), folder)
        print(*written or [plots.NOTHING], sep="\n")
        return not written
    file = options.json and options.json.resolve()
    if file is not None:  # found out before anything is measured
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("a").close()
    # A record says how it was made, and nothing of the folders of the machine it was made on.
    parts = (word.rpartition("=") for word in (sys.argv[1:] if words is None else words))
    arguments = shlex.join(f"{a}{b}{Path(c).name or c}" for a, b, c in parts)
    keep = lambda record: file and records.write(file, **record)
    record = run(options, f"make bench ARGS='{arguments}'", keep)
    try:
        keep(record)
    finally:  # measured is measured, also where the disk is full
        print(report.table(record), end="")
    return 0 if report.is_right(record) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="how fast the MoE ops are on this machine",
        epilog="\n".join(f"{name}: {suite.about}\n" for name, suite in SUITES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("suite", nargs="?", default="quick", choices=SUITES)
    for name, what, choices in (
        ("ops", "ops to measure", OPS),
        ("presets", "models to take shapes from", NAMES),
        ("dtypes", "of tokens and rows", DTYPES),
        ("routing", "how tokens choose their experts, or rows their groups", ROUTINGS),
    ):
        text = f"{what}: {', '.join(choices)}"
        several: Any = {"nargs": "+", "action": "extend", "metavar": "X"}
        parser.add_argument(f"--{name}", choices=choices, help=text, **several)
    parser.add_argument("--tokens", type=_count, help="how many tokens the models get", **several)
    about = "write the record, after every case"
    parser.add_argument("--json", type=Path, metavar="FILE", help=about)
    parser.add_argument("--no-competitors", action="store_true", help="measure Triax alone")
    parser.add_argument("--first-call", action="store_true", help="time first calls too")
    parser.add_argument("--memory", action="store_true", help="what memory the moves take too")
    about = "draw pictures of a record, and measure nothing"
    parser.add_argument("--draw", nargs=2, metavar=("FILE", "FOLDER"), help=about)
    return parser


def _count(word: str) -> int:
    if not 0 < int(word) < 10**9:
        raise ValueError
    return int(word)


def run(
    options: argparse.Namespace, command: str, keep: Callable[[dict[str, Any]], Any]
) -> dict[str, Any]:
    """Measures what was asked for; returns the record, and gives it to `keep` after every case."""
    on_gpu = is_cuda(jax.devices()[0])
    suite = SUITES[options.suite]
    cases = select(options, suite, small=not on_gpu)
    if not cases:
        sys.exit("The lists leave nothing of the suite; name another, or others.")
    compared = [] if options.no_competitors else [*filter(suite.competes, cases)]
    notes: dict[str, None] = {}  # each once
    if not on_gpu:
        notes[
            "There is no NVIDIA GPU here: sizes are small (--tokens chooses others), the ops run "
            "as plain JAX, times are the host's, and nothing is compared with them."
        ] = None
    if not options.no_competitors and not compared:
        notes[f"no competitors: suite `{options.suite}` is {suite.about}"] = None
    record: dict[str, Any] = {"command": command, **records.environment()}
    record |= {"results": [], "first_call": [], "memory": [], "complete": False}
    limits: dict[Stream, dict[str, Any]] = {}
    whole = lambda: record | {"streams": [*limits.values()], "notes": [*notes]}
    try:
        if options.first_call:
            record["first_call"] = measure_first_calls(on_gpu)
        if options.memory:
            record["memory"] = [*_memory(cases, suite)]
        for number, case in enumerate(cases, 1):
            keep(whole())  # what was finished before
            print(f"case {number}/{len(cases)}: {case.label}", file=sys.stderr)
            gc.collect()  # a cycle somewhere may still hold arrays of gigabytes
            stream_us = None
            try:
                if on_gpu:
                    stream_us = limit_us(case, limits)
            except Exception as error:  # mostly out of memory
                notes[f"no stream limit for {case.label}: {records.reason(error)}"] = None
            # float32 products are exact for all: some take TF32 by default.
            with jax.default_matmul_precision("highest" if case.flops else None):
                record["results"] += _measure(case, stream_us, case in compared, notes)
        record["complete"] = True
    except KeyboardInterrupt:  # what has been measured is worth keeping
        notes["interrupted: the record is not whole"] = None
    return whole()


def limit_us(case: Case, known: dict[Stream, dict[str, Any]]) -> float | None:
    """How long the streams of a case take; None where it has none.

    Those that are not `known` are measured and added. That takes as much memory as the op itself,
    so call it before the op's inputs are made.
    """
    total_us = 0.0
    for stream, num_bytes in case.passes:
        if stream.reads and stream.writes:
            if stream not in known:
                known[stream] = find_limit(stream)
            total_us += num_bytes / known[stream]["bytes"] * known[stream]["median_us"]
    return total_us or None


def _measure(
    case: Case, stream_us: float | None, compared: bool, notes: dict[str, None]
) -> list[dict[str, Any]]:
    """The results of all implementations of one case."""
    ways: dict[str, Competitor | str] = {OWN: Competitor(case.program())}
    ways |= {DENSE: dense(case)} if case.flops else {}
    ways |= competitors(case) if compared else {}
    results: dict[str, dict[str, Any]] = {}
    for name, rival in ways.items():
        if isinstance(rival, str):
            notes[f"{name} is left out: {rival}"] = None
            continue
        times, wrong = None, None
        try:
            times, wrong = _time(case, name, rival)
        except Exception as error:
            wrong = f"failed: {records.reason(error)}"
            text = f"{type(error).__name__}: {error}"
            if any(word in text for word in _OUT_OF_MEMORY) and "shared memory" not in text.lower():
                advice = "XLA_PYTHON_CLIENT_MEM_FRACTION says how much is JAX's"
                notes[f"left out, out of memory: {case.label} by {name}; {advice}"] = None
                continue
        results[name] = report.entry(case, name, times, stream_us, wrong)
    in_bursts = [r for r in results.values() if r["seconds_method"] == "bursts"]
    for result in in_bursts if results.get(DENSE) in in_bursts else ():
        result["fraction_of_dense"] = results[DENSE]["median_us"] / result["median_us"]
    return [*results.values()]


def _time(case: Case, name: str, rival: Competitor) -> tuple[dict[str, Any] | None, str | None]:
    """One implementation's times if its results are right; else what is wrong with them."""
    inputs = case.make_inputs()
    prepared = jax.block_until_ready(rival.prepare(inputs))
    program = jax.jit(rival.program) if rival.is_own else rival.program
    if name != DENSE:  # a limit computes something else
        wrong = checks.problem(case, inputs, rival.finish(program(prepared)))
        if wrong is not None:
            return None, wrong
    if not rival.is_own:
        clock, call = rivals.clock(is_own=False), functools.partial(program, prepared)
        timing = time_bursts(call, clock) if case.flops else time_calls(call, clock, 50.0)
        return dataclasses.asdict(timing) | {"graph_us": None}, None
    timing = time_program(program, prepared, target_ms=50.0, bursts=bool(case.flops))
    is_short = timing.method in ("events", HOST_BOUND) and timing.median_us < _SHORT_US
    graph_us = None
    if is_short and (chain := case.chain(program, prepared)):
        graph_us = one_of_many_us(functools.partial(chained, program, chain), prepared)
    if timing.method == HOST_BOUND and graph_us:
        timing = CallTiming.of([graph_us], "graph")
    return dataclasses.asdict(timing) | {"graph_us": graph_us}, None


def _memory(cases: list[Case], suite: Suite) -> Iterator[dict[str, Any]]:
    """What XLA says of the moves with gradients, at each model's largest size. Nothing is run."""
    moves = [case for case in cases if case.preset is not None and not case.flops]
    moves = [*filter(suite.competes, moves)] or moves
    for case in {case.preset: case for case in sorted(moves, key=lambda c: c.tokens)}.values():
        case = dataclasses.replace(case, op="moves+grad", routing="uniform")
        ways: dict[str, Any] = {OWN: Competitor(case.program()), **competitors(case)}
        for name in (OWN, "argsort+take", "hand-written vjp", "hand-fused vjp"):
            lowered = jax.jit(ways[name].program).lower(jax.eval_shape(case.make_inputs))
            stats: Any = lowered.compile().memory_analysis()
            shape = {"preset": case.preset, "tokens": case.tokens, "dtype": case.dtype}
            temporary = {"temporary_bytes": stats.temp_size_in_bytes}
            yield {"program": case.op, **shape, "implementation": name, **temporary}
