"""Launches ragged_dot of 8-bit floats with float32 accumulators, on Hopper."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from triax.binding.descriptor import TensorDescriptor
from triax.binding.launch import KernelImplementation
from triax.compat import versions
from triax.moe.products.operands import Parts
from triax.moe.products.options import Groups, Options
from triax.moe.products.row_tiles import (
    ROW_TILES,
    ROWS,
    bounded_by_group,
    cdiv,
    schedule,
)
from triax.moe.shared.launching import launch
from triax.moe.shared.target import Target

_COLUMNS, _BLOCK, _STAGES = 256, 128, 3
# Registers per thread, and per multiplying thread, which holds products and accumulators. With
# more, as with fewer, some are spilled between products.
_REGISTERS, _REGISTERS_OF_PRODUCTS = 148, 208
_HOPPER = 90
_MOST = 2**31


def suit(
    target: Target,
    x: Parts,
    w: Parts,
    bias: jax.Array | None,
    rows_per_group: int,
    *,
    options: Options,
    implementation: KernelImplementation | None,
) -> bool:
    """Whether the kernel supports rows and transposed weights that descriptors can address.

    It promotes sums to float32. Scales are DeepSeek-V3's blocks, or one per row and column. Gluon
    is not interpreted.
    """
    groups, columns, depth = w.values.shape
    deep = cdiv(depth, _BLOCK)
    return (
        target.compute_capability == _HOPPER
        and implementation != "interpret"
        and versions.GLUON.passes(versions.installed(versions.GLUON.package) or "0")
        and x.values.dtype.itemsize == w.values.dtype.itemsize == 1
        and jnp.issubdtype(x.values.dtype, jnp.floating)
        and x.scales is not None
        and (
            (x.deep, w.wide, w.deep) == (_BLOCK, _BLOCK, _BLOCK)
            or ((x.deep, w.wide, w.deep) == (None, 1, None) and not options.fast_sums)
        )
        and bias is None
        and rows_per_group > ROWS // 2
        and max(len(x.values) * deep, groups * max(columns, cdiv(columns, _BLOCK) * deep)) < _MOST
    )


def ragged_dot(
    target: Target,
    x: Parts,
    w: Parts,
    groups: Groups,
    *,
    options: Options,
    implementation: KernelImplementation | None,
) -> jax.Array:
    """Multiplies each row by the transposed weights of its group; other rows are zero."""
    from triton.experimental.gluon import language as gl

    from triax.moe.products.sm90_8_bits_kernels import _ragged_dot_float32_sums_kernel

    (num_rows, depth), (num_groups, columns, _) = x.values.shape, w.values.shape
    out_type = jax.ShapeDtypeStruct((num_rows, columns), options.dtype)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=_BLOCK, element_bitwidth=8, rank=2)
    bits = 8 * options.dtype.itemsize
    made = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=4)
    all_columns = w.values.reshape(num_groups * columns, depth)
    tiles, _ = schedule(groups, num_rows, ROWS, implementation, ROW_TILES)
    return launch(
        _ragged_dot_float32_sums_kernel,
        TensorDescriptor.from_array(x.values, (ROWS, _BLOCK), layout),
        TensorDescriptor.from_array(all_columns, (_COLUMNS, _BLOCK), layout),
        tiles,
        x.scales,
        w.scales,
        num_rows,
        depth,
        columns,
        out_type=out_type,
        grid=target.multiprocessors,
        num_warps=4,
        backend_options={"maxnreg": _REGISTERS},
        implementation=implementation,
        BLOCKED=x.deep is not None,
        BLOCK_ROWS=ROWS,
        BLOCK_COLUMNS=_COLUMNS,
        BLOCK_DEPTH=_BLOCK,
        STAGES=_STAGES,
        REGISTERS=_REGISTERS_OF_PRODUCTS,
        out=bounded_by_group(out_type, ROWS // 2, _COLUMNS // 2, made),
    )
