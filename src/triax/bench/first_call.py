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
    records: list[dict[str, Any]] = []
    plain_s: dict[bool, float] = {}
    for name, implementation in (("xla", "xla"), ("triax", "triton"))[: 1 + on_gpu]:
        with tempfile.TemporaryDirectory(prefix="triax-first-call-") as folder:
            for cached, times in ((False, 1), (True, CACHED_RUNS)):
                found: dict[str, Any] = {"total_s": None, "over_xla_s": None, "parts": {}}
                try:
                    runs = [run_program(implementation, folder) for _ in range(times)]
                    found["parts"] = min(runs, key=lambda parts: sum(parts.values()))
                    found["total_s"] = sum(found["parts"].values())
                    if name == "xla":
                        plain_s[cached] = found["total_s"] - found["parts"]["import_triax_s"]
                    elif cached in plain_s:
                        found["over_xla_s"] = found["total_s"] - plain_s[cached]
                except (RuntimeError, ValueError, LookupError, subprocess.TimeoutExpired) as error:
                    found["error"] = f"{type(error).__name__}: {error}"
                note = {} if on_gpu else {"note": NO_GPU}
                records.append({"implementation": name, "cached": cached, **found, **note})
    return records


def run_program(implementation: str, caches: str) -> dict[str, float]:
    """Runs the program in a process with these caches; the seconds of its parts."""
    path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
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
    # -P: modules beside the program must not hide those that it imports.
    command = [sys.executable, "-P", __file__, implementation]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    if done.returncode:
        named = re.findall(r"^[\w.]+(?:Error|Exception)\b.*", done.stderr, re.MULTILINE)
        reason = [f"exit status {done.returncode}", *named][-1]
        raise RuntimeError(f"the first call by {implementation} failed: {reason}")
    return json.loads(done.stdout.splitlines()[-1])


def main(implementation: Any) -> None:
    """Routes there and back, with gradients, once, and prints what each part took."""
    keys = jax.random.split(jax.random.key(0), 4)
    selected = jax.random.randint(keys[0], (TOKENS, TOP_K), 0, EXPERTS)
    weights = jax.random.uniform(keys[1], (TOKENS, TOP_K))
    x, gradient = (jax.random.normal(key, (TOKENS, HIDDEN), jnp.bfloat16) for key in keys[2:])
    operands = jax.block_until_ready((x, weights, selected, gradient))
    marks = [("", time.perf_counter())]
    part_ends = lambda name: marks.append((name, time.perf_counter()))
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
    # What fails to compute must not be reported as fast.
    if not all(jnp.isfinite(result.astype(jnp.float32)).all() for result in results):
        raise FloatingPointError("values are not finite")
    print(json.dumps({name: at - marks[n][1] for n, (name, at) in enumerate(marks[1:])}))


if __name__ == "__main__":
    main(sys.argv[1])
