"""A matmul that reads its blocks by TMA, through descriptors made on the host.

    python examples/tma_matmul.py

The kernel computes no addresses and no masks for what it loads: a descriptor knows the array, and
what lies outside reads as zero. A block's shape is part of the descriptor, and so of the config
that tuning chooses. A GPU must have compute capability 9.0 or later.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from comparing import compare, on_gpu

import triax

CONFIGS = [
    triton.Config({"BM": 128, "BN": 256, "BK": 64}, num_warps=8, num_stages=4),
    triton.Config({"BM": 128, "BN": 128, "BK": 64}, num_warps=8, num_stages=4),
    triton.Config({"BM": 64, "BN": 128, "BK": 64}, num_warps=4, num_stages=4),
]


@triton.autotune(CONFIGS, key=["m", "n", "k"])
@triton.jit
def matmul_kernel(a, b, out_ptr, m, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    # Eight rows of tiles at a time, so that the columns' tiles are still in the cache.
    tiles_m, tiles_n = tl.num_programs(1), tl.num_programs(0)
    i, j = tl.swizzle2d(tl.program_id(1), tl.program_id(0), tiles_m, tiles_n, 8)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK):
        total = tl.dot(a.load([i * BM, start]), b.load([start, j * BN]), total)
    rows, columns = i * BM + tl.arange(0, BM), j * BN + tl.arange(0, BN)
    out = out_ptr + rows[:, None].to(tl.int64) * n + columns[None, :]
    mask = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=mask)


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """a @ b, summed in float32, in the dtype of a. Rows must be multiples of 16 bytes."""
    (m, k), n = a.shape, b.shape[1]
    return triax.triton_call(
        triax.TensorDescriptor.from_array(a, lambda meta: (meta["BM"], meta["BK"])),
        triax.TensorDescriptor.from_array(b, lambda meta: (meta["BK"], meta["BN"])),
        m=m,
        n=n,
        k=k,
        kernel=matmul_kernel,
        out_type=jax.ShapeDtypeStruct((m, n), a.dtype),
        grid=lambda meta: (triton.cdiv(n, meta["BN"]), triton.cdiv(m, meta["BM"])),
    )


def main() -> float:
    m, n, k = (4096, 4096, 4096) if on_gpu() else (200, 304, 104)
    a = jax.random.normal(jax.random.key(0), (m, k), jnp.bfloat16)
    b = jax.random.normal(jax.random.key(1), (k, n), jnp.bfloat16)
    return compare("a @ b", matmul, jnp.matmul, a, b)


if __name__ == "__main__":
    main()
