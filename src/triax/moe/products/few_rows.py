"""Launches the kernels that read weights in tiles for few rows, or dequantize them for many."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from triax import messages
from triax.binding.descriptor import TensorDescriptor
from triax.binding.launch import KernelImplementation
from triax.compat import versions
from triax.moe.products.few_rows_configs import FewRowsConfig, VeryFewRowsConfig
from triax.moe.products.operands import Parts, parts
from triax.moe.products.product import RaggedDot
from triax.moe.products.row_tiles import bounded_by_group, cdiv, schedule, triton_dtype
from triax.moe.products.thresholds import MOST_ROWS, MOST_SCHEDULED
from triax.moe.quantization.packing import (
    E2M1,
    E4M3,
    PACKED,
    TILE,
    TILED,
    unfill,
    whole_tiles,
    words_of_tile,
)
from triax.moe.quantization.scaled import ScaledArray, filled, widened
from triax.moe.shared.launching import launch

ONE_ORDER = "sums whose order depends on the number of rows (`triax.same_bits` is on)"
_LEAST_SCALED = 32  # of the depth share a scale that multiplies sums
_MOST_STAGES = 8  # of one part of the depth
_WIDENED_DEPTH = 128  # of a program that dequantizes a tile's columns


def needs(product: RaggedDot) -> str | None:
    """Returns what the kernel needs and a product does not have; None if it takes the product."""
    if needed := _needs_of_operands(product):
        return needed
    if has_many_rows(product):
        return f"at most {MOST_ROWS} rows for each group on average"
    if product.target.tensor_maps:
        return None
    is_old = product.target.architecture.tma
    return f"JAX {versions.TENSOR_MAPS.stable} or later" if is_old else "TMA, from Hopper on"


def needs_of_very_few(product: RaggedDot) -> str | None:
    """As `needs`, of the kernel without TMA, for fewer rows."""
    if needed := _needs_of_operands(product):
        return needed
    w = product.right
    scaled = None if w.codes else w.deep
    most = VeryFewRowsConfig.most_rows(product.target.architecture, scaled)
    if not most:
        return "tensor cores that multiply bfloat16, from Ampere on"
    if product.options.one_order and not product.target.tensor_maps:
        return None  # the kernel for more rows is not there
    if product.options.one_order and not _has_one_order(product):
        return ONE_ORDER
    if product.rows_per_group > most:
        return f"at most {most} rows for each group on average"
    return None


def _has_one_order(product: RaggedDot) -> bool:
    """Whether both kernels sum up in one order, as was seen on an H200: of MXFP4 and NVFP4, and of
    4 bits with scales that multiply the sum of each 32 of the depth."""
    w = product.right
    if product.target.compute_capability != 90 or w.has_8_bits:
        return False
    return w.packed == E2M1.name if w.codes else w.deep is not None and w.deep % TILE > 0


def _needs_of_operands(product: RaggedDot) -> str | None:
    """Returns what both kernels need and rows or weights do not have."""
    x, w = product.left, product.right
    if w.packed is None and w.values.dtype not in (jnp.float8_e4m3fn, jnp.int8):
        return "weights of float8_e4m3fn, int8 or 4 bits"
    if x.values.dtype != jnp.bfloat16:
        return f"rows of bfloat16; got {x.values.dtype}"
    if not product.transposed:
        return "weights that are stored with their depth innermost (`transposed=True`)"
    if w.zeros is not None and w.zeros.dtype != jnp.int8:  # other zeros may not fit bfloat16
        return f"zeros of int8; got {w.zeros.dtype}"
    if w.deep is not None and w.deep % w.least_deep:
        return f"scales for a multiple of {w.least_deep} along the depth; got {w.deep}"
    if w.codes == E4M3.name and (w.deep is None or w.wide != 1):
        return "scales of float8_e4m3fn for each column and part of the depth"
    return None if w.tiled else "weights in tiles (`weights.tile()`)"


def dequantizing_needs(product: RaggedDot) -> str | None:
    """Returns what weights must be to be dequantized for other kernels; None if they are."""
    w, rows = product.right, product.left.values
    may = (rows.dtype.itemsize, w.values.dtype.itemsize) == (2, 1)
    if w.packed or (may and has_many_rows(product)):
        return None
    if may and product.rows_per_group > MOST_ROWS:
        return ONE_ORDER
    return f"weights of 4 bits, in tiles, or of 8 bits and more than {MOST_ROWS} rows of 16 bits"


def dequantized(product: RaggedDot) -> RaggedDot:
    """Returns the product with dequantized weights, which other kernels take."""
    rows, w, weights = product.left.values, product.right, product.weights
    if w.packed or (w.deep and rows.dtype == jnp.bfloat16):
        w = widen(weights, rows.dtype, implementation=product.implementation)
    if has_many_rows(product) and rows.dtype.itemsize == 2:
        w = w._replace(values=w.values.astype(rows.dtype))  # exact
    return dataclasses.replace(product, right=w)


def warn_of_dequantizing(product: RaggedDot) -> None:
    """Warns that few rows are multiplied by weights which every call dequantizes in memory."""
    w, weights = product.right, product.weights
    has_few = product.rows_per_group <= MOST_ROWS
    if not (w.packed and has_few) or product.implementation == "interpret":
        return
    needed = dict.fromkeys((needs(product), needs_of_very_few(product)))
    untiled = "; 8 bits that are not in tiles (`tiles=False`) are not dequantized"
    warnings.warn(
        f"ragged_dot dequantizes its weights, {messages.short(weights)} with scales for blocks "
        f"{weights.block}, in memory in every call: the kernels that unpack them in registers "
        f"need {', or '.join(map(str, needed))}{untiled * w.has_8_bits}. If that cannot be "
        "changed, and memory suffices, dequantize them once: "
        f"`weights.dequantize(jnp.{product.left.values.dtype})`.",
        UserWarning,
        stacklevel=2,
    )


def has_many_rows(product: RaggedDot) -> bool:
    """Whether dequantizing 8- or 4-bit weights first pays, because row tiles read them again.

    Sums keep their bits only of weights that are not in tiles, and not rounded.
    """
    keeps_bits = product.right.deep is None and not product.right.tiled
    may = keeps_bits or not product.options.one_order
    return product.rows_per_group > MOST_ROWS and may


def _scales(w: Parts) -> Any:
    """Returns the scales, as codes where kernels take these."""
    scales: Any = w.scales
    return jax.lax.bitcast_convert_type(scales, jnp.uint8) if w.codes else scales


def few_rows(product: RaggedDot) -> jax.Array:
    """Multiplies bfloat16 rows by weights in tiles; zeros outside groups."""
    from triax.moe.products.few_rows_kernels import _few_rows_kernel

    w, target, implementation = product.right, product.target, product.implementation
    num_rows, num_groups = product.num_rows, product.num_groups
    depth, columns = product.depth, product.columns
    scaled = None if w.codes else w.deep
    # So many products are summed before a scale by blocks of any number of rows.
    is_split = product.options.one_order and not target.architecture.multiplies_from_shared
    config = FewRowsConfig.heuristic(
        target.architecture,
        product.rows_per_group,
        columns,
        depth,
        _LEAST_SCALED if is_split and scaled else scaled,
        eight=w.has_8_bits,
    )
    tiles, _ = schedule(product.groups, num_rows, config.block_rows, implementation)
    num_tiles = cdiv(num_rows, config.block_rows) + min(num_groups, num_rows)
    num_tiles *= cdiv(columns, config.block_columns)
    # If each half of a block has its own scale, the kernel takes the rows by halves.
    depth_of_rows = config.block_depth // (2 if scaled and scaled % config.block_depth else 1)
    order = min(depth_of_rows, _LEAST_SCALED if w.has_8_bits else TILE)
    tile_rows = words_of_tile(w.packed) // 32
    weights = w.values.reshape(num_groups, columns // TILE, -1, 32)
    tiles_of_block = config.block_columns // TILE
    box = 1, tiles_of_block, config.block_depth // TILE * tile_rows, 32
    scales = _scales(w)
    # MXFP4's and NVFP4's scales multiply together with another factor.
    is_fp4 = w.codes and w.packed == E2M1.name and (w.deep, w.wide) == (w.least_deep, 1)
    at_once = bool(is_fp4) and config.weights_left
    if at_once:
        scales = scales.reshape(num_groups, columns // TILE, -1, TILE)
        box_of_scales = 1, tiles_of_block, config.block_depth // w.least_deep, TILE
        scales = TensorDescriptor.from_array(scales, box_of_scales)
    return _launch(
        _few_rows_kernel,
        product,
        bounded_by_group(_renumbered(product.left.values, order), config.block_rows, depth_of_rows),
        TensorDescriptor.from_array(weights, box),
        tiles,
        scales,
        grid=min(num_tiles, (config.programs or num_tiles) * target.multiprocessors),
        config=config,
        backend_options={"maxnreg": config.registers} if config.registers else None,
        AT_ONCE=at_once,
    )


def very_few_rows(product: RaggedDot) -> jax.Array:
    """Multiplies as `few_rows` does."""
    from triax.moe.products.very_few_rows_kernels import _very_few_rows_kernel

    w, groups, implementation = product.right, product.groups, product.implementation
    num_rows, num_groups = product.num_rows, product.num_groups
    column_tiles, in_use = w.columns // TILE, min(num_groups, num_rows)
    num_tiles = in_use * column_tiles
    config = VeryFewRowsConfig.heuristic(
        product.target,
        product.rows_per_group,
        num_tiles,
        product.depth,
        powers=w.codes is not None,
        in_sum=w.deep is not None and w.codes is None,
        eight=w.has_8_bits,
    )
    if product.options.one_order:  # as many loads in flight, of one part
        stages = min(config.stages * config.split, _MOST_STAGES)
        config = dataclasses.replace(config, split=1, stages=stages)
    is_small = max(num_rows, num_groups) <= MOST_SCHEDULED
    in_programs = is_small and config.finds_tiles(product.target, num_tiles)
    tiles = None
    if not in_programs:
        tiles, _ = schedule(groups, num_rows, config.block_rows, implementation)
    return _launch(
        _very_few_rows_kernel,
        product,
        product.left.values,
        w.values,
        tiles,
        groups.sizes if in_programs else None,
        groups.first_row if in_programs else None,
        _scales(w),
        grid=(cdiv(num_rows, config.block_rows) + in_use) * column_tiles,
        config=config,
        NUM_GROUPS=num_groups if in_programs else 0,
    )


def _launch(kernel: Any, product: RaggedDot, *operands: Any, **options: Any) -> Any:
    """Launches a kernel on its own `operands`, and on those that both kernels take."""
    w = product.right
    return launch(
        kernel,
        *operands,
        w.zeros,
        w.global_scales,
        product.bias,
        product.bias_weights,
        product.num_rows,
        product.depth,
        product.columns,
        out_type=product.out_type,
        implementation=product.implementation,
        PACKED=w.packed,
        CODES=w.codes,
        DTYPE=triton_dtype(product.options.dtype),
        SCALE_COLUMNS=w.wide,
        SCALE_DEPTH=w.deep,
        **options,
    )


def dequantize_tiles(
    weights: ScaledArray, *, dtype: Any, implementation: KernelImplementation | None
) -> jax.Array:
    """Dequantizes weights in tiles as `widened` does: to the stored layout, and with all scales."""
    all_tiles = filled(weights) if weights.shard is not None else weights
    out = widen(all_tiles, jnp.dtype(dtype), implementation=implementation, scaled=True).values
    if weights.shard is not None:
        sizes = weights.shard[::-1] if weights.transposed else weights.shard
        for axis, size in zip((1, 2), sizes, strict=True):
            out = unfill(out, axis, size, whole_tiles(size))
    return out


def widen(
    weights: ScaledArray,
    dtype: Any,
    *,
    implementation: KernelImplementation | None,
    scaled: bool = False,
) -> Parts:
    """Dequantizes weights of groups in memory, as `widened` does, in the stored layout.

    Unless `scaled`, 8-bit weights with a scale for the whole depth are not multiplied by it, so
    that widening is exact: the scale stays beside them in the result. If such weights have their
    columns innermost, they are only taken out of tiles, and stay in 8 bits.
    """
    from triax.moe.products.widening_kernels import _widen_kernel

    w = parts(weights)
    suitable = weights.transposed and (w.deep or w.least_deep) % w.least_deep == 0
    is_apart = weights.dtype not in PACKED and w.deep is None and not scaled
    if not suitable or not weights.size or weights.dtype.name not in TILED:
        return parts(weights.untile()) if is_apart else Parts(widened(weights, dtype))
    values = w.values.reshape(-1)
    if not w.packed:
        values = jax.lax.bitcast_convert_type(values, jnp.int8)
    num_groups, depth, columns = weights.shape
    result = launch(
        _widen_kernel,
        values,
        None if is_apart else _scales(w),
        w.zeros,
        w.global_scales,
        columns,
        depth,
        out_type=jax.ShapeDtypeStruct((num_groups, columns, depth), dtype),
        grid=num_groups * cdiv(columns, TILE) * cdiv(depth, _WIDENED_DEPTH),
        num_warps=4,
        BLOCK_DEPTH=_WIDENED_DEPTH,
        PACKED=weights.dtype.name,
        TILED=w.tiled,
        CODES=w.codes,
        SCALE_COLUMNS=w.wide or (None if is_apart else columns),
        SCALE_DEPTH=w.deep,
        implementation=implementation,
    )
    return Parts(result, w.scales, wide=w.wide) if is_apart else Parts(result)


def _renumbered(rows: jax.Array, deep: int) -> jax.Array:
    """Reorders rows along each 32 or 64 of the depth (`deep`), as `_from_tiles` does with weights.

    Each 32 are four pairs for each of 4 threads. The first pairs of all threads come first, then
    their second pairs, and so on. This is written as slices, because XLA's transposes of such small
    dimensions take ten times as long.
    """
    pairs = rows.reshape(len(rows), -1, deep // 8, 4, 2)
    return jnp.stack([pairs[:, :, :, i] for i in range(4)], 2).reshape(rows.shape)
