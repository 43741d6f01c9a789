"""A transpose in Gluon, where the kernel says which thread holds which element.

    python examples/gluon_transpose.py

Threads beside each other should read elements beside each other, and write them so. In a transpose
these are two layouts, and between them a block is rearranged through shared memory. Triton chooses
layouts itself; in Gluon they are yours. Gluon has no interpreter, so this needs a GPU.
"""

from __future__ import annotations

import jax
import triton
from comparing import compare, on_gpu
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import triax


@gluon.jit
def transpose_kernel(x_ptr, out_ptr, rows, columns, BLOCK: gl.constexpr, num_warps: gl.constexpr):
    # A thread has four elements in sequence: of a row of x to read, of a column of x to write.
    reading: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [num_warps, 1], [1, 0])
    writing: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, num_warps], [0, 1])

    i = gl.program_id(1) * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, reading))
    j = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, reading))
    i, j = i.to(gl.int64)[:, None], j[None, :]
    x = gl.load(x_ptr + i * columns + j, mask=(i < rows) & (j < columns), other=0)

    x = gl.convert_layout(x, writing)
    i = gl.program_id(1) * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, writing))
    j = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, writing))
    i, j = i[:, None], j.to(gl.int64)[None, :]
    gl.store(out_ptr + j * rows + i, x, mask=(i < rows) & (j < columns))


def transpose(x: jax.Array) -> jax.Array:
    rows, columns = x.shape
    return triax.triton_call(
        x,
        rows=rows,
        columns=columns,
        BLOCK=64,
        num_warps=4,
        kernel=transpose_kernel,
        out_type=jax.ShapeDtypeStruct((columns, rows), x.dtype),
        grid=(triton.cdiv(columns, 64), triton.cdiv(rows, 64)),
    )


def main() -> float | None:
    if not on_gpu():
        print("Gluon has no interpreter: run this on a GPU.")
        return None
    x = jax.random.normal(jax.random.key(0), (8192, 4000))
    return compare("the transpose", transpose, lambda x: x.T, x)


if __name__ == "__main__":
    main()
