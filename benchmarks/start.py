"""What the host does before a step can run: with Triax, and with the same step exported.

The step is that of `examples/serving`, for 128 tokens. Every run is a new process, in turn with the
others, from its start until XLA has the program for CUDA; and until XLA has compiled it for the CPU
of this machine, which shows what JAX's compilation cache is worth. Needs no GPU, and says nothing
about what XLA does on one.

    python -m benchmarks.start [--output FILE]
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness import record

RUNS, TOKENS, SIZES = 7, 128, (2048, 768, 128)
FOLDER = Path(__file__).resolve().parents[1] / "examples" / "serving"

LOWER = f"""
import export_step, jax, jax.numpy as jnp
params = export_step.parameters(*{SIZES})
args = [jax.ShapeDtypeStruct(({TOKENS}, {SIZES[0]}), t) for t in (jnp.float32, jnp.bfloat16)]
jax.jit(export_step.decode_step).trace(params, *args).lower(lowering_platforms=("cuda",))
"""
LOAD = """
import os, jax, jax.export
exported = jax.export.deserialize(bytearray(open(os.environ["STEP"], "rb").read()))
types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in exported.in_avals]
args, _ = jax.tree.unflatten(exported.in_tree, types)
lowered = jax.jit(exported.call).trace(*args).lower(lowering_platforms=(PLATFORM,))
"""
TO_XLA, COMPILED = LOAD.replace("PLATFORM", "'cuda'"), LOAD.replace("PLATFORM", "'cpu'")
WAYS = {
    "Triax, no kernel compiled yet": (LOWER, "TRITON_CACHE_DIR"),
    "Triax, kernels in Triton's cache": (LOWER, None),
    "exported": (TO_XLA, None),
    "exported, compiled for the CPU": (COMPILED + "lowered.compile()", "JAX_COMPILATION_CACHE_DIR"),
    "exported, in JAX's cache": (COMPILED + "lowered.compile()", None),
}
SPENT = "\nimport time; print(time.process_time())"


def run(program: str, env: dict[str, str]) -> tuple[float, float]:
    """Seconds of a new process, by the clock and of its threads on the CPU."""
    command = [sys.executable, "-c", program + SPENT]
    started = time.perf_counter()
    done = subprocess.run(command, cwd=FOLDER, env=env, check=True, stdout=subprocess.PIPE)
    return time.perf_counter() - started, float(done.stdout)


def main() -> None:
    output = record.parser(__file__, __doc__).parse_args().output
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"JAX_PLATFORMS": "cpu", "TRIAX_CUDA_ARCH": "90"}
        caches = ("TRITON_CACHE_DIR", "JAX_COMPILATION_CACHE_DIR")
        env |= {name: f"{folder}/{name}" for name in caches}
        export = [sys.executable, "export_step.py", folder, f"--tokens={TOKENS}"]
        sizes = [f"--{n}={s}" for n, s in zip(("hidden", "width", "experts"), SIZES, strict=True)]
        subprocess.run(export + sizes, cwd=FOLDER, env=env, check=True)
        (step,) = Path(folder).glob("*.bin")
        env["STEP"] = str(step)
        for turn in range(RUNS):
            for name, (program, empty) in WAYS.items():
                if "in JAX's cache" in name:  # what the last way has just put there
                    empty = caches[1]
                own = {} if empty is None else {empty: f"{folder}/{empty}-{turn}"}
                found[name].append(run(program, env | own))
                print(turn, name, found[name][-1], flush=True)
        size = step.stat().st_size
    results = {
        name: {
            "seconds": statistics.median(wall for wall, _ in times),
            "least_seconds": min(wall for wall, _ in times),
            "cpu_seconds": statistics.median(spent for _, spent in times),
        }
        for name, times in found.items()
    }
    print(record.shown(results))
    shape = dict(zip(("hidden", "width", "experts"), SIZES, strict=True))
    record.write(output, runs=RUNS, tokens=TOKENS, **shape, bytes=size, results=results)


if __name__ == "__main__":
    main()
