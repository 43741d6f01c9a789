"""The launch of the kernel for few rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from triax.binding.descriptor import TensorDescriptor
from triax.binding.launch import KernelImplementation
from triax.moe.grouped_matmul.options import Options
from triax.moe.grouped_matmul.tiles import bounded_by_group, cdiv, triton_dtype
from triax.moe.shared.launching import launch
from triax.moe.shared.target import Target
from triax.moe.weight_only.configs import LEAST_SCALED, FewRowsConfig

_PROGRAMS = 2  # that a multiprocessor runs at once


def suit_few_rows(rows: jax.Array, weights: jax.Array, options: Options) -> bool:
    """Whether the kernel is for these, whose depth lies innermost."""
    dtypes = (jnp.float8_e4m3fn, jnp.int8)
    return (
        rows.dtype == jnp.bfloat16
        and weights.dtype in dtypes
        and (options.weight_block[1] or LEAST_SCALED) >= LEAST_SCALED
    )


def few_rows(
    target: Target,
    config: FewRowsConfig,
    rows: jax.Array,
    weights: jax.Array,
    tiles: jax.Array,
    group_scales: jax.Array | None,
    bias: jax.Array | None,
    bias_weights: jax.Array | None,
    *,
    block: tuple[int | None, int | None],
    dtype: Any,
    implementation: KernelImplementation | None,
) -> jax.Array:
    """Each row of bfloat16 times its group's weights [groups, columns, depth]; zeros elsewhere.

    `tiles` are those of `config.block_rows` rows; `block` is of how many columns and of how much of
    the depth a group's scale is, as in `Options`.
    """
    from triax.moe.weight_only.kernels import _few_rows_kernel

    num_rows, depth = rows.shape
    num_groups, columns, _ = weights.shape
    num_tiles = cdiv(num_rows, config.block_rows) + min(num_groups, num_rows)
    num_tiles *= cdiv(columns, config.block_columns)
    # Triton widens int8 as fast, but not into the left operand.
    words = config.permuted or weights.dtype != jnp.int8
    if words:
        rows = _renumbered(rows, config.permuted)
    return launch(
        _few_rows_kernel,
        bounded_by_group(rows, config.block_rows, config.block_depth),
        TensorDescriptor.from_array(weights, (1, config.block_columns, config.block_depth)),
        tiles,
        group_scales,
        bias,
        bias_weights,
        num_rows,
        depth,
        columns,
        out_type=jax.ShapeDtypeStruct((num_rows, columns), dtype),
        grid=min(num_tiles, _PROGRAMS * target.multiprocessors),
        config=config,
        WORDS=words,
        implementation=implementation,
        DTYPE=triton_dtype(dtype),
        SCALE_COLUMNS=block[0],
        SCALE_DEPTH=block[1],
    )


def _renumbered(rows: jax.Array, permuted: bool) -> jax.Array:
    """Rows [rows, depth], their depth in the order of the kernel; zeros fill the last block."""
    num_rows, depth = rows.shape
    if not permuted:
        return rows.reshape(num_rows, -1, 2, 2).swapaxes(2, 3).reshape(num_rows, -1)
    rows = jnp.pad(rows, ((0, 0), (0, -depth % 64))).reshape(num_rows, -1, 4, 4, 2, 2)
    return rows.transpose(0, 1, 3, 5, 2, 4).reshape(num_rows, -1)
