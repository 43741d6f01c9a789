"""A matmul whose config is tuned, and what tuning found.

    python examples/matmul.py

On a GPU the configs are measured the first time, and the best is stored. Elsewhere the program
shows what would be compiled for an H100 or H200, which needs JAX's CUDA plugin, though no GPU.
"""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from comparing import compare, on_gpu

import triax
from triax.errors import MissingDependencyError

CONFIGS = [
    triton.Config({"BM": 128, "BN": 256, "BK": 64}, num_warps=8, num_stages=3),
    triton.Config({"BM": 128, "BN": 128, "BK": 64}, num_warps=8, num_stages=4),
    triton.Config({"BM": 128, "BN": 128, "BK": 32}, num_warps=4, num_stages=4),
    triton.Config({"BM": 64, "BN": 128, "BK": 32}, num_warps=4, num_stages=4),
    triton.Config({"BM": 64, "BN": 64, "BK": 32}, num_warps=4, num_stages=4),
]


@triton.autotune(CONFIGS, key=["m", "n", "k"])
@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, out_ptr, m, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    # Eight rows of tiles at a time, so that the columns' tiles are still in the cache.
    tiles_m, tiles_n = tl.cdiv(m, BM), tl.cdiv(n, BN)
    first = tl.program_id(0) // (8 * tiles_n) * 8
    height = min(tiles_m - first, 8)
    inside = tl.program_id(0) % (8 * tiles_n)
    rows = (first + inside % height) * BM + tl.arange(0, BM)
    columns = inside // height * BN + tl.arange(0, BN)

    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, k, BK):
        depth = start + tl.arange(0, BK)
        a_mask = (rows[:, None] < m) & (depth[None, :] < k)
        b_mask = (depth[:, None] < k) & (columns[None, :] < n)
        a = tl.load(a_ptr + rows[:, None] * k + depth[None, :], mask=a_mask, other=0)
        b = tl.load(b_ptr + depth[:, None] * n + columns[None, :], mask=b_mask, other=0)
        total = tl.dot(a, b, total, input_precision="ieee")
    out = out_ptr + rows[:, None] * n + columns[None, :]
    mask = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=mask)


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """a @ b, summed in float32, in the dtype of a."""
    (m, k), n = a.shape, b.shape[1]
    return triax.triton_call(
        a,
        b,
        m=m,
        n=n,
        k=k,
        kernel=matmul_kernel,
        out_type=jax.ShapeDtypeStruct((m, n), a.dtype),
        grid=lambda meta: triton.cdiv(m, meta["BM"]) * triton.cdiv(n, meta["BN"]),
    )


def main() -> float:
    size = 4096 if on_gpu() else 96
    a, b = jax.random.normal(jax.random.key(0), (2, size, size), jnp.bfloat16)
    difference = compare("a @ b", matmul, jnp.matmul, a, b)
    os.environ.setdefault("TRIAX_CUDA_ARCH", "90")
    try:
        for call in triax.explain(matmul, a, b):
            print(call)
    except MissingDependencyError as error:
        print(f"What was compiled is not shown: {error}")
    return difference


if __name__ == "__main__":
    main()
