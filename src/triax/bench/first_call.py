"""What the first call of the MoE ops costs a fresh process, beyond the same program in plain JAX.

Each measurement is a process of its own that runs `first_call_program.py`: with empty caches, and
again with what the first run left in them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from triax.bridge.errors import TriaxError

PROGRAM = Path(__file__).with_name("first_call_program.py")
CACHED_RUNS = 3
TIMEOUT_S = 600

# The record's name of each path, and what the ops call it.
PATHS = {"xla": "xla", "triax": "triton"}


class FirstCallError(TriaxError, RuntimeError):
    """The measured program failed, or its output made no sense."""


def measure_first_calls() -> list[dict[str, Any]]:
    """Times the first call of plan, permute and weighted unpermute, forward and backward.

    A process has imported JAX and initialised its device before the clock starts. The clock
    then runs over `import triton`, `import triax.moe`, tracing, lowering, compiling and one
    run. Uncached, the caches of Triton, JAX, Triax and the CUDA driver are empty folders;
    cached, the same folders again, and the best of three processes. What the operating system
    keeps of files in memory is left as it is.

    Returns:
      One record for each of the paths "xla" and "triax", uncached and cached: implementation,
      cached, total_s, parts (seconds by name), and for "triax" over_xla_s, its total beyond
      that of "xla" in the same state, where `import triax.moe`, which plain JAX does not need,
      is left out. A process that failed has an "error", and None for total_s. Without a GPU
      "triax" is left out, and a "note" says so.
    """
    on_gpu = jax.default_backend() == "gpu"
    records = []
    for name in PATHS if on_gpu else ("xla",):
        with tempfile.TemporaryDirectory(prefix="triax-first-call-") as folder:
            environment = child_environment(os.environ, Path(folder), on_gpu)
            for cached in (False, True):
                records.append(_measure(name, cached, environment))
                if not on_gpu:
                    records[-1]["note"] = "no GPU: only the path of plain JAX can be measured"
    return with_differences(records)


def child_environment(environment: Mapping[str, str], folder: Path, on_gpu: bool) -> dict[str, str]:
    """The environment of a measured process, with all its caches under `folder`."""
    path = [str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")]
    changes = {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TRIAX_CACHE_DIR": str(folder / "triax"),
        "CUDA_CACHE_PATH": str(folder / "cuda"),
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "jax"),
        # Everything is kept, however small and however fast it was compiled.
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        # This process holds the GPU's memory already.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    if not on_gpu:
        changes["JAX_PLATFORMS"] = "cpu"
    return {**environment, **changes}


def with_differences(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same records; those of "triax" with over_xla_s where both totals are known."""
    plain = {
        r["cached"]: r["total_s"] - r["parts"].get("import_triax_s", 0.0)
        for r in records
        if r["implementation"] == "xla" and r["total_s"] is not None
    }
    for record in records:
        if record["implementation"] == "triax":
            totals = record["total_s"], plain.get(record["cached"])
            record["over_xla_s"] = None if None in totals else totals[0] - totals[1]
    return records


def _measure(name: str, cached: bool, environment: dict[str, str]) -> dict[str, Any]:
    record: dict[str, Any] = {"implementation": name, "cached": cached}
    try:
        runs = [run_program(PATHS[name], environment) for _ in range(CACHED_RUNS if cached else 1)]
    except FirstCallError as error:
        return {**record, "total_s": None, "parts": {}, "error": str(error)}
    best = min(runs, key=lambda parts: sum(parts.values()))
    return {**record, "total_s": sum(best.values()), "parts": best}


def run_program(implementation: str, environment: Mapping[str, str]) -> dict[str, float]:
    """Runs the program in a process; the seconds of its parts.

    Raises:
      FirstCallError: it failed, took over ten minutes, or printed something else.
    """
    # -P: modules beside the program must not hide those that it imports.
    command = [sys.executable, "-P", str(PROGRAM), implementation]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise FirstCallError(f"{PROGRAM.name} {implementation} took over {TIMEOUT_S} s.") from error
    if done.returncode:
        reason = _reason(done.stderr) or f"exit status {done.returncode}"
        raise FirstCallError(f"{PROGRAM.name} {implementation} failed: {reason}")
    return parse(done.stdout)


def _reason(log: str) -> str:
    """The line that names the exception of a traceback; the last one where there is none."""
    lines = log.strip().splitlines()
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return (named or lines or [""])[-1]


def parse(output: str) -> dict[str, float]:
    """The parts' seconds from what the program printed; other lines may stand before them.

    Raises:
      FirstCallError: there are none, or the program's results were not finite.
    """
    try:
        found = json.loads(output.strip().rpartition("\n")[2])
        ok, parts = found["ok"], {name: float(s) for name, s in found["parts"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FirstCallError(f"{PROGRAM.name} printed {output[-200:]!r}, no times.") from error
    if not ok:
        raise FirstCallError(f"{PROGRAM.name} computed values that are not finite.")
    return parts
