"""How much longer `ragged_dot` takes in float32 than in bfloat16: exactly, and as TF32.

Prints the figures and writes `benchmarks/float32.json`.

    python benchmarks/float32.py [--output FILE]
"""

from __future__ import annotations

import sys

import gpu_record
import jax
import jax.numpy as jnp

from triax import moe
from triax.bench.timing import time_program

ROWS, DEPTH, COLUMNS, GROUPS = 16384, 4096, 4096, 8
WAYS = {
    "bfloat16": ("bfloat16", None, 2e-2),
    "float32": ("float32", "float32", 1e-5),
    "float32 as TF32": ("float32", "tensorfloat32", 2e-3),
}


def main():
    output = gpu_record.output(__doc__, __file__)
    keys = jax.random.split(jax.random.key(0))
    rows = jax.random.normal(keys[0], (ROWS, DEPTH))
    weights = jax.random.normal(keys[1], (GROUPS, DEPTH, COLUMNS)) * DEPTH**-0.5
    sizes = jnp.full(GROUPS, ROWS // GROUPS, jnp.int32)
    with jax.default_matmul_precision("float32"):
        expected = jnp.einsum("grk,gkn->grn", rows.reshape(GROUPS, -1, DEPTH), weights)
    found = {}
    for name, (dtype, precision, tolerance) in WAYS.items():
        operands = rows.astype(dtype), weights.astype(dtype), sizes
        program = jax.jit(lambda given, p=precision: moe.ragged_dot(*given, precision=p))
        error = float(jnp.abs(program(operands) - expected.reshape(ROWS, COLUMNS)).max())
        if not error <= tolerance * float(jnp.abs(expected).max()):
            sys.exit(f"{name}: off by {error}")
        found[name] = {"median_us": time_program(program, operands, target_ms=100.0).median_us}
        found[name]["of_bfloat16"] = found[name]["median_us"] / found["bfloat16"]["median_us"]
        print(name, found[name])
    shape = {"rows": ROWS, "depth": DEPTH, "columns": COLUMNS, "groups": GROUPS}
    gpu_record.write(output, **shape, results=found)


if __name__ == "__main__":
    main()
