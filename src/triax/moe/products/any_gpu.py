"""Launches ragged_dot in Triton's own language, for any GPU and any dtypes."""

from __future__ import annotations

from typing import Any

import jax

from triax.binding.descriptor import TensorDescriptor
from triax.moe.products.any_gpu_configs import DotConfig, Itemsizes
from triax.moe.products.product import RaggedDot
from triax.moe.products.row_tiles import (
    IMPRECISE,
    bounded_by_group,
    cdiv,
    schedule,
    triton_dtype,
)
from triax.moe.shared.launching import launch

# Kernels are imported where they are launched: importing triax.moe needs no Triton.


def ragged_dot(product: RaggedDot) -> jax.Array:
    """Multiplies each row by its group's weights, maybe transposed; zeros outside groups."""
    from triax.moe.products.any_gpu_kernels import _ragged_dot_kernel

    x, w, options, target = product.left, product.right, product.options, product.target
    num_rows, num_groups = product.num_rows, product.num_groups
    itemsize, tma, transposed = x.values.dtype.itemsize, product.suits_tma, product.transposed
    config = DotConfig.heuristic(
        target,
        product.rows_per_group,
        product.columns,
        min(size for size in (product.depth, x.deep, w.deep) if size),
        Itemsizes(itemsize, w.values.dtype.itemsize, options.dtype.itemsize),
        exact=product.is_exact,
        tma=tma,
        float32_sums=itemsize == 1 and not options.fast_sums,
        blocked=bool(x.deep or w.deep),
        one_order=options.one_order,
    )
    row_tiles = cdiv(num_rows, config.block_rows) + min(num_groups, num_rows)
    tiles, _ = schedule(
        product.groups, num_rows, config.block_rows, product.implementation, config.row_tiles
    )
    num_programs = row_tiles * cdiv(product.columns, config.block_columns)
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
        output = {"out": bounded_by_group(product.out_type, *shown)}
    return launch(
        _ragged_dot_kernel,
        *operands,
        tiles,
        x.scales,
        w.scales,
        product.bias,
        product.bias_weights,
        num_rows,
        product.depth,
        product.columns,
        out_type=product.out_type,
        grid=num_programs,
        name="ragged_dot_transposed" if transposed else "ragged_dot",
        config=config,
        implementation=product.implementation,
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
