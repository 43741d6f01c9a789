"""The records that the scripts of this folder write, each of one run on one device."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from triax.bench.runner import environment
from triax.bench.timing import time_program
from triax.devices import is_cuda


def missing_gpu() -> str | None:
    """What to say where JAX has no NVIDIA GPU; None where it has one."""
    device = jax.devices()[0]
    return None if is_cuda(device) else f"This needs an NVIDIA GPU; JAX has {device}."


def output(doc: str, script: str) -> Path:
    """Where a script whose only option is `--output` writes its record; ends it without a GPU."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path(script).with_suffix(".json"))
    path: Path = parser.parse_args().output
    if problem := missing_gpu():
        sys.exit(problem)
    return path


def in_turn(
    programs: dict[str, tuple[Callable[[Any], Any], Any]],
    *,
    rounds: int,
    target_ms: float = 50.0,
    bursts: bool = False,
) -> dict[str, float]:
    """The median of each program's times of its operands, in µs, over rounds of all of them.

    Each round begins with another one: at the GPU's power limit a program's time depends on what
    ran before it. With `bursts` each runs after a rest, as matmuls do in `triax bench`.
    """
    times: dict[str, list[float]] = {name: [] for name in programs}
    names = list(programs)
    for first in range(rounds):
        for name in (*names[first % len(names) :], *names[: first % len(names)]):
            program, operands = programs[name]
            timing = time_program(program, operands, target_ms=target_ms, bursts=bursts)
            times[name].append(timing.median_us)
    return {name: statistics.median(each) for name, each in times.items()}


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


def write(path: Path, **found: Any) -> None:
    """Writes what was found, with the time, the device and the versions."""
    made = environment()
    device = {"written": made["written"], "device": made["machine"]["device"]}
    record = {**device, "versions": made["versions"], **found}
    path.write_text(json.dumps(record, indent=1) + "\n")
