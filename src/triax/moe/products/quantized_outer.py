"""Launches quantized_outer: result types, grids and configs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from triax.binding.descriptor import TensorDescriptor
from triax.binding.launch import KernelImplementation
from triax.moe.products.options import Groups, Options
from triax.moe.products.quantized_outer_configs import TILE, GroupsConfig, outer_config
from triax.moe.products.quantized_outer_reference import num_rows, quantized_outer_reference
from triax.moe.products.row_tiles import IMPRECISE, group_bounds, suit_tma, triton_dtype
from triax.moe.quantization.launchers import rounds_to
from triax.moe.quantization.reference import FORMATS
from triax.moe.shared.launching import launch
from triax.moe.shared.target import Target, for_target

# Kernels are imported where they are launched: importing triax.moe needs no Triton.


def quantized_outer(
    left: jax.Array,
    right: jax.Array,
    left_source: jax.Array | None,
    right_source: jax.Array | None,
    groups: Groups,
    *,
    options: Options,
    **how: Any,
) -> jax.Array:
    """Sums left × right over the rows of each group, both in 8 bits."""
    shape = groups.sizes.shape[0], left.shape[1], right.shape[1]
    how |= {"out_type": jax.ShapeDtypeStruct(shape, options.dtype), "options": options}
    return for_target(_quantized_outer, left, right, left_source, right_source, groups, **how)


def _quantized_outer(
    target: Target,
    left: jax.Array,
    right: jax.Array,
    left_source: jax.Array | None,
    right_source: jax.Array | None,
    groups: Groups,
    *,
    options: Options,
    dtypes: tuple[np.dtype, np.dtype],
    implementation: KernelImplementation | None,
) -> jax.Array:
    if not all(rounds_to(dtype, target, implementation) for dtype in dtypes):
        operands = left, right, left_source, right_source, groups
        return quantized_outer_reference(*operands, options=options, dtypes=dtypes)
    bounds = group_bounds(groups, num_rows(left, left_source), implementation)
    x, y = (
        quantize_groups(side, bounds, source, dtype=dtype, implementation=implementation)
        for side, source, dtype in zip(
            (left, right), (left_source, right_source), dtypes, strict=True
        )
    )
    return multiply(target, x, y, bounds, options=options, implementation=implementation)


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
    from triax.moe.products.quantized_outer_kernels import _quantize_groups_kernel

    columns = rows.shape[1]
    count, num_groups = num_rows(rows, source), bounds.shape[1] - 1
    padded = (count + (TILE - 1) * min(num_groups, count)) // TILE * TILE
    kind, config = FORMATS[dtype], GroupsConfig()
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
        grid=num_groups * -(-columns // config.block_columns),
        config=config,
        implementation=implementation,
        # A multiplication must not be fused with the rounding after it.
        backend_options={"enable_fp_fusion": False},
        NUM_GROUPS=num_groups,
        TILE=TILE,
        LARGEST=kind.largest,
        NAN=kind.nan,
        INFINITY=kind.infinity,
    )


def multiply(
    target: Target,
    left: tuple[jax.Array, jax.Array],
    right: tuple[jax.Array, jax.Array],
    bounds: jax.Array,
    *,
    options: Options,
    implementation: KernelImplementation | None,
) -> jax.Array:
    """Sums left × right over the rows of each group, both as `quantize_groups` returns them."""
    from triax.moe.products.quantized_outer_kernels import _quantized_outer_kernel

    (x, left_scales), (y, right_scales) = left, right
    num_left, num_right, num_groups = len(x), len(y), bounds.shape[1] - 1
    out_type = jax.ShapeDtypeStruct((num_groups, num_left, num_right), options.dtype)
    tma = target.tensor_maps
    out_tma = tma and suit_tma(out_type)
    config = outer_config(
        target,
        num_left,
        num_right,
        options.dtype.itemsize,
        tma=tma,
        float32_sums=not options.fast_sums,
    )
    tiles = -(-num_left // config.block_left) * -(-num_right // config.block_right)
    num_programs = num_groups * tiles
    if config.persistent:
        num_programs = min(num_programs, target.multiprocessors)
    operands: tuple[Any, ...] = (x, y)
    output: dict[str, Any] = {}
    if tma:
        operands = (
            TensorDescriptor.from_array(x, (config.block_left, config.block_rows)),
            TensorDescriptor.from_array(y, (config.block_right, config.block_rows)),
        )
    if out_tma:
        shown = 1, config.block_left, config.block_right // 2
        output = {"out": TensorDescriptor.from_array(out_type, shown)}
    return launch(
        _quantized_outer_kernel,
        *operands,
        bounds,
        left_scales,
        right_scales,
        num_left,
        num_right,
        x.shape[1],
        out_type=out_type,
        grid=num_programs,
        config=config,
        implementation=implementation,
        NUM_GROUPS=num_groups,
        TILE=TILE,
        DTYPE=triton_dtype(options.dtype),
        TMA=tma,
        OUT_TMA=out_tma,
        IMPRECISE=None if options.fast_sums else min(IMPRECISE, config.block_rows),
        **output,
    )
