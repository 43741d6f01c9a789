"""The launch of ragged_dot of 8-bit floats with scales of blocks, on Hopper."""

from __future__ import annotations

from typing import Any

import jax

from triax.binding.descriptor import TensorDescriptor
from triax.binding.launch import KernelImplementation
from triax.compat import versions
from triax.moe.grouped_matmul.options import Options
from triax.moe.grouped_matmul.tiles import cdiv
from triax.moe.shared.launching import launch
from triax.moe.shared.target import Target

ROWS, _COLUMNS, _BLOCK, _STAGES = 128, 256, 128, 3
# As many as all threads get, and those that multiply: what is scaled and added up is in registers.
_REGISTERS, _REGISTERS_OF_PRODUCTS = 152, 216
_HOPPER = 90
_MOST = 2**31


def suit(
    target: Target,
    rows: jax.Array,
    weights: jax.Array,
    bias: jax.Array | None,
    *,
    transposed: bool,
    options: Options,
    implementation: KernelImplementation | None,
) -> bool:
    """Whether the kernel can multiply these, which descriptors can address: DeepSeek-V3's blocks.

    Gluon is not interpreted.
    """
    groups, columns, depth = weights.shape
    deep = cdiv(depth, _BLOCK)
    return (
        target.compute_capability == _HOPPER
        and implementation != "interpret"
        and versions.GLUON.passes(versions.installed(versions.GLUON.package) or "0")
        and transposed
        and rows.dtype.itemsize == weights.dtype.itemsize == 1
        and (options.row_block, *options.weight_block) == (_BLOCK, _BLOCK, _BLOCK)
        and bias is None
        and max(rows.shape[0] * deep, groups * max(columns, cdiv(columns, _BLOCK) * deep)) < _MOST
    )


def ragged_dot(
    target: Target,
    rows: jax.Array,
    weights: jax.Array,
    tiles: jax.Array,
    row_scales: jax.Array | None,
    group_scales: jax.Array | None,
    *,
    options: Options,
    implementation: KernelImplementation | None,
) -> jax.Array:
    """Each row times the transposed weights of its group; zeros elsewhere."""
    from triton.experimental.gluon import language as gl

    from triax.moe.grouped_matmul.blocks_kernels import _ragged_dot_of_blocks_kernel

    (num_rows, depth), (groups, columns, _) = rows.shape, weights.shape
    layout = gl.NVMMASharedLayout(swizzle_byte_width=_BLOCK, element_bitwidth=8, rank=2)
    all_columns = weights.reshape(groups * columns, depth)
    out: Any = launch(
        _ragged_dot_of_blocks_kernel,
        TensorDescriptor.from_array(rows, (ROWS, _BLOCK), layout),
        TensorDescriptor.from_array(all_columns, (_COLUMNS, _BLOCK), layout),
        tiles,
        row_scales,
        group_scales,
        num_rows,
        depth,
        columns,
        out_type=jax.ShapeDtypeStruct((num_rows, columns), options.dtype),
        grid=target.multiprocessors,
        num_warps=4,
        backend_options={"maxnreg": _REGISTERS},
        implementation=implementation,
        BLOCK_ROWS=ROWS,
        BLOCK_COLUMNS=_COLUMNS,
        BLOCK_DEPTH=_BLOCK,
        STAGES=_STAGES,
        REGISTERS=_REGISTERS_OF_PRODUCTS,
    )
    return out
