"""The launch of the kernel for few rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from triax.binding.descriptor import TensorDescriptor
from triax.binding.launch import KernelImplementation
from triax.moe.grouped_matmul.options import Options
from triax.moe.grouped_matmul.tiles import bounded_by_group, cdiv, triton_dtype
from triax.moe.quantization.packing import E8M0
from triax.moe.shared.launching import launch
from triax.moe.shared.target import Target
from triax.moe.weight_only.configs import LEAST_SCALED, FewRowsConfig

_POWER_DEPTH = 32  # as in the kernels


def suit_few_rows(
    rows: jax.Array,
    weights: jax.Array,
    row_scales: jax.Array | None,
    scales: Any,
    options: Options,
) -> bool:
    """Whether the kernel is for these, whose depth lies innermost."""
    if rows.dtype != jnp.bfloat16 or row_scales is not None:
        return False
    deep = options.weight_block[1]
    if options.packed is None:
        return weights.dtype in (jnp.float8_e4m3fn, jnp.int8) and (
            deep is None or deep >= LEAST_SCALED
        )
    if scales.zeros is not None and scales.zeros.dtype != jnp.int8:  # bfloat16 may not hold them
        return False
    least = _POWER_DEPTH if scales.scales.dtype == E8M0 else LEAST_SCALED
    return deep is None or deep >= rows.shape[1] or deep % least == 0


def few_rows(
    target: Target,
    config: FewRowsConfig,
    rows: jax.Array,
    weights: jax.Array,
    tiles: jax.Array,
    group_scales: Any,
    bias: jax.Array | None,
    bias_weights: jax.Array | None,
    *,
    options: Options,
    implementation: KernelImplementation | None,
) -> jax.Array:
    """Each row of bfloat16 times its group's weights [groups, columns, depth]; zeros elsewhere.

    `tiles` are those of `config.block_rows` rows. Packed weights have `PackedScales`.
    """
    from triax.moe.weight_only.kernels import _few_rows_kernel

    num_rows, depth = rows.shape
    num_groups, columns, stored_depth = weights.shape
    wide, deep = options.weight_block
    zeros, powers = None, False
    if options.packed is not None:
        group_scales, zeros = group_scales
        powers = group_scales.dtype == E8M0
        if powers:
            group_scales = jax.lax.bitcast_convert_type(group_scales, jnp.uint8)
        if deep is not None and deep >= depth:
            deep = None
    num_tiles = cdiv(num_rows, config.block_rows) + min(num_groups, num_rows)
    num_tiles *= cdiv(columns, config.block_columns)
    block_depth = config.block_depth * stored_depth // depth
    # Triton widens int8 as fast, but not into the left operand.
    words = config.permuted or weights.dtype != jnp.int8
    if options.packed is not None:
        rows = _renumbered_packed(rows, config.block_depth)
    elif words:
        rows = _renumbered(rows, config.permuted)
    return launch(
        _few_rows_kernel,
        bounded_by_group(rows, config.block_rows, config.block_depth),
        TensorDescriptor.from_array(weights, (1, config.block_columns, block_depth)),
        tiles,
        group_scales,
        zeros,
        bias,
        bias_weights,
        num_rows,
        depth,
        columns,
        out_type=jax.ShapeDtypeStruct((num_rows, columns), options.dtype),
        grid=min(num_tiles, config.programs * target.multiprocessors),
        config=config,
        WORDS=words,
        PACKED=options.packed,
        POWERS=powers,
        WARPS=config.num_warps,
        implementation=implementation,
        DTYPE=triton_dtype(options.dtype),
        SCALE_COLUMNS=wide,
        SCALE_DEPTH=deep,
    )


def _renumbered(rows: jax.Array, permuted: bool) -> jax.Array:
    """Rows [rows, depth], their depth in the order of the kernel; zeros fill the last block."""
    num_rows, depth = rows.shape
    if not permuted:
        return rows.reshape(num_rows, -1, 2, 2).swapaxes(2, 3).reshape(num_rows, -1)
    rows = jnp.pad(rows, ((0, 0), (0, -depth % 64))).reshape(num_rows, -1, 4, 4, 2, 2)
    return rows.transpose(0, 1, 3, 5, 2, 4).reshape(num_rows, -1)


def _renumbered_packed(rows: jax.Array, block_depth: int) -> jax.Array:
    """The same for packed weights, of which a thread loads 32 or 16 at once."""
    num_rows, depth = rows.shape
    rows = jnp.pad(rows, ((0, 0), (0, -depth % block_depth)))
    rows = rows.reshape(num_rows, -1, 4, min(block_depth // 32, 4), 2, 4)
    return rows.transpose(0, 1, 3, 5, 2, 4).reshape(num_rows, -1)
