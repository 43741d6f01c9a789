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
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax

from triax.bench import checks
from triax.bench.cases import OPS, Case
from triax.bench.competitors import DENSE, Competitor, competitors, dense
from triax.bench.streams import Limits
from triax.bench.suites import SUITES, Suite, select
from triax.bench.timing import CallTiming, time_program
from triax.compat import versions
from triax.compat.versions import __version__
from triax.devices import is_cuda
from triax.errors import ArgumentValueError, UnsupportedError

SCHEMA = 1
OWN = "triax"
_PACKAGES = "jax jaxlib jax-cuda13-plugin jax-cuda12-plugin triton cuda-bindings torch tokamax"
_PACKAGES += " transformer-engine transformer-engine-jax"


def run(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measures what was asked for; returns the record."""
    try:
        on_gpu = is_cuda(jax.devices()[0])
    except (RuntimeError, AssertionError) as error:  # the latter for "cuda" without a GPU
        raise UnsupportedError(
            f"JAX finds no device to measure on ({_first_line(error)}). Is JAX_PLATFORMS right?"
        ) from error
    suite = SUITES[options.suite]
    cases = select(options, suite, small=not on_gpu)
    if not cases:
        raise ArgumentValueError("The lists leave nothing of the suite; name another, or others.")
    bench = _Bench(suite, on_gpu, competitors=not options.no_competitors)
    if not on_gpu:
        bench.note(
            "There is no NVIDIA GPU here: sizes are small (--tokens chooses others), the ops run "
            "as plain JAX, times are the host's, and nothing is compared with them."
        )
    if not options.no_competitors and not any(map(suite.competes, cases)):
        bench.note(f"no competitors: suite `{options.suite}` is {suite.about}")
    first_call: list[Any] = []
    memory: list[Any] = []
    complete = True
    try:
        if options.first_call:
            from triax.bench.first_call import measure_first_calls

            first_call = measure_first_calls()
        if options.memory:
            memory = bench.memory(cases)
        for number, case in enumerate(cases, 1):
            print(f"case {number}/{len(cases)}: {case.label}", file=sys.stderr)
            # Of float32 the exact products, by all: some take TF32 by default.
            with jax.default_matmul_precision("highest" if case.flops else None):
                bench.measure(case)
    except KeyboardInterrupt:  # what has been measured is worth keeping
        bench.note("interrupted: the record is not whole")
        complete = False
    return {
        "schema": SCHEMA,
        "command": command,
        **environment(),
        "results": bench.results,
        "streams": list(bench.limits.records.values()),
        "first_call": first_call,
        "memory": memory,
        "notes": bench.notes,
        "complete": complete,
    }


def environment() -> dict[str, Any]:
    """When and on what something was measured."""
    on_gpu = is_cuda(jax.devices()[0])
    found = {name: versions.installed(name) for name in _PACKAGES.split()}
    return {
        "written": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": {
            "platform": "cuda" if on_gpu else "cpu",
            "device": jax.devices()[0].device_kind,
            "driver": _driver() if on_gpu else None,
            "host_cores": os.cpu_count(),
        },
        "versions": {"triax": __version__, "python": platform.python_version()}
        | {name: version for name, version in found.items() if version is not None},
    }


class _Bench:
    """One run: what its cases share, and what has been found so far."""

    def __init__(self, suite: Suite, on_gpu: bool, competitors: bool):
        self.suite, self._on_gpu, self._competitors = suite, on_gpu, competitors
        self.limits = Limits(suite.target_ms / 4)
        self.results: list[dict[str, Any]] = []
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        """Something to be read beside the results, once."""
        if text not in self.notes:
            self.notes.append(text)

    def measure(self, case: Case) -> None:
        """All implementations of one case, after the limits that it is compared with."""
        gc.collect()  # a cycle somewhere may still hold arrays of gigabytes
        for stream, error in self.limits.measure(case) if self._on_gpu else ():
            self.note(f"no stream limit for {case.label}, {stream}: {_first_line(error)}")
        found: dict[str, Competitor | str] = {OWN: Competitor(case.program())}
        if case.flops:
            found[DENSE] = dense(case)
        if self._competitors and self.suite.competes(case):
            found |= competitors(case)
        results: dict[str, dict[str, Any]] = {}
        for name, competitor in found.items():
            if isinstance(competitor, str):
                self.note(f"{name} is left out: {competitor}")
                continue
            try:
                timing, wrong = self._time(case, name, competitor)
            except Exception as error:
                if _is_out_of_memory(error):
                    advice = "XLA_PYTHON_CLIENT_MEM_FRACTION says how much is JAX's"
                    self.note(f"left out, out of memory: {case.label} by {name}; {advice}")
                    continue
                timing, wrong = None, f"failed: {_first_line(error)}"
            results[name] = _record(case, name, timing, self.limits.time_us(case), wrong)
        in_bursts = [r for r in results.values() if r["seconds_method"] == "bursts"]
        for result in in_bursts if results.get(DENSE) in in_bursts else ():
            result["fraction_of_dense"] = results[DENSE]["median_us"] / result["median_us"]
        self.results += results.values()

    def _time(
        self, case: Case, name: str, rival: Competitor
    ) -> tuple[CallTiming | None, str | None]:
        """One implementation's time if its results are right; else what is wrong with them."""
        inputs = case.make_inputs()
        prepared = jax.block_until_ready(rival.prepare(inputs))
        program = rival.program if rival.clock else jax.jit(rival.program)
        if name != DENSE:  # a limit computes something else
            error = checks.problem(case, inputs, rival.finish(program(prepared)))
            if error is not None:
                return None, error
        chain = None if rival.clock else _chain(case, program, prepared)
        target_ms, bursts = self.suite.target_ms, bool(case.flops)
        how: Any = {"chain": chain, "target_ms": target_ms, "clock": rival.clock, "bursts": bursts}
        return time_program(program, prepared, **how), None

    def memory(self, cases: Sequence[Case]) -> list[dict[str, Any]]:
        """What XLA says of a route, there and back with gradients, by each implementation, at each
        model's largest size: of those that have competitors, if any have. Nothing is run."""
        routes = [
            dataclasses.replace(case, op="route+grad", routing="uniform")
            for case in sorted(cases, key=lambda case: case.tokens)
            if case.preset is not None and not case.flops
        ]
        compared = [case for case in routes if self.suite.competes(case)]
        found = []
        for case in {case.preset: case for case in compared or routes}.values():
            rivals: dict[str, Any] = {OWN: Competitor(case.program()), **competitors(case)}
            for name in (OWN, "argsort+take", "hand-written vjp", "hand-fused vjp"):
                lowered = jax.jit(rivals[name].program).lower(jax.eval_shape(case.make_inputs))
                stats: Any = lowered.compile().memory_analysis()
                what = {key: getattr(case, key) for key in ("preset", "tokens", "dtype")}
                sizes = {
                    "argument_bytes": stats.argument_size_in_bytes,
                    "output_bytes": stats.output_size_in_bytes,
                    "temporary_bytes": stats.temp_size_in_bytes,
                }
                found.append({"program": case.op, **what, "implementation": name, **sizes})
        return found


def _chain(case: Case, program: Any, inputs: Any) -> Any:
    """What makes next inputs of inputs and outputs, or None where shapes do not allow it."""
    chain = OPS[case.op].chain
    if chain is None:
        return None
    types = lambda tree: jax.tree.map(lambda a: (a.shape, a.dtype), tree)
    following = jax.eval_shape(lambda inputs: chain(inputs, program(inputs)), inputs)
    return chain if types(following) == types(inputs) else None


def _record(
    case: Case, name: str, timing: CallTiming | None, stream_us: float | None, error: str | None
) -> dict[str, Any]:
    """One entry of the record's `results`."""
    # The host's time says nothing about how near the device is to its limit.
    fraction = None
    if stream_us is not None and timing is not None and timing.method != "host-bound":
        fraction = stream_us / timing.median_us
    per_us = lambda amount: amount / timing.median_us * 1e-6 if timing and amount else None
    return {
        **dataclasses.asdict(case),
        "implementation": name,
        "median_us": timing and timing.median_us,
        "p10_us": timing and timing.p10_us,
        "p90_us": timing and timing.p90_us,
        "graph_us": timing and timing.graph_us,
        "samples": timing.samples if timing else 0,
        "bytes": case.num_bytes,
        "terabytes_per_second": per_us(case.num_bytes),
        "stream_us": stream_us,
        "fraction_of_stream": fraction,
        "teraflops_per_second": per_us(case.flops),
        "fraction_of_dense": None,
        "error": error,
        "seconds_method": timing and timing.method,
    }


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"


def _is_out_of_memory(error: Exception) -> bool:
    text = f"{type(error).__name__}: {error}"
    # Under the same name XLA says that a kernel wants more shared memory than a GPU has.
    exhausted = "RESOURCE_EXHAUSTED" in text and "shared memory" not in text.lower()
    return exhausted or "OutOfMemoryError" in text or "CUDA_ERROR_OUT_OF_MEMORY" in text


def _driver() -> str | None:
    """The version of NVIDIA's driver, if its tool says."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.partition("\n")[0].strip() or None
