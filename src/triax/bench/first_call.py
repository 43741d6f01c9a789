"""What the first call of the MoE ops costs a fresh process, beyond the same program in plain JAX.

Each measurement is a process of its own that runs this file by its path, so that nothing of Triax
is imported before the clock starts: with empty caches, and again with what the first run left in
them. JAX is imported and its device is up by then, as in any program that comes to its first call.

    python -P first_call.py triton|xla      # one line of JSON: the seconds of each part
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

TOKENS, HIDDEN, EXPERTS, TOP_K = 1024, 1024, 64, 8
CACHED_RUNS = 3
TIMEOUT_S = 600
NO_GPU = "no GPU: only the path of plain JAX can be measured"


def measure_first_calls() -> list[dict[str, Any]]:
    """Times plan, permute and weighted unpermute, forward and backward, by "xla" and "triax".

    Uncached, the caches of Triton, JAX, Triax and the CUDA driver are empty folders; cached, the
    same folders again, and the best of three processes. For "triax" over_xla_s is its total beyond
    that of "xla", of which `import triax.moe`, which plain JAX does not need, is no part.
    """
    on_gpu = jax.default_backend() == "gpu"
    records = []
    plain: dict[bool, float] = {}
    for name, implementation in (("xla", "xla"), ("triax", "triton"))[: 1 + on_gpu]:
        with tempfile.TemporaryDirectory(prefix="triax-first-call-") as folder:
            environment = child_environment(os.environ, Path(folder), on_gpu)
            for cached in (False, True):
                record: dict[str, Any] = {"implementation": name, "cached": cached}
                record |= {"over_xla_s": None} if name == "triax" else {}
                try:
                    times = CACHED_RUNS if cached else 1
                    runs = [run_program(implementation, environment) for _ in range(times)]
                    parts = min(runs, key=lambda parts: sum(parts.values()))
                    record |= {"total_s": sum(parts.values()), "parts": parts}
                    if name == "xla":
                        plain[cached] = record["total_s"] - parts.get("import_triax_s", 0.0)
                    elif cached in plain:
                        record["over_xla_s"] = record["total_s"] - plain[cached]
                except (RuntimeError, ValueError, KeyError, subprocess.TimeoutExpired) as error:
                    record |= {"total_s": None, "parts": {}}
                    record["error"] = f"{type(error).__name__}: {error}"
                records.append(record if on_gpu else {**record, "note": NO_GPU})
    return records


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
    return {**environment, **changes, **({} if on_gpu else {"JAX_PLATFORMS": "cpu"})}


def run_program(implementation: str, environment: Mapping[str, str]) -> dict[str, float]:
    """Runs the program in a process; the seconds of its parts, or a RuntimeError."""
    # -P: modules beside the program must not hide those that it imports.
    command = [sys.executable, "-P", __file__, implementation]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    if done.returncode:
        named = re.findall(r"^[\w.]+(?:Error|Exception)\b.*", done.stderr, re.MULTILINE)
        reason = [f"exit status {done.returncode}", *named][-1]
        raise RuntimeError(f"the first call by {implementation} failed: {reason}")
    found = json.loads(done.stdout.strip().rpartition("\n")[2])
    if not found["ok"]:  # what fails to compute must not be reported as fast
        raise RuntimeError(f"the first call by {implementation} gave values that are not finite")
    return found["parts"]


def main(implementation: Any) -> None:
    """Routes there and back, with gradients, once, and prints what each part took."""
    keys = jax.random.split(jax.random.key(0), 4)
    selected = jax.random.randint(keys[0], (TOKENS, TOP_K), 0, EXPERTS)
    weights = jax.random.uniform(keys[1], (TOKENS, TOP_K))
    x = jax.random.normal(keys[2], (TOKENS, HIDDEN), jnp.bfloat16)
    gradient = jax.random.normal(keys[3], (TOKENS, HIDDEN), jnp.bfloat16)
    operands = jax.block_until_ready((x, weights, selected, gradient))
    marks = [("", time.perf_counter())]
    part_ends = lambda name: marks.append((name, time.perf_counter()))
    if implementation == "triton":
        import triton  # noqa: F401
    part_ends("import_triton_s")
    from triax import moe

    part_ends("import_triax_s")

    @jax.jit
    def step(x: Any, weights: Any, selected: Any, gradient: Any) -> tuple[jax.Array, ...]:
        def route(x: jax.Array, weights: jax.Array) -> jax.Array:
            plan = moe.make_plan(selected, EXPERTS, implementation=implementation)
            rows = moe.permute(x, plan, implementation=implementation)
            rows = jax.lax.optimization_barrier(rows)
            return moe.unpermute(rows, plan, weights, implementation=implementation)

        y, pull_back = jax.vjp(route, x, weights)
        return y, *pull_back(gradient)

    traced = step.trace(*operands)
    part_ends("trace_s")
    lowered = traced.lower()
    part_ends("lower_s")
    compiled = lowered.compile()
    part_ends("compile_s")
    results = jax.block_until_ready(compiled(*operands))
    part_ends("run_s")
    parts = {name: at - marks[index][1] for index, (name, at) in enumerate(marks[1:])}
    ok = all(bool(jnp.isfinite(result.astype(jnp.float32)).all()) for result in results)
    print(json.dumps({"ok": ok, "parts": parts}))


if __name__ == "__main__":
    main(sys.argv[1])
