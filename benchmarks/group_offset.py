"""`ragged_dot` of an eighth of the groups, against its rows alone and zeros for the others.

65,536 rows over 64 groups, of which 8 have weights here; forward, and forward and backward, in
bfloat16. "rows alone" multiplies the same rows without the others, "zeros" writes as many as there
are others. Prints the figures and writes `benchmarks/group_offset.json`.

    python benchmarks/group_offset.py [--output FILE]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import gpu_record
import jax
import jax.numpy as jnp

from triax import moe

ROWS, DEPTH, COLUMNS, GROUPS, LOCAL, OFFSET = 65536, 4096, 4096, 64, 8, 24
EACH = ROWS // GROUPS
MINE = slice(OFFSET * EACH, (OFFSET + LOCAL) * EACH)


def multiply(sizes, offset=None):
    return lambda rows, weights: moe.ragged_dot(rows, weights, sizes, group_offset=offset)


def with_gradients(function):
    def run(given):
        out, pull = jax.vjp(function, given["rows"], given["weights"])
        return out, *pull(given["gradient"])

    return run


def zeros(*widths):
    return lambda given: tuple(
        jnp.zeros((ROWS - LOCAL * EACH, width), given["rows"].dtype) for width in widths
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    if problem := gpu_record.missing_gpu():
        sys.exit(problem)
    keys = jax.random.split(jax.random.key(0), 3)
    normal = lambda key, *shape: jax.random.normal(key, shape).astype("bfloat16")
    every = {
        "rows": normal(keys[0], ROWS, DEPTH),
        "weights": normal(keys[1], LOCAL, DEPTH, COLUMNS),
        "gradient": normal(keys[2], ROWS, COLUMNS),
    }
    alone = every | {name: every[name][MINE] for name in ("rows", "gradient")}
    sizes = jnp.full(GROUPS, EACH, jnp.int32)
    some, few = multiply(sizes, jnp.int32(OFFSET)), multiply(sizes[:LOCAL])
    forward = lambda function: lambda given: function(given["rows"], given["weights"])
    found = {}
    for name, wrap, widths in (
        ("forward", forward, (COLUMNS,)),
        ("forward and backward", with_gradients, (COLUMNS, DEPTH)),
    ):
        programs = {
            "offset": (jax.jit(wrap(some)), every),
            "rows alone": (jax.jit(wrap(few)), alone),
            "zeros": (jax.jit(zeros(*widths)), every),
        }
        actual, wanted = (jax.tree.leaves(run(given)) for run, given in list(programs.values())[:2])
        for mine, expected in zip(actual, wanted, strict=True):
            if len(mine) == ROWS:
                if jnp.any(mine[: MINE.start]) or jnp.any(mine[MINE.stop :]):
                    sys.exit(f"{name}: rows of other groups are not zero")
                mine = mine[MINE]
            if not jnp.array_equal(mine, expected):
                sys.exit(f"{name}: other results than of the rows alone")
        del actual, wanted
        us = gpu_record.in_turn(programs, rounds=5, target_ms=50.0)
        ratio = us["offset"] / (us["rows alone"] + us["zeros"])
        found[name] = {"median_us": us, "of_both": ratio}
        print(name, {way: round(t, 1) for way, t in us.items()}, round(ratio, 3))
    shape = {"rows": ROWS, "depth": DEPTH, "columns": COLUMNS, "groups": GROUPS, "local": LOCAL}
    gpu_record.write(options.output, **shape, results=found)


if __name__ == "__main__":
    main()
