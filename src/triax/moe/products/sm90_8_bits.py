"""Launches ragged_dot of 8-bit floats with float32 accumulators, on Hopper."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from triax.binding.descriptor import TensorDescriptor
from triax.moe.products.product import ALIGNED, RaggedDot
from triax.moe.products.row_tiles import ROW_TILES, ROWS, bounded_by_group, cdiv, schedule
from triax.moe.products.thresholds import HALF_A_TILE
from triax.moe.shared.launching import launch

_COLUMNS, _BLOCK, _STAGES = 256, 128, 3
# Registers per thread, and per multiplying thread, which holds products and accumulators. With
# more, as with fewer, some are spilled between products.
_REGISTERS, _REGISTERS_OF_PRODUCTS = 148, 208
_MOST = 2**31


def needs(product: RaggedDot) -> str | None:
    """Returns what the kernel needs and a product does not have; None if it takes it.

    It promotes sums to float32. Scales are DeepSeek-V3's blocks, or one per row and column. Offsets
    of scales and rows of all weights are in 32 bits.
    """
    x, w = product.left, product.right
    if needed := product.needs_hopper():
        return needed
    if not all(
        of.values.dtype.itemsize == 1 and jnp.issubdtype(of.values.dtype, jnp.floating)
        for of in (x, w)
    ):
        return "rows and weights of 8-bit floats"
    if x.scales is None or (x.deep, w.wide, w.deep) not in (
        (_BLOCK, _BLOCK, _BLOCK),
        (None, 1, None),
    ):
        return f"scales of rows and columns, or of blocks of {_BLOCK}"
    if x.deep is None and product.options.fast_sums:
        return "sums that are promoted to float32"
    if not product.transposed:
        return "weights that are stored with their depth innermost"
    if product.bias is not None:
        return "a product without a bias"
    if product.rows_per_group <= HALF_A_TILE:
        return f"more than {HALF_A_TILE} rows for each group on average"
    if not product.suits_tma:
        return ALIGNED
    groups, columns, depth = w.values.shape
    deep = cdiv(depth, _BLOCK)
    most = max(product.num_rows * deep, groups * max(columns, cdiv(columns, _BLOCK) * deep))
    return f"fewer than {_MOST:,} scales" if most >= _MOST else None


def ragged_dot(product: RaggedDot) -> jax.Array:
    """Multiplies each row by the transposed weights of its group; other rows are zero."""
    from triton.experimental.gluon import language as gl

    from triax.moe.products.sm90_8_bits_kernels import _ragged_dot_float32_sums_kernel

    x, w, out_type = product.left, product.right, product.out_type
    num_rows, depth, columns = product.num_rows, product.depth, product.columns
    layout = gl.NVMMASharedLayout(swizzle_byte_width=_BLOCK, element_bitwidth=8, rank=2)
    bits = 8 * out_type.dtype.itemsize
    made = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=4)
    all_columns = w.values.reshape(product.num_groups * columns, depth)
    tiles, _ = schedule(product.groups, num_rows, ROWS, product.implementation, ROW_TILES)
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
        grid=product.target.multiprocessors,
        num_warps=4,
        backend_options={"maxnreg": _REGISTERS},
        implementation=product.implementation,
        BLOCKED=x.deep is not None,
        BLOCK_ROWS=ROWS,
        BLOCK_COLUMNS=_COLUMNS,
        BLOCK_DEPTH=_BLOCK,
        STAGES=_STAGES,
        REGISTERS=_REGISTERS_OF_PRODUCTS,
        out=bounded_by_group(out_type, ROWS // 2, _COLUMNS // 2, made),
    )
