"""Launches the kernel for few rows."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp

from triax import messages
from triax.binding.descriptor import TensorDescriptor
from triax.binding.launch import KernelImplementation
from triax.compat import versions
from triax.moe.products.few_rows_configs import (
    LEAST_SCALED,
    MOST_ROWS,
    MOST_SCHEDULED,
    FewRowsConfig,
    TilesConfig,
    WidenConfig,
)
from triax.moe.products.operands import Parts, parts
from triax.moe.products.options import Groups, Options
from triax.moe.products.row_tiles import (
    bounded_by_group,
    cdiv,
    schedule,
    suit_tma,
    triton_dtype,
)
from triax.moe.quantization.packing import E8M0, PACKED, TILE, TILED, words_of_tile
from triax.moe.quantization.scaled import ScaledArray, widened
from triax.moe.shared.launching import launch
from triax.moe.shared.target import Target


def lacking(
    target: Target, rows_per_group: int, x: Parts, w: Parts, *, transposed: bool, options: Options
) -> str | None:
    """Returns what the kernel needs and `x` or `w` do not have; None if it takes these operands."""
    out = jax.ShapeDtypeStruct((len(x.values), w.columns), options.dtype)
    if w.packed is None and w.values.dtype not in (jnp.float8_e4m3fn, jnp.int8):
        return "weights of float8_e4m3fn, int8 or 4 bits"
    if rows_per_group > MOST_ROWS:
        return f"at most {MOST_ROWS} rows for each group on average"
    if not (target.tensor_maps or _suits_tiles(target, rows_per_group, w)):
        if target.architecture.tma:
            return f"JAX {versions.TENSOR_MAPS.stable} or later"
        most = TilesConfig.most_rows(target.architecture, None)
        rows = f"at most {most} rows for each group on average"
        if w.tiled and _has_8_bits(w):
            return (
                f"TMA, from Hopper on, or {rows}; 8 bits that are not in tiles "
                "(`weights.untile()`) are not dequantized"
            )
        return f"TMA, from Hopper on, or weights in tiles (`weights.tile()`) and {rows}"
    if x.values.dtype != jnp.bfloat16:
        return f"rows of bfloat16; got {x.values.dtype}"
    if not transposed:
        return "weights that are stored with their depth innermost (`transposed=True`)"
    if w.zeros is not None and w.zeros.dtype != jnp.int8:  # other zeros may not fit bfloat16
        return f"zeros of int8; got {w.zeros.dtype}"
    if w.deep is not None and w.deep % LEAST_SCALED:
        return f"scales for a multiple of {LEAST_SCALED} along the depth; got {w.deep}"
    if not suit_tma(x.values, w.values, *([] if w.packed else [out])):
        # Only 4-bit weights get a warning with this text (`warn_of_widening`).
        return f"a depth in multiples of 32; got {x.values.shape[1]}"
    return None


def warn_of_widening(weights: ScaledArray, lacks: str) -> None:
    """Warns that few rows are multiplied by weights which every call widens in memory."""
    warnings.warn(
        f"ragged_dot dequantizes its weights, {messages.short(weights)} with scales for blocks "
        f"{weights.block}, in memory in every call: the kernel that unpacks them in registers "
        f"needs {lacks}. If that cannot be changed, and memory suffices, dequantize them once: "
        "`weights.dequantize(jnp.bfloat16)`.",
        UserWarning,
        stacklevel=2,
    )


def _scales(w: Parts) -> Any:
    """Returns the scales, as codes if they are powers of two."""
    scales: Any = w.scales
    return jax.lax.bitcast_convert_type(scales, jnp.uint8) if _powers(w) else scales


def _powers(w: Parts) -> bool:
    """Whether scales are powers of two, which multiply packed numbers during unpacking."""
    return w.packed is not None and w.scales is not None and w.scales.dtype == E8M0


def _has_8_bits(w: Parts) -> bool:
    """Whether numbers have 8 bits; otherwise they have four."""
    return w.packed is None or TILED[w.packed] not in PACKED


def _suits_tiles(target: Target, rows_per_group: int, w: Parts) -> bool:
    """Whether weights are in tiles, and rows few enough for the kernel that reads tiles."""
    most = TilesConfig.most_rows(target.architecture, None if _powers(w) else w.deep)
    return w.tiled and rows_per_group <= most


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
    from triax.moe.products.few_rows_kernels import _few_rows_kernel

    if _suits_tiles(target, rows_per_group, w):
        operands = x, w, groups, bias, bias_weights
        how: dict[str, Any] = {"options": options, "implementation": implementation}
        return _few_rows_of_tiles(target, rows_per_group, *operands, **how)
    rows, weights, powers = x.values, w.values, _powers(w)
    num_rows, depth = rows.shape
    num_groups, columns = len(weights), w.columns
    scaled = None if powers else w.deep
    sizes = target.architecture, rows_per_group, columns, depth, scaled
    config_for = FewRowsConfig.for_rows if _has_8_bits(w) else FewRowsConfig.for_packed
    config = config_for(*sizes, tiled=w.tiled)
    tiles, _ = schedule(groups, num_rows, config.block_rows, implementation)
    num_tiles = cdiv(num_rows, config.block_rows) + min(num_groups, num_rows)
    num_tiles *= cdiv(columns, config.block_columns)
    # Triton's own conversion of int8 is as fast, except into the left operand.
    words = config.permuted or weights.dtype != jnp.int8
    # If each half of a block has its own scale, the kernel takes the rows by halves.
    ordered = config.block_depth // (2 if scaled and scaled % config.block_depth else 1)
    box: tuple[int, ...] = (1, config.block_columns, config.block_depth // (2 if w.packed else 1))
    scales = _scales(w)
    # Powers of MXFP4's tiles multiply together with another factor.
    is_mxfp4 = powers and w.packed == "float4_e2m1fn" and (w.deep, w.wide) == (LEAST_SCALED, 1)
    at_once = is_mxfp4 and w.tiled and config.permuted
    if w.tiled:
        weights = weights.reshape(num_groups, columns // TILE, -1, 32)
        tile_rows = words_of_tile(w.packed) // 32
        box = (1, config.block_columns // TILE, config.block_depth // TILE * tile_rows, 32)
        rows = _renumbered_for_tiles(rows)
        if at_once:
            scales = scales.reshape(num_groups, columns // TILE, -1, TILE)
            parts_of_block = config.block_depth // LEAST_SCALED
            box_of_scales = 1, config.block_columns // TILE, parts_of_block, TILE
            scales = TensorDescriptor.from_array(scales, box_of_scales)
    elif w.packed:
        rows = _renumbered_packed(rows, ordered)
    elif words:
        rows = _renumbered(rows, config.permuted, ordered)
    return launch(
        _few_rows_kernel,
        bounded_by_group(rows, config.block_rows, ordered),
        TensorDescriptor.from_array(weights, box),
        tiles,
        scales,
        w.zeros,
        bias,
        bias_weights,
        num_rows,
        depth,
        columns,
        out_type=jax.ShapeDtypeStruct((num_rows, columns), options.dtype),
        grid=min(num_tiles, (config.programs or num_tiles) * target.multiprocessors),
        config=config,
        backend_options={"maxnreg": config.registers} if config.registers else None,
        WORDS=words,
        PACKED=w.packed,
        POWERS=powers,
        TILED=w.tiled,
        AT_ONCE=at_once,
        WARPS=config.num_warps,
        implementation=implementation,
        DTYPE=triton_dtype(options.dtype),
        SCALE_COLUMNS=w.wide,
        SCALE_DEPTH=w.deep,
    )


def _few_rows_of_tiles(
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
    from triax.moe.products.few_rows_tiles_kernels import _few_rows_of_tiles_kernel

    (num_rows, depth), num_groups = x.values.shape, len(w.values)
    column_tiles, in_use = w.columns // TILE, min(num_groups, num_rows)
    powers = _powers(w)
    in_sum = w.deep is not None and not powers
    num_tiles = in_use * column_tiles
    config = TilesConfig.heuristic(
        target,
        rows_per_group,
        num_tiles,
        depth,
        powers=powers,
        in_sum=in_sum,
        eight=_has_8_bits(w),
    )
    is_small = max(num_rows, num_groups) <= MOST_SCHEDULED
    in_programs = is_small and config.finds_tiles(target, num_tiles)
    tiles = None
    if not in_programs:
        tiles, _ = schedule(groups, num_rows, config.block_rows, implementation)
    return launch(
        _few_rows_of_tiles_kernel,
        x.values,
        w.values,
        tiles,
        groups.sizes if in_programs else None,
        groups.first_row if in_programs else None,
        _scales(w),
        w.zeros,
        bias,
        bias_weights,
        num_rows,
        depth,
        w.columns,
        out_type=jax.ShapeDtypeStruct((num_rows, w.columns), options.dtype),
        grid=(cdiv(num_rows, config.block_rows) + in_use) * column_tiles,
        config=config,
        PACKED=w.packed,
        POWERS=powers,
        NUM_GROUPS=num_groups if in_programs else 0,
        implementation=implementation,
        DTYPE=triton_dtype(options.dtype),
        SCALE_COLUMNS=w.wide,
        SCALE_DEPTH=w.deep,
    )


def widen(
    target: Target,
    weights: ScaledArray,
    dtype: Any,
    *,
    implementation: KernelImplementation | None,
) -> Parts:
    """Dequantizes weights of groups in memory, as `widened` does, in the stored layout.

    8-bit weights with a scale for the whole depth are not multiplied by it, so that widening is
    exact: the scale stays beside them in the result. If such weights have their columns innermost,
    they are only taken out of tiles, and stay in 8 bits.
    """
    from triax.moe.products.widening_kernels import _widen_kernel

    w = parts(weights)
    suitable = weights.transposed and (w.deep or LEAST_SCALED) % LEAST_SCALED == 0
    is_apart = weights.dtype not in PACKED and w.deep is None
    if not suitable or not weights.size or weights.dtype.name not in TILED:
        return parts(weights.untile()) if is_apart else Parts(widened(weights, dtype))
    values = w.values.reshape(-1)
    if not w.packed:
        values = jax.lax.bitcast_convert_type(values, jnp.int8)
    num_groups, depth, columns = weights.shape
    config = WidenConfig()
    found = launch(
        _widen_kernel,
        values,
        None if is_apart else _scales(w),
        w.zeros,
        columns,
        depth,
        out_type=jax.ShapeDtypeStruct((num_groups, columns, depth), dtype),
        grid=num_groups * cdiv(columns, TILE) * cdiv(depth, config.block_depth),
        config=config,
        PACKED=weights.dtype.name,
        TILED=w.tiled,
        POWERS=_powers(w),
        SCALE_COLUMNS=w.wide,
        SCALE_DEPTH=w.deep,
        implementation=implementation,
    )
    return Parts(found, w.scales, wide=w.wide) if is_apart else Parts(found)


def _renumbered(rows: jax.Array, permuted: bool, ordered: int) -> jax.Array:
    """Reorders rows along the depth, as the kernel reorders 8-bit weights.

    Zeros fill the last block.
    """
    num_rows, depth = rows.shape
    if not permuted:
        return rows.reshape(num_rows, -1, 2, 2).swapaxes(2, 3).reshape(num_rows, -1)
    loaded = min(ordered // 16, 4)
    rows = jnp.pad(rows, ((0, 0), (0, -depth % (16 * loaded))))
    rows = rows.reshape(num_rows, -1, 4, loaded, 2, 2)
    return rows.transpose(0, 1, 3, 5, 2, 4).reshape(num_rows, -1)


def _renumbered_packed(rows: jax.Array, ordered: int) -> jax.Array:
    """Reorders rows along each `ordered` of the depth, as the kernel reorders 4-bit weights.

    A thread loads 8 to 32 of these weights at once.
    """
    num_rows, depth = rows.shape
    rows = jnp.pad(rows, ((0, 0), (0, -depth % ordered)))
    rows = rows.reshape(num_rows, -1, 4, min(ordered // 32, 4), 2, 4)
    return rows.transpose(0, 1, 3, 5, 2, 4).reshape(num_rows, -1)


def _renumbered_for_tiles(rows: jax.Array) -> jax.Array:
    """Reorders rows along each 32 of the depth, as tiles have it.

    The 32 are four pairs for each of 4 threads. The first pairs of all threads come first, then
    their second pairs, and so on. This is written as slices, because XLA's transposes of such small
    dimensions take ten times as long.
    """
    pairs = rows.reshape(len(rows), -1, 4, 4, 2)
    return jnp.stack([pairs[:, :, :, i] for i in range(4)], 2).reshape(rows.shape)
