"""TMA descriptors, made on the host and in the kernel, and a Gluon kernel."""

import jax
import numpy as np
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import triax
from triax import testing

KINDS = ["host", "host_nan", "output", "device", "gluon"]


@triton.jit
def host_kernel(desc, out_ptr, n_cols, BM: tl.constexpr, BN: tl.constexpr):
    i, j = tl.program_id(0), tl.program_id(1)
    tile = desc.load([i * BM, j * BN])
    rows, cols = i * BM + tl.arange(0, BM), j * BN + tl.arange(0, BN)
    tl.store(out_ptr + rows[:, None] * n_cols + cols[None, :], tile * 2)


@triton.jit
def output_kernel(desc, total_ptr, out, BM: tl.constexpr, BN: tl.constexpr):
    i, j = tl.program_id(0), tl.program_id(1)
    tile = desc.load([i * BM, j * BN])
    out.store([i * BM, j * BN], tile * 2)
    tl.store(total_ptr + i * tl.num_programs(1) + j, tl.sum(tl.sum(tile, 0), 0))


@triton.jit
def device_kernel(x_ptr, out_ptr, m, n, BM: tl.constexpr, BN: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [m, n], [n, 1], [BM, BN])
    out = tl.make_tensor_descriptor(out_ptr, [m, n], [n, 1], [BM, BN])
    i, j = tl.program_id(0), tl.program_id(1)
    out.store([i * BM, j * BN], x.load([i * BM, j * BN]) * 2)


@gluon.jit
def gluon_kernel(x_ptr, out_ptr, n, BLOCK: gl.constexpr, WARPS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    offsets = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=layout)
    mask = offsets < n
    gl.store(out_ptr + offsets, gl.load(x_ptr + offsets, mask=mask) * 2, mask=mask)


def call(kind, x, tf32=False, **options):
    """2 * x; for the host kinds padded to whole tiles by the descriptor's padding."""
    m, n = x.shape
    block = (16, 32)
    grid = (triton.cdiv(m, block[0]), triton.cdiv(n, block[1]))
    if kind == "gluon":
        return triax.triton_call(
            x,
            n=x.size,
            BLOCK=256,
            WARPS=4,
            num_warps=4,
            kernel=gluon_kernel,
            out_type=x,
            grid=triton.cdiv(x.size, 256),
            **options,
        )
    if kind == "device":
        return triax.triton_call(
            x, m=m, n=n, BM=16, BN=32, kernel=device_kernel, out_type=x, grid=grid, **options
        )
    descriptor = triax.TensorDescriptor.from_array(
        x, block, padding="nan" if kind == "host_nan" else "zero", round_f32_to_tf32=tf32
    )
    if kind == "output":
        out_type = jax.ShapeDtypeStruct(grid, x.dtype), jax.ShapeDtypeStruct(x.shape, x.dtype)
        shown = lambda meta: (meta["BM"], meta["BN"])
        return triax.triton_call(
            descriptor,
            out=triax.TensorDescriptor.from_array(out_type[1], shown),
            BM=16,
            BN=32,
            kernel=output_kernel,
            out_type=out_type,
            grid=grid,
            **options,
        )[1]
    padded = (grid[0] * block[0], grid[1] * block[1])
    return triax.triton_call(
        descriptor,
        n_cols=padded[1],
        BM=16,
        BN=32,
        kernel=host_kernel,
        out_type=jax.ShapeDtypeStruct(padded, x.dtype),
        grid=grid,
        **options,
    )


def check(kind, **options):
    x = np.random.default_rng(5).standard_normal((35, 44)).astype(np.float32)
    actual = jax.jit(lambda x: call(kind, x, **options))(x)
    expected = 2 * x
    if kind.startswith("host"):
        expected = np.full((48, 64), np.nan if kind == "host_nan" else 0, np.float32)
        expected[:35, :44] = 2 * x
        np.testing.assert_array_equal(np.asarray(actual), expected)
        return
    testing.assert_same_bits(actual, expected)
