"""A user's kernels with a fault each, which Triton's sanitizers must find through `triax`.

    python -m tools.sanitize.planted_kernels "no wait"

ConSan ends the process, as it would a user's.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

import triax
from triax import testing

ROWS, COLUMNS = 64, 1024


@gluon.jit
def copy_kernel(x_ptr, out_ptr, BLOCK: gl.constexpr, WAITS: gl.constexpr):
    """Copies a row through shared memory; the fault is to read it before it has arrived."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    offsets = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=layout)
    row = gl.allocate_shared_memory(
        x_ptr.dtype.element_ty, [BLOCK], gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    )
    async_copy.async_load(row, x_ptr + offsets)
    async_copy.commit_group()
    if WAITS:
        async_copy.wait_group(0)
    gl.store(out_ptr + offsets, row.load(layout))
    if not WAITS:
        async_copy.wait_group(0)


@triton.jit
def dot_kernel(x_ptr, w_ptr, out_ptr, columns, BLOCK: tl.constexpr, SHIFT: tl.constexpr):
    """Multiplies rows by a vector; the fault is to begin at its second element."""
    row, total = tl.program_id(0), 0.0
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        w = tl.load(w_ptr + (at + SHIFT) % columns)
        total += tl.sum(tl.load(x_ptr + row * columns + at) * w, axis=0)
    tl.store(out_ptr + row, total)


@jax.jit
def draw() -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    return jax.random.normal(keys[0], (ROWS, COLUMNS)), jax.random.normal(keys[1], (COLUMNS,))


def copied(waits: bool) -> np.ndarray:
    """A copy of a copy of the rows, and so on, under ConSan."""
    keywords: dict[str, Any] = {"BLOCK": COLUMNS, "WAITS": waits, "grid": ROWS}

    @jax.jit
    def copy(x: jax.Array) -> jax.Array:
        for _ in range(8):  # XLA makes a CUDA graph of so many
            x = triax.triton_call(x, kernel=copy_kernel, out_type=jax.typeof(x), **keywords)
        return x

    x, _ = draw()
    with testing.sanitized("consan"):
        for _ in range(4):
            x = copy(x)
        return np.asarray(x)


def dot(block: int, shift: int = 0) -> np.ndarray:
    """The rows times the vector, summed in blocks."""
    x, w = draw()
    keywords: dict[str, Any] = {"BLOCK": block, "SHIFT": shift, "grid": ROWS}
    out_type = jax.ShapeDtypeStruct((ROWS,), jnp.float32)
    out = triax.triton_call(x, w, columns=COLUMNS, kernel=dot_kernel, out_type=out_type, **keywords)
    return np.asarray(out)


def main(fault: str) -> None:
    if fault == "no wait":
        copied(waits=False)
    elif fault == "none":
        testing.assert_same_bits(copied(waits=True), draw()[0])
        assert dot(64).tobytes() != dot(512).tobytes(), "sums in another order have other bits"
        with testing.sanitized("fpsan"):
            testing.assert_same_bits(dot(64), dot(512))
    elif fault == "wrong operand":
        with testing.sanitized("fpsan"):
            testing.assert_same_bits(dot(64), dot(64, shift=1))


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]))
    print("found nothing")
