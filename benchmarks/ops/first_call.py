"""What the first call of the MoE ops costs a fresh process, beyond the same program in plain JAX.

Each measurement is a process that runs this file, so that nothing of Triax is imported before the
clock starts: with empty caches, and again with what the first run left in them. JAX is imported and
its device is up by then, as in any program that comes to its first call.

    python -m benchmarks.ops.first_call triton|xla      # one line of JSON: seconds of each part
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

CACHED_RUNS = 3
TIMEOUT_S = 600
NO_GPU = "no GPU: only the path of plain JAX can be measured"


def measure_first_calls(
    on_gpu: bool, run: Callable[[str, str], dict[str, float]] | None = None
) -> list[dict[str, Any]]:
    """Times the op `moves+grad` by "xla" and "triax"; of cached runs the best counts.

    For "triax" over_xla_s is its total beyond that of "xla" without `import triax.moe`, which plain
    JAX does not need.
    """
    records: list[dict[str, Any]] = []
    plain_s: dict[bool, float] = {}
    for name, implementation in (("xla", "xla"), ("triax", "triton"))[: 1 + on_gpu]:
        with tempfile.TemporaryDirectory(prefix="triax-first-call-") as folder:
            for cached, times in ((False, 1), (True, CACHED_RUNS)):
                found: dict[str, Any] = {"total_s": None, "over_xla_s": None, "parts": {}}
                found |= {} if on_gpu else {"note": NO_GPU}
                try:
                    runs = [(run or run_program)(implementation, folder) for _ in range(times)]
                    found["parts"] = min(runs, key=lambda parts: sum(parts.values()))
                    found["total_s"] = sum(found["parts"].values())
                    if name == "xla":
                        plain_s[cached] = found["total_s"] - found["parts"]["import_triax_s"]
                    elif cached in plain_s:
                        found["over_xla_s"] = found["total_s"] - plain_s[cached]
                except (RuntimeError, ValueError, LookupError, subprocess.TimeoutExpired) as error:
                    found["error"] = f"{type(error).__name__}: {error}"
                records.append({"implementation": name, "cached": cached, **found})
    return records


def run_program(implementation: str, caches: str) -> dict[str, float]:
    """Runs the program in a process with these caches; the seconds of its parts."""
    root = Path(__file__).resolve().parents[2]
    path = [str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "TRITON_CACHE_DIR": f"{caches}/triton",
        "TRIAX_CACHE_DIR": f"{caches}/triax",
        "CUDA_CACHE_PATH": f"{caches}/cuda",
        "JAX_COMPILATION_CACHE_DIR": f"{caches}/jax",
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        # Everything is kept, however small and however fast it was compiled.
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        # This process holds the GPU's memory already.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    command = [sys.executable, "-m", "benchmarks.ops.first_call", implementation]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    if done.returncode:
        named = re.findall(r"^[\w.]+(?:Error|Exception)\b.*", done.stderr, re.MULTILINE)
        reason = [f"exit status {done.returncode}", *named][-1]
        raise RuntimeError(f"the first call by {implementation} failed: {reason}")
    return json.loads(done.stdout.splitlines()[-1])


def main(implementation: Any) -> None:
    """Moves tokens there and back, with gradients, once, and prints what each part took."""
    jax.block_until_ready(jax.random.normal(jax.random.key(0), (8,)))  # JAX is up
    seconds: dict[str, float] = {}

    def timed(name: str, part: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        made = jax.block_until_ready(part())
        seconds[name] = time.perf_counter() - start
        return made

    timed("import_triax_s", lambda: importlib.import_module("triax.moe"))
    from benchmarks.ops.cases import Case

    case = Case("moves+grad", None, 1024, 1024, 64, 8, "bfloat16", "uniform")
    inputs = jax.block_until_ready(case.make_inputs())
    step = jax.jit(case.program(implementation))
    traced = timed("trace_s", lambda: step.trace(inputs))
    lowered = timed("lower_s", traced.lower)
    compiled = timed("compile_s", lowered.compile)
    results = timed("run_s", lambda: compiled(inputs))
    # What fails to compute must not be reported as fast.
    if not all(jnp.isfinite(result.astype(jnp.float32)).all() for result in results):
        raise FloatingPointError("values are not finite")
    print(json.dumps(seconds))


if __name__ == "__main__":
    main(sys.argv[1])
