"""The smallest kernel: adds two vectors.

python examples/vector_add.py
"""

from __future__ import annotations

import jax
import triton
import triton.language as tl
from comparing import compare, on_gpu

import triax


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, x + y, mask=mask)


def add(x: jax.Array, y: jax.Array) -> jax.Array:
    """x + y, of equal shapes and dtypes."""
    return triax.triton_call(
        x,
        y,
        n=x.size,
        BLOCK=1024,
        kernel=add_kernel,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=lambda meta: triton.cdiv(meta["n"], meta["BLOCK"]),
    )


def main() -> float:
    size = 1 << 26 if on_gpu() else 5000
    x, y = jax.random.normal(jax.random.key(0), (2, size))
    return compare("x + y", add, lambda x, y: x + y, x, y)


if __name__ == "__main__":
    main()
