"""Times beyond those of `triax.benchmark`: medians in turn, one of many runs, profiles."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from triax.benchmark import in_rounds, time_program

FEW, MANY = 4, 24


def median_us(program: Callable[[Any], Any], operands: Any, **how: Any) -> float:
    """The median of a program's times of its operands; `how` as `time_program` takes it."""
    return time_program(program, operands, **{"target_ms": 50.0} | how).median_us


def in_turn(programs: dict[str, Any], rounds: int, **how: Any) -> dict[str, float]:
    """The median of each program's times of its operands, in µs, over rounds of all of them.

    Each round begins with another one: at the GPU's power limit a program's time depends on what
    ran before it. With `bursts` each runs after a rest.
    """
    found = in_rounds(programs, rounds, **{"target_ms": 50.0} | how)
    return {n: statistics.median(t.median_us for t in times) for n, times in found.items()}


def one_of_many_us(repeated: Callable[[int], Callable[[Any], Any]], operands: Any) -> float | None:
    """What one of many runs in a program takes: what it takes to start the program falls out.

    `repeated` makes the program of so many runs. None where the device's time is not known.
    """
    few, many = (time_program(repeated(n), operands, target_ms=50.0) for n in (FEW, MANY))
    one_us = (many.median_us - few.median_us) / (MANY - FEW)
    return one_us if {few.method, many.method} == {"events"} and one_us > 0 else None


def chained(program: Any, chain: Any, repeats: int) -> Callable[[Any], Any]:
    """Runs of a program, each of what `chain` makes of inputs and outputs of the one before."""

    def run(inputs: Any) -> Any:
        outputs = program(inputs)
        for _ in range(repeats - 1):
            # All inputs through the barrier, so that XLA computes nothing of the next run ahead,
            # or once for all of them.
            inputs = jax.lax.optimization_barrier(chain(inputs, outputs))
            outputs = program(inputs)
        return outputs

    return jax.jit(run)


def wall_ms(program: Callable[..., Any], *operands: Any, samples: int, calls: int) -> float:
    """The median over samples of the host's time of several calls."""
    jax.block_until_ready(program(*operands))
    found = []
    for _ in range(samples):
        start = time.perf_counter()
        for _ in range(calls):
            out = program(*operands)
        jax.block_until_ready(out)
        found.append(1e3 * (time.perf_counter() - start) / calls)
    return statistics.median(found)


def kernels(program: Callable[..., Any], *operands: Any, calls: int) -> list[tuple[str, int, int]]:
    """What ran on the first GPU's streams in some calls: names, starts and ends in ns."""
    jax.block_until_ready(program(*operands))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                out = program(*operands)
            jax.block_until_ready(out)
        (file,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(file)).planes
        (gpu,) = (plane for plane in planes if plane.name == "/device:GPU:0")
        streams = (line for line in gpu.lines if line.name.startswith("Stream"))
        return [
            (event.name, event.start_ns, event.start_ns + event.duration_ns)
            for stream in streams
            for event in stream.events
        ]
