"""How fast `quantize` is, as a fraction of a copy: of a stream of two bytes in and one out.

bfloat16 to float8_e4m3fn; an array counts as read once. With --sweep it tries other blocks of the
kernel for rows, the only one with a choice, and writes nothing.

    python -m benchmarks.quantize [--output FILE] [--sweep]
"""

from __future__ import annotations

import functools
import itertools
import math
from unittest import mock

import jax

from benchmarks.harness import record, timing
from benchmarks.harness.inputs import normal
from benchmarks.harness.streams import Stream, find_limit
from triax import moe
from triax.moe.quantization import launchers
from triax.moe.quantization.configs import RowsConfig
from triax.testing import assert_same_bits

ROWS, WEIGHTS = (65536, 7168), (32, 7168, 4096)
# Shape, block, transposed.
CASES = {
    "rows": (ROWS, (1, None), False),
    "parts of 128": (ROWS, (1, 128), False),
    "columns, transposed": (WEIGHTS, (1, None, 1), True),
    "tiles of 128, transposed": (WEIGHTS, (1, 128, 128), True),
    "tiles of 128": (WEIGHTS, (1, 128, 128), False),
}
CHECKED = 128  # rows, or columns and rows of a group, that plain JAX computes, too


def program(block, transposed, implementation="triton"):
    how = {"block": block, "transposed": transposed, "implementation": implementation}
    return jax.jit(functools.partial(moe.quantize, **how))


def median_us(name, array):
    shape, block, transposed = CASES[name]
    few = array[:CHECKED] if len(shape) == 2 else array[-1:, :, -CHECKED:]
    pair = (program(block, transposed, way)(few) for way in ("triton", "xla"))
    jax.tree.map(functools.partial(assert_same_bits, err_msg=name), *pair)
    return timing.median_us(program(block, transposed), array, target_ms=100.0)


def sweep(name, array, copy_us):
    """Other configs, the fastest last."""
    depth = CASES[name][1][-1] or ROWS[1]
    columns = 1 << (depth - 1).bit_length()
    whole = [(n, columns, True) for n in (1, 2, 4, 8, 16, 32, 64) if 1024 <= n * columns <= 16384]
    steps = [(1, n, False) for n in (1024, 2048, 4096) if n < columns]
    found = {}
    for block, num_warps in itertools.product(whole + steps, (2, 4, 8, 16)):
        config = RowsConfig(*block, num_warps)
        make = mock.Mock(return_value=config, for_depth=lambda *_, c=config: c)
        with mock.patch.object(launchers, "RowsConfig", make):
            jax.clear_caches()
            found[config] = median_us(name, array)
    for config, us in sorted(found.items(), key=lambda item: -item[1])[-8:]:
        print(f"  {us:9.1f} us  {copy_us / us:.3f}  {config}")


def arrays():
    """Each shape's array and what its copy takes, with the cases of it."""
    for shape in (ROWS, WEIGHTS):
        copy = find_limit(Stream(2, 1, math.prod(shape)))
        yield normal(0, *shape), copy, [name for name, case in CASES.items() if case[0] == shape]


def measure(copies):
    for array, copy, names in arrays():
        copies.append(copy)
        for name in names:
            us = median_us(name, array)
            yield (
                name,
                {"shape": array.shape, "median_us": us, "of_copy": copy["median_us"] / us},
            )


def main():
    parser = record.parser(__file__, __doc__)
    parser.add_argument("--sweep", nargs="*", help="names of cases of rows; all by default")
    options = record.parse(parser)
    if options.sweep is None:
        copies = []
        record.keep(options.output, measure(copies), copies=copies)
        return
    for array, copy, names in arrays():
        for name in names:
            if CASES[name][0] == ROWS and (not options.sweep or name in options.sweep):
                print(name)
                sweep(name, array, copy["median_us"])


if __name__ == "__main__":
    main()
