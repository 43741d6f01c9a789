"""`ragged_dot` of an eighth of the groups, against its rows alone and zeros for the others.

65,536 rows over 64 groups, of which 8 have weights here; forward, and forward and backward, in
bfloat16. "rows alone" multiplies the same rows without the others, "zeros" writes as many as there
are others.

    python -m benchmarks.group_offset [--output FILE]
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from benchmarks.harness import record
from benchmarks.harness.inputs import normal, with_gradients
from benchmarks.harness.timing import in_turn
from triax import moe

ROWS, DEPTH, COLUMNS, GROUPS, LOCAL, OFFSET = 65536, 4096, 4096, 64, 8, 24
EACH = ROWS // GROUPS
MINE = slice(OFFSET * EACH, (OFFSET + LOCAL) * EACH)


def multiply(sizes, offset=None):
    return lambda operands: moe.ragged_dot(*operands, sizes, group_offset=offset)


def gradients(function, given):
    """Of the operands, for the gradient that was given with them."""
    *operands, gradient = given
    return with_gradients(function, lambda out: gradient)(operands)


def check(name, actual, wanted):
    for mine, expected in zip(*map(jax.tree.leaves, (actual, wanted)), strict=True):
        if len(mine) == ROWS:
            others = jnp.delete(mine, MINE, axis=0)
            record.check(f"{name}: rows of other groups", others, jnp.zeros_like(others))
            mine = mine[MINE]
        record.check(name, mine, expected)


def measure():
    rows, gradient = normal(0, ROWS, DEPTH), normal(2, ROWS, COLUMNS)
    weights, sizes = normal(1, LOCAL, DEPTH, COLUMNS), jnp.full(GROUPS, EACH, jnp.int32)
    every, alone = (rows, weights, gradient), (rows[MINE], weights, gradient[MINE])
    offset, few = multiply(sizes, jnp.int32(OFFSET)), multiply(sizes[:LOCAL])
    for name, wrap, widths in (
        ("forward", lambda function, given: function(given[:2]), (COLUMNS,)),
        ("forward and backward", gradients, (COLUMNS, DEPTH)),
    ):
        zeros = lambda given, widths=widths: [
            jnp.zeros((ROWS - LOCAL * EACH, width), given[0].dtype) for width in widths
        ]
        programs = {
            "offset": (jax.jit(lambda given, w=wrap: w(offset, given)), every),
            "rows alone": (jax.jit(lambda given, w=wrap: w(few, given)), alone),
            "zeros": (jax.jit(zeros), every),
        }
        check(name, *(run(given) for run, given in list(programs.values())[:2]))
        us = in_turn(programs, rounds=5)
        ratio = us["offset"] / (us["rows alone"] + us["zeros"])
        yield name, {"median_us": us, "of_both": ratio}


if __name__ == "__main__":
    shape = {"rows": ROWS, "depth": DEPTH, "columns": COLUMNS, "groups": GROUPS, "local": LOCAL}
    record.main(measure, **shape)
