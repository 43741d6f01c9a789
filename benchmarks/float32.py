"""How much longer `ragged_dot` takes in float32 than in bfloat16: exactly, and as TF32.

python -m benchmarks.float32 [--output FILE]
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from benchmarks.harness import record
from benchmarks.harness.inputs import normal
from benchmarks.harness.timing import median_us
from triax import moe

ROWS, DEPTH, COLUMNS, GROUPS = 16384, 4096, 4096, 8
# The dtype of the operands, the precision, and what results may be off by.
WAYS = {
    "bfloat16": ("bfloat16", None, 2e-2),
    "float32": ("float32", "float32", 1e-5),
    "float32 as TF32": ("float32", "tensorfloat32", 2e-3),
}


def measure():
    rows = normal(0, ROWS, DEPTH, dtype="float32")
    weights = normal(1, GROUPS, DEPTH, COLUMNS, dtype="float32", scale=DEPTH**-0.5)
    sizes = jnp.full(GROUPS, ROWS // GROUPS, jnp.int32)
    with jax.default_matmul_precision("float32"):
        expected = jnp.einsum("grk,gkn->grn", rows.reshape(GROUPS, -1, DEPTH), weights)
    us = {}
    for name, (dtype, precision, tolerance) in WAYS.items():
        operands = rows.astype(dtype), weights.astype(dtype), sizes
        program = jax.jit(lambda given, p=precision: moe.ragged_dot(*given, precision=p))
        result = program(operands).astype("float32")
        record.check(name, result, expected.reshape(ROWS, COLUMNS), tolerance)
        us[name] = median_us(program, operands, target_ms=100.0)
        yield name, {"median_us": us[name], "of_bfloat16": us[name] / us["bfloat16"]}


if __name__ == "__main__":
    record.main(measure, rows=ROWS, depth=DEPTH, columns=COLUMNS, groups=GROUPS)
