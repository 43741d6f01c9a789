"""Launches ragged_dot and its gradients: result types, grids and configs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from triax.binding.descriptor import TensorDescriptor
from triax.binding.launch import KernelImplementation
from triax.moe.activations.launchers import glu
from triax.moe.products import sm90_8_bits, sm90_16_bits
from triax.moe.products.any_gpu_configs import DotConfig, Itemsizes, OuterConfig
from triax.moe.products.few_rows import few_rows, lacking, warn_of_widening, widen
from triax.moe.products.few_rows_configs import MOST_ROWS
from triax.moe.products.operands import Parts, parts
from triax.moe.products.options import Groups, Options
from triax.moe.products.row_tiles import (
    IMPRECISE,
    bounded_by_group,
    cdiv,
    group_bounds,
    schedule,
    suit_tma,
    triton_dtype,
)
from triax.moe.quantization.scaled import ScaledArray
from triax.moe.shared.arrays import absent, stored
from triax.moe.shared.launching import launch
from triax.moe.shared.target import Target, for_target

# Kernels are imported where they are launched: importing triax.moe needs no Triton.

# The rows that a program reads at once for the gradients of a bias, and about how many it reads in
# all, as measured on an H200.
_SUM_ROWS, _ROWS_OF_PART = 32, 1024


def ragged_dot(
    rows: Any, weights: Any, *others: Any, transposed: bool, options: Options, **how: Any
) -> jax.Array:
    """Multiplies each row by its group's weights, maybe transposed; zeros outside groups."""
    axis = 1 if transposed and not isinstance(weights, ScaledArray) else 2
    out_type = jax.ShapeDtypeStruct((rows.shape[0], weights.shape[axis]), stored(options.dtype))
    how |= {"options": dataclasses.replace(options, dtype=out_type.dtype), "transposed": transposed}
    found = for_target(_ragged_dot, rows, weights, *others, out_type=out_type, **how)
    return found.astype(options.dtype)


def ragged_dot_glu(rows: Any, weights: Any, *others: Any, options: Options, **how: Any) -> Any:
    """Returns gate and up as `ragged_dot` does, and the result of `glu`."""
    columns = weights.shape[1 if how["transposed"] else 2]
    shapes = (rows.shape[0], columns), (rows.shape[0], how["spec"].width(columns))
    how["out_type"] = tuple(jax.ShapeDtypeStruct(shape, options.dtype) for shape in shapes)
    return for_target(_ragged_dot_glu, rows, weights, *others, options=options, **how)


def _ragged_dot_glu(
    target: Target,
    rows: Any,
    weights: Any,
    groups: Groups,
    bias: Any,
    row_weights: Any,
    *,
    spec: Any,
    **how: Any,
) -> tuple[jax.Array, jax.Array]:
    operands = Parts(rows), Parts(weights), groups, bias, None, row_weights
    if (both := sm90_16_bits.ragged_dot(target, *operands, spec=spec, **how)) is not None:
        return both
    gate_up = _ragged_dot(target, rows, weights, groups, bias, **how)
    return gate_up, glu(gate_up, None, row_weights, spec=spec, implementation=how["implementation"])


def group_outer(
    left: jax.Array, right: jax.Array, groups: Groups, *, options: Options, **how: Any
) -> jax.Array:
    """Sums left × right over the rows of each group: [groups, left, right]."""
    shape = groups.sizes.shape[0], left.shape[1], right.shape[1]
    out_type = jax.ShapeDtypeStruct(shape, options.dtype)
    return for_target(_group_outer, left, right, groups, out_type=out_type, options=options, **how)


def group_sum(rows: jax.Array, groups: Groups, weights: jax.Array | None, **how: Any) -> jax.Array:
    """Sums the rows of each group, times their weights: [groups, columns]."""
    return _group_sums(rows, groups, weights, None, **how)[0]


def bias_gradients(
    rows: jax.Array,
    groups: Groups,
    weights: jax.Array,
    bias: jax.Array,
    *,
    dtypes: tuple[Any, Any],
    **how: Any,
) -> tuple[jax.Array, jax.Array]:
    """Returns `group_sum`, and each row's dot product with its bias, from one read of the rows."""
    sums, products, bounds = _group_sums(rows, groups, weights, bias, dtype=dtypes[0], **how)
    row = jnp.arange(how["num_rows"], dtype=jnp.int32)
    inside = (bounds[0, 0] <= row) & (row < bounds[0, -1])
    return sums, jnp.where(inside, jnp.sum(products, 0), 0).astype(dtypes[1])


def _group_sums(
    rows: jax.Array,
    groups: Groups,
    weights: jax.Array | None,
    bias: jax.Array | None,
    *,
    dtype: Any,
    num_rows: int,
    implementation: KernelImplementation | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns sums of rows, their products with the bias per block of columns, and group bounds."""
    from triax.moe.products.any_gpu_gradient_kernels import _group_sum_kernel

    columns, num_groups = rows.shape[1], groups.sizes.shape[0]
    block_columns = 128 if bias is None else 64
    column_blocks = cdiv(columns, block_columns)
    parts = cdiv(num_rows, max(num_groups, 1) * _ROWS_OF_PART)
    kind = stored(dtype) if parts == 1 else jnp.float32
    results = (
        jax.ShapeDtypeStruct((num_groups * parts, columns), kind),
        None if bias is None else jax.ShapeDtypeStruct((column_blocks, num_rows), jnp.float32),
    )
    bounds = group_bounds(groups, num_rows, implementation)
    sums, products = launch(
        _group_sum_kernel,
        rows,
        weights,
        bias,
        bounds,
        num_rows,
        columns,
        parts,
        out_type=results,
        grid=num_groups * parts * column_blocks,
        num_warps=1,
        implementation=implementation,
        BLOCK_ROWS=_SUM_ROWS,
        BLOCK_COLUMNS=block_columns,
        **absent(products_ptr=bias),
    )
    if parts > 1:
        sums = jnp.sum(sums.reshape(num_groups, parts, columns), 1)
    return sums.astype(dtype), products, bounds


def _ragged_dot(
    target: Target,
    rows: Any,
    weights: Any,
    groups: Groups,
    bias: jax.Array | None = None,
    bias_weights: jax.Array | None = None,
    *,
    transposed: bool,
    options: Options,
    implementation: KernelImplementation | None,
) -> jax.Array:
    from triax.moe.products.any_gpu_kernels import _ragged_dot_kernel

    x, w = map(parts, (rows, weights))
    how: dict[str, Any] = {"options": options, "implementation": implementation}
    (num_rows, depth), num_groups = rows.shape, groups.sizes.shape[0]
    rows_per_group = int(num_rows * options.share) // num_groups
    lacks = lacking(target, rows_per_group, x, w, transposed=transposed, options=options)
    if lacks is None:
        return few_rows(target, rows_per_group, x, w, groups, bias, bias_weights, **how)
    is_many = rows_per_group > MOST_ROWS
    if w.packed or (w.deep and is_many and rows.dtype == jnp.bfloat16):
        if not is_many and implementation != "interpret":
            warn_of_widening(weights, lacks)
        w = widen(target, weights, rows.dtype, implementation=implementation)
    columns = w.values.shape[1 if transposed else 2]
    out_type = jax.ShapeDtypeStruct((num_rows, columns), options.dtype)
    tma = target.tensor_maps and suit_tma(x.values, w.values, out_type)
    itemsize = rows.dtype.itemsize
    if itemsize == 2 and is_many:
        w = w._replace(values=w.values.astype(rows.dtype))  # exact
    if tma and transposed and sm90_8_bits.suit(target, x, w, bias, rows_per_group, **how):
        return sm90_8_bits.ragged_dot(target, x, w, groups, **how)
    biases = bias, bias_weights
    found = sm90_16_bits.ragged_dot(target, x, w, groups, *biases, transposed=transposed, **how)
    if found is not None:
        return found
    config = DotConfig.heuristic(
        target,
        rows_per_group,
        columns,
        min(size for size in (depth, x.deep, w.deep) if size),
        Itemsizes(itemsize, w.values.dtype.itemsize, options.dtype.itemsize),
        exact=itemsize == 4 and options.input_precision == "ieee",
        tma=tma,
        float32_sums=itemsize == 1 and not options.fast_sums,
        blocked=bool(x.deep or w.deep),
    )
    row_tiles = cdiv(num_rows, config.block_rows) + min(num_groups, num_rows)
    tiles, _ = schedule(groups, num_rows, config.block_rows, implementation, config.row_tiles)
    num_programs = row_tiles * cdiv(columns, config.block_columns)
    if config.persistent:
        num_programs = min(num_programs, target.multiprocessors)
    output: dict[str, Any] = {}
    operands: tuple[Any, ...] = x.values, w.values
    if tma:
        block = (config.block_columns, config.block_depth)
        operands = (
            TensorDescriptor.from_array(x.values, (config.block_rows, config.block_depth)),
            TensorDescriptor.from_array(w.values, (1, *(block if transposed else block[::-1]))),
        )
        shown = config.block_rows, config.block_columns // 2
        output = {"out": bounded_by_group(out_type, *shown)}
    return launch(
        _ragged_dot_kernel,
        *operands,
        tiles,
        x.scales,
        w.scales,
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
        ROW_BLOCK=x.deep,
        WEIGHT_COLUMNS=w.wide,
        WEIGHT_DEPTH=w.deep,
        **output,
    )


def _group_outer(
    target: Target,
    left: jax.Array,
    right: jax.Array,
    groups: Groups,
    *,
    options: Options,
    implementation: KernelImplementation | None,
) -> jax.Array:
    from triax.moe.products.any_gpu_gradient_kernels import _group_outer_kernel

    num_rows, num_left = left.shape
    num_right = right.shape[1]
    num_groups = groups.sizes.shape[0]
    outer = jax.ShapeDtypeStruct((num_groups, num_left, num_right), options.dtype)
    bounds = group_bounds(groups, num_rows, implementation)
    parts = Parts(left), Parts(right)
    if sm90_16_bits.suit(target, *parts, num_groups, num_right, options, implementation):
        return sm90_16_bits.group_outer(target, left, right, bounds, outer, implementation)
    tma = target.tensor_maps and suit_tma(left, right, outer)
    itemsize = left.dtype.itemsize
    config = OuterConfig.heuristic(
        target,
        num_left,
        num_right,
        Itemsizes(itemsize, right.dtype.itemsize, options.dtype.itemsize),
        exact=itemsize == 4 and options.input_precision == "ieee",
        tma=tma,
    )
    tiles = cdiv(num_left, config.block_left) * cdiv(num_right, config.block_right)
    num_programs = num_groups * tiles
    if config.persistent:
        num_programs = min(num_programs, target.multiprocessors)
    output: dict[str, Any] = {}
    operands: tuple[Any, ...] = (left, right)
    if tma:
        operands = (
            bounded_by_group(left, config.block_rows, config.block_left),
            bounded_by_group(right, config.block_rows, config.block_right),
        )
        shown = 1, config.block_left, config.block_right // 2
        output = {"out": TensorDescriptor.from_array(outer, shown)}
    return launch(
        _group_outer_kernel,
        *operands,
        bounds,
        num_left,
        num_right,
        out_type=outer,
        grid=num_programs,
        config=config,
        implementation=implementation,
        NUM_GROUPS=num_groups,
        DTYPE=triton_dtype(options.dtype),
        PRECISION=options.input_precision,
        TMA=tma,
        **output,
    )
