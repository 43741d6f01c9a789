"""One program with an autotuned gather after argsort, an update in place, and a matmul."""

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import triton

import triax
from tests import kernels
from tests.cases import autotuned_accumulate, gather
from triax import testing

_TILES = [
    triton.Config({"BM": m, "BN": n, "BK": 32}, num_warps=w)
    for m, n, w in ((32, 32, 2), (64, 32, 4), (64, 64, 4), (128, 64, 8))
]
matmul_kernel = triton.autotune(configs=_TILES, key=["m", "n", "k"])(kernels.matmul_kernel)


def matmul(a, b):
    (m, k), n = a.shape, b.shape[1]
    return triax.triton_call(
        a,
        b,
        m=m,
        n=n,
        k=k,
        kernel=matmul_kernel,
        out_type=jax.ShapeDtypeStruct((m, n), a.dtype),
        grid=lambda meta: (triton.cdiv(m, meta["BM"]), triton.cdiv(n, meta["BN"])),
    )


def step(x, keys, y, w):
    """(x sorted by keys) @ w + y: gather, matmul, update in place."""
    return autotuned_accumulate(matmul(gather(x, jnp.argsort(keys).astype(jnp.int32)), w), y)


def inputs(rows=250, columns=192):
    rng = np.random.default_rng(0)
    x = rng.integers(-8, 8, (rows, columns)).astype(np.float32)
    w = rng.integers(-8, 8, (columns, columns)).astype(np.float32)
    y = rng.integers(-8, 8, (rows, columns)).astype(np.float32)
    return x, rng.permutation(rows).astype(np.float32), y, w


def reference(x, keys, y, w):
    return (x[np.argsort(keys)].astype(np.float64) @ w + y).astype(np.float32)


def main():
    x, keys, y, w = inputs()
    expected = reference(x, keys, y, w)  # whole numbers: exact in float32
    start = time.perf_counter()
    function = jax.jit(step, donate_argnums=2)
    first = function(x, keys, jnp.asarray(y), w)
    jax.block_until_ready(first)
    seconds = time.perf_counter() - start
    testing.assert_same_bits(first, expected)
    for _ in range(99):
        out = function(x, keys, jnp.asarray(y), w)
    testing.assert_same_bits(out, expected)
    sources = {call.kernel: call.source for call in triax.explain(function, x, keys, y, w)}
    print(json.dumps({"seconds": seconds, "sources": sources}))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
