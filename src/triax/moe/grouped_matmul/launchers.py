"""The launches of ragged_dot: result types, grids and configs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from triax.binding import dtypes
from triax.binding.descriptor import TensorDescriptor
from triax.binding.launch import KernelImplementation
from triax.moe.grouped_matmul.configs import DotConfig, OuterConfig, is_hopper
from triax.moe.grouped_matmul.options import Groups, Options, Side
from triax.moe.shared.arrays import stored
from triax.moe.shared.launching import launch
from triax.moe.shared.target import Target, for_target

# Kernels are imported where they are launched: importing triax.moe needs no Triton.

# The bound and the index of the kernels' `_GROUP_END`, and a dimension that is never the limit.
_GROUP_END = 1 << 30
_UNBOUNDED = 2**31 - 1
_ADDRESSES = 1 << 64
# Tensor cores add products of 8-bit floats with fewer bits than float32; after this many products
# the sum is added to a float32 one.
IMPRECISE = 128
# The block that one program adds up at a time, as measured on an H200.
_SUM_ROWS, _SUM_COLUMNS = 128, 128


def ragged_dot(
    rows: jax.Array,
    weights: jax.Array,
    groups: Groups,
    row_scales: jax.Array | None = None,
    group_scales: jax.Array | None = None,
    bias: jax.Array | None = None,
    bias_weights: jax.Array | None = None,
    *,
    transposed: bool,
    options: Options,
    implementation: KernelImplementation | None,
) -> jax.Array:
    """Each row times the weights of its group, or times them transposed; zeros elsewhere."""
    columns = weights.shape[1 if transposed else 2]
    out_dtype = stored(options.dtype)
    return for_target(
        _ragged_dot,
        rows,
        weights,
        groups,
        row_scales,
        group_scales,
        bias,
        bias_weights,
        out_type=jax.ShapeDtypeStruct((rows.shape[0], columns), out_dtype),
        transposed=transposed,
        options=dataclasses.replace(options, dtype=out_dtype),
        implementation=implementation,
    ).astype(options.dtype)


def group_outer(
    left: jax.Array,
    right: jax.Array,
    groups: Groups,
    weights: jax.Array | None = None,
    *,
    options: Options,
    implementation: KernelImplementation | None,
    summed: Side | None = None,
    sum_dtype: Any = None,
) -> Any:
    """For each group the sum over its rows of left × right: [groups, left, right].

    With `summed` also `group_sum` of that side, with the rows' weights.
    """
    num_groups = groups.sizes.shape[0]
    shape = (num_groups, left.shape[1], right.shape[1])
    out_type: Any = jax.ShapeDtypeStruct(shape, options.dtype)
    if summed is not None:
        columns = (left if summed == "left" else right).shape[1]
        out_type = out_type, jax.ShapeDtypeStruct((num_groups, columns), sum_dtype)
    return for_target(
        _group_outer,
        left,
        right,
        weights,
        groups,
        out_type=out_type,
        options=options,
        summed=summed,
        sum_dtype=sum_dtype,
        implementation=implementation,
    )


def group_sum(
    rows: jax.Array,
    groups: Groups,
    weights: jax.Array | None,
    *,
    dtype: Any,
    num_rows: int,
    implementation: KernelImplementation | None,
) -> jax.Array:
    """For each group the sum of its rows, times their weights: [groups, columns]."""
    from triax.moe.grouped_matmul.kernels import _group_sum_kernel

    columns, num_groups = rows.shape[1], groups.sizes.shape[0]
    _, bounds = schedule(groups, num_rows, _SUM_ROWS, implementation)
    return launch(
        _group_sum_kernel,
        rows,
        weights,
        bounds,
        columns,
        out_type=jax.ShapeDtypeStruct((num_groups, columns), dtype),
        grid=num_groups * _cdiv(columns, _SUM_COLUMNS),
        num_warps=4,
        implementation=implementation,
        BLOCK_ROWS=_SUM_ROWS,
        BLOCK_COLUMNS=_SUM_COLUMNS,
    )


def _ragged_dot(
    target: Target,
    rows: jax.Array,
    weights: jax.Array,
    groups: Groups,
    row_scales: jax.Array | None,
    group_scales: jax.Array | None,
    bias: jax.Array | None,
    bias_weights: jax.Array | None,
    *,
    transposed: bool,
    options: Options,
    implementation: KernelImplementation | None,
) -> jax.Array:
    from triax.moe.grouped_matmul.kernels import _ragged_dot_kernel

    num_rows, depth = rows.shape
    num_groups = groups.sizes.shape[0]
    columns = weights.shape[1 if transposed else 2]
    out_type = jax.ShapeDtypeStruct((num_rows, columns), options.dtype)
    tma = target.tensor_maps and suit_tma(rows, weights, out_type)
    itemsize = rows.dtype.itemsize
    config = DotConfig.heuristic(
        int(num_rows * options.share) // num_groups,
        columns,
        min(size for size in (depth, options.row_block, options.weight_block[1]) if size),
        itemsize,
        exact=itemsize == 4 and options.input_precision == "ieee",
        hopper=is_hopper(target.compute_capability),
        tma=tma,
        float32_sums=itemsize == 1 and not options.fast_sums,
        blocked=options.blocked,
    )
    row_tiles = _cdiv(num_rows, config.block_rows) + min(num_groups, num_rows)
    tiles, _ = schedule(groups, num_rows, config.block_rows, implementation)
    num_programs = row_tiles * _cdiv(columns, config.block_columns)
    if config.persistent:
        num_programs = min(num_programs, target.multiprocessors)
    output: dict[str, Any] = {}
    operands: tuple[Any, ...] = (rows, weights)
    if tma:
        block = (config.block_columns, config.block_depth)
        operands = (
            TensorDescriptor.from_array(rows, (config.block_rows, config.block_depth)),
            TensorDescriptor.from_array(weights, (1, *(block if transposed else block[::-1]))),
        )
        empty = jax.lax.empty(out_type.shape, out_type.dtype)
        output = {
            "out": _bounded_by_group(empty, config.block_rows, config.block_columns // 2),
            "input_output_aliases": {"out": 0},
        }
    return launch(
        _ragged_dot_kernel,
        *operands,
        tiles,
        row_scales,
        group_scales,
        bias,
        bias_weights,
        num_rows,
        depth,
        columns,
        out_type=out_type,
        grid=num_programs,
        name="ragged_dot_transposed" if transposed else "ragged_dot",
        config=config,
        implementation=implementation,
        TRANSPOSED=transposed,
        DTYPE=triton_dtype(options.dtype),
        PRECISION=options.input_precision,
        TMA=tma,
        IMPRECISE=None if itemsize > 1 or options.fast_sums else min(IMPRECISE, config.block_depth),
        ROW_BLOCK=options.row_block,
        WEIGHT_COLUMNS=options.weight_block[0],
        WEIGHT_DEPTH=options.weight_block[1],
        **output,
    )


def _group_outer(
    target: Target,
    left: jax.Array,
    right: jax.Array,
    weights: jax.Array | None,
    groups: Groups,
    *,
    options: Options,
    summed: Side | None,
    sum_dtype: Any,
    implementation: KernelImplementation | None,
) -> Any:
    from triax.moe.grouped_matmul.kernels import _group_outer_kernel

    num_rows, num_left = left.shape
    num_right = right.shape[1]
    num_groups = groups.sizes.shape[0]
    outer = jax.ShapeDtypeStruct((num_groups, num_left, num_right), options.dtype)
    tma = target.tensor_maps and suit_tma(left, right, outer)
    itemsize = left.dtype.itemsize
    config = OuterConfig.heuristic(
        num_left,
        num_right,
        itemsize,
        exact=itemsize == 4 and options.input_precision == "ieee",
        hopper=is_hopper(target.compute_capability),
        tma=tma,
    )
    _, bounds = schedule(groups, num_rows, config.block_rows, implementation)
    absent: dict[str, Any] = {"sums_ptr": None}
    out_type: Any = outer
    if summed is not None:
        columns = num_left if summed == "left" else num_right
        out_type = outer, jax.ShapeDtypeStruct((num_groups, columns), sum_dtype)
        absent = {}
    output: dict[str, Any] = {}
    operands: tuple[Any, ...] = (left, right)
    if tma:
        operands = (
            _bounded_by_group(left, config.block_rows, config.block_left),
            _bounded_by_group(right, config.block_rows, config.block_right),
        )
        empty = jax.lax.empty(outer.shape, outer.dtype)
        block = (1, config.block_left, config.block_right)
        output = {
            "out": TensorDescriptor.from_array(empty, block),
            "input_output_aliases": {"out": 0},
        }
    return launch(
        _group_outer_kernel,
        *operands,
        weights,
        bounds,
        num_left,
        num_right,
        out_type=out_type,
        grid=num_groups * _cdiv(num_left, config.block_left) * _cdiv(num_right, config.block_right),
        config=config,
        implementation=implementation,
        DTYPE=triton_dtype(options.dtype),
        PRECISION=options.input_precision,
        TMA=tma,
        SUM=summed,
        **output,
        **absent,
    )


def schedule(
    groups: Groups,
    num_rows: int,
    block_rows: int,
    implementation: KernelImplementation | None,
) -> tuple[jax.Array, jax.Array]:
    """Row tiles, four numbers each after the first four, and the bounds of groups [2, groups + 1].

    The first four begin with how many tiles there are, where the groups end and where they begin; a
    tile's are its group, its first row and its group's end. Bounds are in rows and in tiles.
    """
    from triax.moe.grouped_matmul.kernels import _ragged_dot_schedule_kernel

    num_groups = groups.sizes.shape[0]
    num_tiles = _cdiv(num_rows, block_rows) + min(num_groups, num_rows)
    return launch(
        _ragged_dot_schedule_kernel,
        groups.sizes,
        groups.first_row,
        num_rows,
        out_type=(
            jax.ShapeDtypeStruct((4 * (1 + num_tiles),), jnp.int32),
            jax.ShapeDtypeStruct((2, num_groups + 1), jnp.int32),
        ),
        grid=num_groups,
        num_warps=4,
        implementation=implementation,
        NUM_GROUPS=num_groups,
        BLOCK_ROWS=block_rows,
        BLOCK_GROUPS=256,
        BLOCK_TILES=128,
    )


def _bounded_by_group(array: jax.Array, block_rows: int, block_columns: int) -> TensorDescriptor:
    """Rows and columns shown so that the hardware stops at the end of a group (see the kernels)."""
    columns = array.shape[1]
    wrap = _ADDRESSES // _GROUP_END - columns
    return TensorDescriptor(
        array,
        shape=(_UNBOUNDED, _UNBOUNDED, _GROUP_END, columns),
        strides=(wrap, columns, columns, 1),
        block_shape=(1, 1, block_rows, block_columns),
    )


def suit_tma(*arrays: Any) -> bool:
    """Whether descriptors can address these: rows begin at multiples of 16 bytes."""
    return all(a.shape[-1] * a.dtype.itemsize % 16 == 0 for a in arrays) and all(
        a.shape[0] <= _GROUP_END for a in arrays
    )


def triton_dtype(dtype: Any) -> Any:
    import triton.language as tl

    return tl.dtype(dtypes.triton_name(dtype))


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
