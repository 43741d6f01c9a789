"""The launch of ragged_dot of 8-bit floats that are added up in float32, on Hopper."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from triax.binding.descriptor import TensorDescriptor
from triax.binding.launch import KernelImplementation
from triax.compat import versions
from triax.moe.grouped_matmul.options import Groups, Options
from triax.moe.grouped_matmul.tiles import ROW_TILES, ROWS, cdiv, schedule
from triax.moe.shared.launching import launch
from triax.moe.shared.target import Target

_COLUMNS, _BLOCK, _STAGES = 256, 128, 3
# As many as all threads get, and those that multiply: what is scaled and added up is in registers.
_REGISTERS, _REGISTERS_OF_PRODUCTS = 152, 216
_HOPPER = 90
_MOST = 2**31

Scales = tuple[jax.Array | None, jax.Array | None]


def suit(
    target: Target,
    rows: jax.Array,
    weights: jax.Array,
    scales: Scales,
    bias: jax.Array | None,
    rows_per_group: int,
    *,
    transposed: bool,
    options: Options,
    implementation: KernelImplementation | None,
) -> bool:
    """Whether the kernel multiplies these, which descriptors can address.

    They are added up in float32, and their scales are DeepSeek-V3's blocks, or those of rows and
    columns. Gluon is not interpreted.
    """
    groups, columns, depth = weights.shape
    deep = cdiv(depth, _BLOCK)
    kind = options.row_block, *options.weight_block
    summed = options.blocked or not options.fast_sums
    return (
        target.compute_capability == _HOPPER
        and implementation != "interpret"
        and versions.GLUON.passes(versions.installed(versions.GLUON.package) or "0")
        and transposed
        and rows.dtype.itemsize == weights.dtype.itemsize == 1
        and jnp.issubdtype(rows.dtype, jnp.floating)
        and kind in ((_BLOCK, _BLOCK, _BLOCK), (None, 1, None))
        and summed
        and not any(of is None for of in scales)
        and bias is None
        and rows_per_group > ROWS // 2
        and max(rows.shape[0] * deep, groups * max(columns, cdiv(columns, _BLOCK) * deep)) < _MOST
    )


def ragged_dot(
    target: Target,
    rows: jax.Array,
    weights: jax.Array,
    groups: Groups,
    scales: Scales,
    *,
    options: Options,
    implementation: KernelImplementation | None,
) -> jax.Array:
    """Each row times the transposed weights of its group; zeros elsewhere."""
    from triton.experimental.gluon import language as gl

    from triax.moe.grouped_matmul.float32_sums_kernels import _ragged_dot_float32_sums_kernel

    (num_rows, depth), (num_groups, columns, _) = rows.shape, weights.shape
    layout = gl.NVMMASharedLayout(swizzle_byte_width=_BLOCK, element_bitwidth=8, rank=2)
    all_columns = weights.reshape(num_groups * columns, depth)
    tiles, _ = schedule(groups, num_rows, ROWS, implementation, ROW_TILES)
    out: Any = launch(
        _ragged_dot_float32_sums_kernel,
        TensorDescriptor.from_array(rows, (ROWS, _BLOCK), layout),
        TensorDescriptor.from_array(all_columns, (_COLUMNS, _BLOCK), layout),
        tiles,
        *scales,
        num_rows,
        depth,
        columns,
        out_type=jax.ShapeDtypeStruct((num_rows, columns), options.dtype),
        grid=target.multiprocessors,
        num_warps=4,
        backend_options={"maxnreg": _REGISTERS},
        implementation=implementation,
        BLOCKED=options.blocked,
        BLOCK_ROWS=ROWS,
        BLOCK_COLUMNS=_COLUMNS,
        BLOCK_DEPTH=_BLOCK,
        STAGES=_STAGES,
        REGISTERS=_REGISTERS_OF_PRODUCTS,
    )
    return out
