"""Runs the cases of a suite: results checked, then timed, competitors beside them.

In: the command line's options. Out: the record that is written and printed. A case that fails is a
line in the record, and the others go on.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import os
import platform
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

from triax.bench import checks
from triax.bench.cases import Case, Stream
from triax.bench.competitors import DENSE, Competitor, competitors, dense
from triax.bench.first_call import measure_first_calls
from triax.bench.streams import limit_us
from triax.bench.suites import SUITES, Suite, select
from triax.bench.timing import CallTiming, time_program
from triax.compat import versions
from triax.compat.versions import __version__
from triax.devices import is_cuda, reported_by_driver
from triax.errors import ArgumentValueError, UnsupportedError

SCHEMA = 1
OWN = "triax"
_PACKAGES = "jax jaxlib jax-cuda13-plugin jax-cuda12-plugin triton cuda-bindings torch tokamax"
_PACKAGES += " transformer-engine transformer-engine-jax transformers"
# Part of messages of JAX and PyTorch. XLA uses the first also where a kernel wants more shared
# memory than a GPU has.
_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "OutOfMemoryError", "CUDA_ERROR_OUT_OF_MEMORY")


def run(
    options: argparse.Namespace, command: str, keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Measures what was asked for; returns the record, and gives it to `keep` after every case."""
    try:
        on_gpu = is_cuda(jax.devices()[0])
    except (RuntimeError, AssertionError) as error:  # AssertionError: "cuda" without a GPU
        raise UnsupportedError(
            f"JAX finds no device to measure on ({_first_line(error)}). Is JAX_PLATFORMS right?"
        ) from error
    suite = SUITES[options.suite]
    cases = select(options, suite, small=not on_gpu)
    if not cases:
        raise ArgumentValueError("The lists leave nothing of the suite; name another, or others.")
    compared = [] if options.no_competitors else [*filter(suite.competes, cases)]
    notes: dict[str, None] = {}  # each once
    if not on_gpu:
        notes[
            "There is no NVIDIA GPU here: sizes are small (--tokens chooses others), the ops run "
            "as plain JAX, times are the host's, and nothing is compared with them."
        ] = None
    if not options.no_competitors and not compared:
        notes[f"no competitors: suite `{options.suite}` is {suite.about}"] = None
    record: dict[str, Any] = {"schema": SCHEMA, "command": command, **environment()}
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
                notes[f"no stream limit for {case.label}: {_first_line(error)}"] = None
            # float32 products are exact for all: some take TF32 by default.
            with jax.default_matmul_precision("highest" if case.flops else None):
                record["results"] += _measure(case, stream_us, case in compared, notes)
        record["complete"] = True
    except KeyboardInterrupt:  # what has been measured is worth keeping
        notes["interrupted: the record is not whole"] = None
    return whole()


def environment() -> dict[str, Any]:
    """When and on what something was measured."""
    device = jax.devices()[0]
    reported = reported_by_driver() if is_cuda(device) else []
    found = {name: versions.installed(name) for name in _PACKAGES.split()}
    return {
        "written": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": {
            "platform": "cuda" if is_cuda(device) else "cpu",
            "device": device.device_kind,
            "driver": next((version for _, version in reported), None),
            "host_cores": os.cpu_count(),
        },
        "versions": {"triax": __version__, "python": platform.python_version()}
        | {name: version for name, version in found.items() if version is not None},
    }


def _measure(
    case: Case, stream_us: float | None, compared: bool, notes: dict[str, None]
) -> list[dict[str, Any]]:
    """The results of all implementations of one case."""
    rivals: dict[str, Competitor | str] = {OWN: Competitor(case.program())}
    rivals |= {DENSE: dense(case)} if case.flops else {}
    rivals |= competitors(case) if compared else {}
    results: dict[str, dict[str, Any]] = {}
    for name, rival in rivals.items():
        if isinstance(rival, str):
            notes[f"{name} is left out: {rival}"] = None
            continue
        timing, wrong = None, None
        try:
            timing, wrong = _time(case, name, rival)
        except Exception as error:
            wrong = f"failed: {_first_line(error)}"
            text = f"{type(error).__name__}: {error}"
            if any(word in text for word in _OUT_OF_MEMORY) and "shared memory" not in text.lower():
                advice = "XLA_PYTHON_CLIENT_MEM_FRACTION says how much is JAX's"
                notes[f"left out, out of memory: {case.label} by {name}; {advice}"] = None
                continue
        results[name] = _result(case, name, timing, stream_us, wrong)
    in_bursts = [r for r in results.values() if r["seconds_method"] == "bursts"]
    for result in in_bursts if results.get(DENSE) in in_bursts else ():
        result["fraction_of_dense"] = results[DENSE]["median_us"] / result["median_us"]
    return [*results.values()]


def _time(case: Case, name: str, rival: Competitor) -> tuple[CallTiming | None, str | None]:
    """One implementation's time if its results are right; else what is wrong with them."""
    inputs = case.make_inputs()
    prepared = jax.block_until_ready(rival.prepare(inputs))
    program = rival.program if rival.hold else jax.jit(rival.program)
    if name != DENSE:  # a limit computes something else
        wrong = checks.problem(case, inputs, rival.finish(program(prepared)))
        if wrong is not None:
            return None, wrong
    chain = None if rival.hold else case.chain(program, prepared)
    bursts = bool(case.flops)
    return time_program(program, prepared, chain=chain, hold=rival.hold, bursts=bursts), None


def _result(
    case: Case, name: str, timing: CallTiming | None, stream_us: float | None, error: str | None
) -> dict[str, Any]:
    """One entry of the record's `results`."""
    times: dict[str, Any] = dict.fromkeys(CallTiming.__match_args__) | {"samples": 0}
    times |= dataclasses.asdict(timing) if timing else {}
    num_bytes = sum(size for _, size in case.passes)
    per_us = lambda amount: amount / timing.median_us if timing and amount else None
    # The host's time says nothing about how near the device is to its limit.
    on_device = times["method"] != "host-bound"
    return {
        **dataclasses.asdict(case),
        "implementation": name,
        "seconds_method": times.pop("method"),
        **times,
        "bytes": num_bytes,
        "terabytes_per_second": per_us(num_bytes * 1e-6),
        "stream_us": stream_us,
        "fraction_of_stream": per_us(stream_us) if on_device else None,
        "teraflops_per_second": per_us(case.flops * 1e-6),
        "fraction_of_dense": None,
        "error": error,
    }


def _memory(cases: list[Case], suite: Suite) -> Iterator[dict[str, Any]]:
    """What XLA says of the moves with gradients, at each model's largest size. Nothing is run."""
    moves = [case for case in cases if case.preset is not None and not case.flops]
    moves = [*filter(suite.competes, moves)] or moves
    for case in {case.preset: case for case in sorted(moves, key=lambda c: c.tokens)}.values():
        case = dataclasses.replace(case, op="moves+grad", routing="uniform")
        rivals: dict[str, Any] = {OWN: Competitor(case.program()), **competitors(case)}
        for name in (OWN, "argsort+take", "hand-written vjp", "hand-fused vjp"):
            lowered = jax.jit(rivals[name].program).lower(jax.eval_shape(case.make_inputs))
            stats: Any = lowered.compile().memory_analysis()
            shape = {"preset": case.preset, "tokens": case.tokens, "dtype": case.dtype}
            temporary = {"temporary_bytes": stats.temp_size_in_bytes}
            yield {"program": case.op, **shape, "implementation": name, **temporary}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
