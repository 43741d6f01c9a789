"""Launches the gradients of ragged_dot's weights and bias in Triton's own language, for any GPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from triax.binding.descriptor import TensorDescriptor
from triax.binding.launch import KernelImplementation
from triax.moe.products.any_gpu_configs import TILE, Itemsizes, OuterConfig
from triax.moe.products.options import Groups, Options
from triax.moe.products.product import GroupOuter
from triax.moe.products.row_tiles import (
    IMPRECISE,
    bounded_by_group,
    cdiv,
    group_bounds,
    suit_tma,
    triton_dtype,
)
from triax.moe.quantization.launchers import rounds_to
from triax.moe.shared.arrays import absent, stored
from triax.moe.shared.launching import launch
from triax.moe.shared.target import Target

# The rows that a program reads at once for the gradients of a bias, and about how many it reads in
# all, as measured on an H200.
_SUM_ROWS, _ROWS_OF_PART = 32, 1024
_COLUMNS = 64  # that a program rounds


def needs(product: GroupOuter) -> str | None:
    """Returns what the kernels need of the GPU and is not there; None if they take the product."""
    dtypes = product.rounded_to or ()
    if all(rounds_to(dtype, product.target, product.implementation) for dtype in dtypes):
        return None
    return "a GPU that rounds to 8-bit floats"


def group_outer(product: GroupOuter) -> jax.Array:
    """Sums left × right over the rows of each group."""
    implementation = product.implementation
    bounds = group_bounds(product.groups, product.num_rows, implementation)
    operands = product.left, product.right
    sides: Any = [(side.values, None) for side in operands]
    if product.rounded_to is not None:
        sides = [
            quantize_groups(side.values, bounds, source, dtype=dtype, implementation=implementation)
            for side, source, dtype in zip(
                operands, product.sources, product.rounded_to, strict=True
            )
        ]
    keywords: dict[str, Any] = {"options": product.options, "implementation": implementation}
    return multiply(product.target, sides[0], sides[1], bounds, **keywords)


def quantize_groups(
    rows: jax.Array,
    bounds: jax.Array,
    source: jax.Array | None = None,
    *,
    dtype: np.dtype,
    implementation: KernelImplementation | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns rows as 8-bit columns, [columns, padded], and their scales, [groups, columns].

    Each group begins at a multiple of `TILE`, and is padded with zeros to the next one. `source`
    names the row of `rows` for each of the groups' rows; indices out of range give zeros.
    """
    from triax.moe.products.any_gpu_gradient_kernels import _quantize_groups_kernel

    columns = rows.shape[1]
    count, num_groups = len(rows if source is None else source), bounds.shape[1] - 1
    padded = (count + (TILE - 1) * min(num_groups, count)) // TILE * TILE
    return launch(
        _quantize_groups_kernel,
        rows,
        source,
        bounds,
        rows.shape[0],
        columns,
        padded,
        out_type=(
            jax.ShapeDtypeStruct((columns, padded), dtype),
            jax.ShapeDtypeStruct((num_groups, columns), jnp.float32),
        ),
        grid=num_groups * cdiv(columns, _COLUMNS),
        num_warps=4,
        implementation=implementation,
        BLOCK_ROWS=TILE,
        BLOCK_COLUMNS=_COLUMNS,
        # A multiplication must not be fused with the rounding after it.
        backend_options={"enable_fp_fusion": False},
        NUM_GROUPS=num_groups,
        TILE=TILE,
    )


def multiply(
    target: Target,
    left: tuple[jax.Array, jax.Array | None],
    right: tuple[jax.Array, jax.Array | None],
    bounds: jax.Array,
    *,
    options: Options,
    implementation: KernelImplementation | None,
) -> jax.Array:
    """Sums left × right over the rows of each group.

    Both are rows [rows, columns] and None, or 8-bit columns and scales as of `quantize_groups`.
    """
    from triax.moe.products.any_gpu_gradient_kernels import _group_outer_kernel

    (x, left_scales), (y, right_scales) = left, right
    are_rounded = left_scales is not None
    num_left, num_right = (side.shape[0 if are_rounded else 1] for side in (x, y))
    num_groups, itemsize = bounds.shape[1] - 1, x.dtype.itemsize
    out_type = jax.ShapeDtypeStruct((num_groups, num_left, num_right), options.dtype)
    out_tma = target.tensor_maps and suit_tma(out_type)
    tma = target.tensor_maps and suit_tma(x, y) and (are_rounded or out_tma)
    config = OuterConfig.heuristic(
        target,
        num_left,
        num_right,
        Itemsizes(itemsize, y.dtype.itemsize, options.dtype.itemsize),
        exact=itemsize == 4 and options.input_precision == "ieee",
        tma=tma,
        float32_sums=not options.fast_sums,
    )
    tiles = cdiv(num_left, config.block_left) * cdiv(num_right, config.block_right)
    num_programs = num_groups * tiles
    if config.persistent:
        num_programs = min(num_programs, target.multiprocessors)
    operands: tuple[Any, ...] = (x, y)
    output: dict[str, Any] = {}
    if tma:
        widths = config.block_left, config.block_right
        operands = tuple(
            TensorDescriptor.from_array(side, (width, config.block_rows))
            if are_rounded
            else bounded_by_group(side, config.block_rows, width)
            for side, width in zip((x, y), widths, strict=True)
        )
    if tma and out_tma:
        shown = 1, config.block_left, config.block_right // 2
        output = {"out": TensorDescriptor.from_array(out_type, shown)}
    return launch(
        _group_outer_kernel,
        *operands,
        bounds,
        left_scales,
        right_scales,
        num_left,
        num_right,
        x.shape[1] if are_rounded else None,
        out_type=out_type,
        grid=num_programs,
        name="quantized_outer" if are_rounded else "group_outer",
        config=config,
        implementation=implementation,
        NUM_GROUPS=num_groups,
        TILE=TILE if are_rounded else config.block_rows,
        DTYPE=triton_dtype(options.dtype),
        PRECISION=options.input_precision,
        IMPRECISE=min(IMPRECISE, config.block_rows)
        if are_rounded and not options.fast_sums
        else None,
        TMA=tma,
        OUT_TMA=bool(output),
        **output,
    )


def group_sum(
    rows: jax.Array, groups: Groups, weights: jax.Array | None, **keywords: Any
) -> jax.Array:
    """Sums the rows of each group, times their weights: [groups, columns]."""
    return _group_sums(rows, groups, weights, None, **keywords)[0]


def bias_gradients(
    rows: jax.Array,
    groups: Groups,
    weights: jax.Array,
    bias: jax.Array,
    *,
    dtypes: tuple[Any, Any],
    **keywords: Any,
) -> tuple[jax.Array, jax.Array]:
    """Returns `group_sum`, and each row's dot product with its bias, from one read of the rows."""
    sums, products, bounds = _group_sums(rows, groups, weights, bias, dtype=dtypes[0], **keywords)
    row = jnp.arange(keywords["num_rows"], dtype=jnp.int32)
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
    sums_dtype = stored(dtype) if parts == 1 else jnp.float32
    results = (
        jax.ShapeDtypeStruct((num_groups * parts, columns), sums_dtype),
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
