"""Launches the kernel for few rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from triax.binding.descriptor import TensorDescriptor
from triax.binding.launch import KernelImplementation
from triax.moe.grouped_matmul.options import Groups, Options
from triax.moe.grouped_matmul.scaled import Parts
from triax.moe.grouped_matmul.tiles import (
    bounded_by_group,
    cdiv,
    schedule,
    suit_tma,
    triton_dtype,
)
from triax.moe.quantization.packing import E8M0
from triax.moe.shared.launching import launch
from triax.moe.shared.target import Target
from triax.moe.weight_only.configs import LEAST_SCALED, MOST_ROWS, FewRowsConfig

_POWER_DEPTH = 32  # as in the kernels


def suit_few_rows(
    target: Target, rows_per_group: int, x: Parts, w: Parts, options: Options
) -> bool:
    """Whether the kernel supports rows `x` and weights `w`, whose depth is innermost."""
    out = jax.ShapeDtypeStruct((len(x.values), w.values.shape[1]), options.dtype)
    addressed = (x.values, w.values) if w.packed else (x.values, w.values, out)
    if (
        x.values.dtype != jnp.bfloat16
        or w.values.dtype.itemsize > 1
        or rows_per_group > MOST_ROWS
        or not (target.tensor_maps and suit_tma(*addressed))
    ):
        return False
    if not w.packed:
        is_widened = w.values.dtype in (jnp.float8_e4m3fn, jnp.int8)
        return is_widened and (w.deep is None or w.deep >= LEAST_SCALED)
    if w.zeros is not None and w.zeros.dtype != jnp.int8:  # other zeros may not fit bfloat16
        return False
    return w.deep is None or w.deep % (_POWER_DEPTH if _powers(w) else LEAST_SCALED) == 0


def _powers(w: Parts) -> bool:
    """Whether scales are powers of two, which multiply packed numbers during unpacking."""
    return w.packed is not None and w.scales is not None and w.scales.dtype == E8M0


def few_rows(
    target: Target,
    rows_per_group: int,
    x: Parts,
    w: Parts,
    groups: Groups,
    bias: jax.Array | None,
    bias_weights: jax.Array | None,
    *,
    options: Options,
    implementation: KernelImplementation | None,
) -> jax.Array:
    """Multiplies bfloat16 rows by weights [groups, columns, depth]; zeros outside groups."""
    from triax.moe.weight_only.kernels import _few_rows_kernel

    rows, weights, powers = x.values, w.values, _powers(w)
    scales: Any = w.scales
    num_rows, depth = rows.shape
    num_groups, columns, stored_depth = weights.shape
    choose = FewRowsConfig.for_packed if w.packed else FewRowsConfig.for_rows
    scaled = None if powers else w.deep
    config = choose(target.architecture, rows_per_group, columns, depth, scaled)
    tiles, _ = schedule(groups, num_rows, config.block_rows, implementation)
    if powers:
        scales = jax.lax.bitcast_convert_type(scales, jnp.uint8)
    num_tiles = cdiv(num_rows, config.block_rows) + min(num_groups, num_rows)
    num_tiles *= cdiv(columns, config.block_columns)
    block_depth = config.block_depth * stored_depth // depth
    # Triton widens int8 equally fast, but not into the left operand.
    words = config.permuted or weights.dtype != jnp.int8
    if w.packed:
        rows = _renumbered_packed(rows, config.block_depth)
    elif words:
        rows = _renumbered(rows, config.permuted)
    return launch(
        _few_rows_kernel,
        bounded_by_group(rows, config.block_rows, config.block_depth),
        TensorDescriptor.from_array(weights, (1, config.block_columns, block_depth)),
        tiles,
        scales,
        w.zeros,
        bias,
        bias_weights,
        num_rows,
        depth,
        columns,
        out_type=jax.ShapeDtypeStruct((num_rows, columns), options.dtype),
        grid=min(num_tiles, config.programs * target.multiprocessors),
        config=config,
        WORDS=words,
        PACKED=w.packed,
        POWERS=powers,
        WARPS=config.num_warps,
        implementation=implementation,
        DTYPE=triton_dtype(options.dtype),
        SCALE_COLUMNS=w.wide,
        SCALE_DEPTH=w.deep,
    )


def _renumbered(rows: jax.Array, permuted: bool) -> jax.Array:
    """Reorders the depth of rows as the kernel does; zeros fill the last block."""
    num_rows, depth = rows.shape
    if not permuted:
        return rows.reshape(num_rows, -1, 2, 2).swapaxes(2, 3).reshape(num_rows, -1)
    rows = jnp.pad(rows, ((0, 0), (0, -depth % 64))).reshape(num_rows, -1, 4, 4, 2, 2)
    return rows.transpose(0, 1, 3, 5, 2, 4).reshape(num_rows, -1)


def _renumbered_packed(rows: jax.Array, block_depth: int) -> jax.Array:
    """Reorders the depth of rows for packed weights; a thread loads 32 or 16 weights at once."""
    num_rows, depth = rows.shape
    rows = jnp.pad(rows, ((0, 0), (0, -depth % block_depth)))
    rows = rows.reshape(num_rows, -1, 4, min(block_depth // 32, 4), 2, 4)
    return rows.transpose(0, 1, 3, 5, 2, 4).reshape(num_rows, -1)
