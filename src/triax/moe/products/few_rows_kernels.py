"""The kernel for few bfloat16 rows times 8- or 4-bit weights, which are widened in registers.

Weights have the shape [groups, columns, depth]; a byte holds two 4-bit weights. Rows and tiles are
as in the kernels of ragged_dot, and so is `_GROUP_END`: with it the hardware reads no rows past the
end of a group.

A sum over the depth may take any order. So each thread multiplies the weights that it has loaded,
in the order in which they come out of its registers, and rows are put into the same order before
the launch. Constexprs say what is reordered:

- WORDS: each 4 weights of 8 bits, because one set of instructions widens the first and the third
  of them.
- PERMUTED: each 64 of the depth. The weights are then the left operand of Hopper's tensor cores, in
  registers, where a thread holds other weights than the 16 neighbours that it loads.
- Packed weights (4 bits): each block of the depth. With PERMUTED its columns, too (`_order`).
- TILED: the rows alone. The words of a tile already stand where threads take them.

Zeros, and scales that are powers of two, are applied to the widened weights, which is exact. Other
scales multiply sums in float32: the whole sum, the sum over each block of the depth, or that over
each half of a block (HALVES). Each half is then reordered for itself.

AT_ONCE is for MXFP4 in tiles: one instruction multiplies a weight by its power and by the factor
that widening needs. Both together fit bfloat16 for powers below 2. A tile with larger powers is
summed up again, with two multiplications.
"""

import triton
import triton.language as tl

from triax.moe.products.any_gpu_kernels import _GROUP_END, _store_zeros, _tile
from triax.moe.products.unpacking_kernels import (
    _ALL,
    _POWER_DEPTH,
    _base,
    _codes_in_tiles,
    _first_of,
    _from_tiles,
    _loaded_tiles,
    _of_part,
    _of_parts,
    _powers_at_once,
    _powers_of_two,
    _scales,
    _unpacked,
    _widened,
)


@triton.jit
def _order(COLUMNS: tl.constexpr, WARPS: tl.constexpr):
    """Returns which column of a block each row of the left operand is, with PERMUTED.

    Warps load columns in two turns; in each turn the first warp loads the first 8 columns, and the
    next warp the next 8. A warp multiplies the 16 columns that it has loaded in both turns.
    """
    n = tl.arange(0, COLUMNS)
    turn, warp = n // 8 % 2, n // 16 % WARPS
    return n // (16 * WARPS) * (16 * WARPS) + turn * (8 * WARPS) + warp * 8 + n % 8


@triton.jit
def _ordered(w, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WARPS: tl.constexpr):
    """Permutes weights [COLUMNS, DEPTH] to the order of `_order`."""
    w = w.reshape(COLUMNS // (16 * WARPS), 2, WARPS, 8, DEPTH)
    return w.permute(0, 2, 1, 3, 4).reshape(COLUMNS, DEPTH)


@triton.jit
def _operand(
    w,
    base,
    zeros,
    powers,
    PACKED: tl.constexpr,
    WORDS: tl.constexpr,
    PERMUTED: tl.constexpr,
    TILED: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Widens and reorders weights: packed ones minus `zeros`, times `powers`.

    Both have a value for each part of the depth.
    """
    if TILED:
        return _from_tiles(w, base, zeros, powers, PACKED, True)
    elif PACKED is not None:
        COLUMNS: tl.constexpr = w.shape[0]
        DEPTH: tl.constexpr = 2 * w.shape[1]
        w = _unpacked(w, base, zeros, powers, PACKED == "float4_e2m1fn", COLUMNS, DEPTH)
        return _ordered(w, COLUMNS, DEPTH, WARPS) if PERMUTED else w
    else:
        COLUMNS: tl.constexpr = w.shape[0]
        DEPTH: tl.constexpr = w.shape[1]
        w = _widened(w, base, COLUMNS, DEPTH) if WORDS else w.to(tl.bfloat16)
        if PERMUTED:
            LOADED: tl.constexpr = 2 if DEPTH == 32 else 4  # words per thread and load
            w = w.reshape(COLUMNS, DEPTH // LOADED // 16, 4, LOADED, 2, 2)
            w = w.permute(0, 1, 3, 4, 2, 5).reshape(COLUMNS, DEPTH)
        return w


@triton.jit
def _plus(total, w, x, scale, PERMUTED: tl.constexpr):
    """Returns `total` plus the product of rows and weights, times the scales of columns."""
    if PERMUTED:
        return total + tl.dot(w, x.T) * scale[:, None]
    else:
        return total + tl.dot(x, w.T) * scale[None, :]


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows_kernel(
    rows,
    weights,
    tiles_ptr,
    group_scales_ptr,
    zeros_ptr,
    bias_ptr,
    bias_weights_ptr,
    num_rows,
    depth,
    num_columns,
    out_ptr,
    DTYPE: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    SCALE_DEPTH: tl.constexpr,
    PACKED: tl.constexpr,
    POWERS: tl.constexpr,
    WORDS: tl.constexpr,
    PERMUTED: tl.constexpr,
    TILED: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    FLATTEN: tl.constexpr,
    WARPS: tl.constexpr,
):
    num_row_tiles = tl.load(tiles_ptr)
    last_row = tl.load(tiles_ptr + 1)
    first_row = tl.load(tiles_ptr + 2)
    num_column_tiles = tl.cdiv(num_columns, BLOCK_COLUMNS)
    num_tiles = num_row_tiles * num_column_tiles
    IN_A_BYTE: tl.constexpr = 1 if PACKED is None else 2
    IS_8_BIT: tl.constexpr = PACKED == "float8_e4m3fn" or PACKED == "int8"
    TILE_ROWS: tl.constexpr = 32 if IS_8_BIT else 16  # of 32 words
    # IN_SUM: a block's product is scaled before it is added. HALVES: so is that of each half of a
    # block, because each has its own scale and zero. PART: a depth with one power and one zero.
    IN_SUM: tl.constexpr = SCALE_DEPTH is not None and not POWERS
    HALVES: tl.constexpr = IN_SUM and SCALE_DEPTH % BLOCK_DEPTH != 0
    HALF: tl.constexpr = BLOCK_DEPTH // 2
    PART: tl.constexpr = _POWER_DEPTH if POWERS else BLOCK_DEPTH
    PARTS: tl.constexpr = BLOCK_DEPTH // PART
    BLOCK: tl.constexpr = _ALL if SCALE_DEPTH is None else SCALE_DEPTH
    STEP: tl.constexpr = 64 if TILED and SCALE_COLUMNS == 1 and SCALE_DEPTH is not None else 1
    if PERMUTED and PACKED is not None and not TILED:
        order = _order(BLOCK_COLUMNS, WARPS)
    else:
        order = tl.arange(0, BLOCK_COLUMNS)
    E4M3: tl.constexpr = PACKED == "float8_e4m3fn" or weights.dtype == tl.float8e4nv
    base = _base(tl.load(tiles_ptr + tl.zeros([1, 1], tl.int32)), E4M3, PACKED)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=FLATTEN):
        group, row, end, column_tile = _tile(tiles_ptr, tile, num_column_tiles, BLOCK_ROWS)
        column = column_tile * BLOCK_COLUMNS
        total = tl.zeros(
            [BLOCK_COLUMNS, BLOCK_ROWS] if PERMUTED else [BLOCK_ROWS, BLOCK_COLUMNS], tl.float32
        )
        if group_scales_ptr is not None:
            of_columns = group_scales_ptr, group, column, order, num_columns
        if POWERS or HALVES or zeros_ptr is not None:
            columns = column + tl.arange(0, BLOCK_COLUMNS)
            known = columns < num_columns
            at = _first_of(group, columns, num_columns, depth, SCALE_COLUMNS, BLOCK, STEP)
            # Scales and zeros are loaded one step ahead, while the step's weights are multiplied.
            if AT_ONCE:
                seen = tl.zeros([BLOCK_COLUMNS // 64, PARTS, 8, 4, 2], tl.uint8)
            elif POWERS:
                codes = _of_parts(group_scales_ptr + at, known, 0, depth, PARTS, PART, BLOCK, STEP)
            if HALVES:
                scale = _scales(*of_columns, 0, depth, SCALE_COLUMNS, SCALE_DEPTH, STEP, True)
                scale_2 = _scales(*of_columns, HALF, depth, SCALE_COLUMNS, SCALE_DEPTH, STEP, True)
                if zeros_ptr is not None:
                    zero = _of_part(zeros_ptr + at, known, 0, depth, BLOCK, STEP)
                    zero_2 = _of_part(zeros_ptr + at, known, HALF, depth, BLOCK, STEP)
            elif zeros_ptr is not None:
                zeros = _of_parts(zeros_ptr + at, known, 0, depth, PARTS, PART, BLOCK, STEP)
        for start in range(0, depth, BLOCK_DEPTH):
            if TILED:
                w = weights.load([group, column // 64, start // 64 * TILE_ROWS, 0])
                IN_TILES: tl.constexpr = 2 if HALVES else max(PARTS, BLOCK_DEPTH // 64)
                w = _loaded_tiles(w, BLOCK_COLUMNS, BLOCK_DEPTH, IN_TILES)
            else:
                w = weights.load([group, column, start // IN_A_BYTE])
                w = w.reshape(BLOCK_COLUMNS, BLOCK_DEPTH // IN_A_BYTE)
            x = rows.load([_GROUP_END, end, _GROUP_END - (end - row), start])
            x = x.reshape(BLOCK_ROWS, HALF if HALVES else BLOCK_DEPTH)
            after = start + BLOCK_DEPTH
            less = None
            powers = None
            if not HALVES:
                if zeros_ptr is not None:
                    less = zeros.to(tl.bfloat16)
                    zeros = _of_parts(zeros_ptr + at, known, after, depth, PARTS, PART, BLOCK, STEP)
                if AT_ONCE:
                    codes = _codes_in_tiles(
                        group_scales_ptr, group, column, start, BLOCK_COLUMNS, PARTS
                    )
                    seen |= codes
                    powers = _powers_at_once(codes)
                elif POWERS:
                    powers = _powers_of_two(codes)
                    codes = _of_parts(
                        group_scales_ptr + at, known, after, depth, PARTS, PART, BLOCK, STEP
                    )
                w = _operand(w, base, less, powers, PACKED, WORDS, PERMUTED, TILED, WARPS)
            if not IN_SUM:
                if PERMUTED:
                    total = tl.dot(w, x.T, total)
                else:
                    total = tl.dot(x, w.T, total)
            elif not HALVES:
                scale = _scales(*of_columns, start, depth, SCALE_COLUMNS, SCALE_DEPTH, STEP)
                total = _plus(total, w, x, scale, PERMUTED)
            else:
                # Names in `_2` belong to the second half.
                if TILED:
                    w, w_2 = w.permute(0, 1, 2, 4, 5, 3).split()
                    w = w.expand_dims(3)
                    w_2 = w_2.expand_dims(3)
                else:
                    w = w.reshape(BLOCK_COLUMNS, 2, HALF // IN_A_BYTE)
                    w, w_2 = w.permute(0, 2, 1).split()
                x_2 = rows.load([_GROUP_END, end, _GROUP_END - (end - row), start + HALF])
                x_2 = x_2.reshape(BLOCK_ROWS, HALF)
                less_2 = None
                if zeros_ptr is not None:
                    less = zero[:, None].to(tl.bfloat16)
                    less_2 = zero_2[:, None].to(tl.bfloat16)
                    zero = _of_part(zeros_ptr + at, known, after, depth, BLOCK, STEP)
                    zero_2 = _of_part(zeros_ptr + at, known, after + HALF, depth, BLOCK, STEP)
                w = _operand(w, base, less, None, PACKED, WORDS, PERMUTED, TILED, WARPS)
                w_2 = _operand(w_2, base, less_2, None, PACKED, WORDS, PERMUTED, TILED, WARPS)
                now, now_2 = scale, scale_2
                scale = _scales(*of_columns, after, depth, SCALE_COLUMNS, SCALE_DEPTH, STEP, True)
                after += HALF
                scale_2 = _scales(*of_columns, after, depth, SCALE_COLUMNS, SCALE_DEPTH, STEP, True)
                total = _plus(total, w, x, now, PERMUTED)
                total = _plus(total, w_2, x_2, now_2, PERMUTED)
        if AT_ONCE:
            if tl.max(seen.to(tl.int32)) >= 128:  # some code has its highest bit: a power >= 2
                total = tl.zeros_like(total)
                for start in tl.range(0, depth, BLOCK_DEPTH, num_stages=1):
                    w = weights.load([group, column // 64, start // 64 * TILE_ROWS, 0])
                    w = _loaded_tiles(w, BLOCK_COLUMNS, BLOCK_DEPTH, max(PARTS, BLOCK_DEPTH // 64))
                    x = rows.load([_GROUP_END, end, _GROUP_END - (end - row), start])
                    x = x.reshape(BLOCK_ROWS, BLOCK_DEPTH)
                    codes = _codes_in_tiles(
                        group_scales_ptr, group, column, start, BLOCK_COLUMNS, PARTS
                    )
                    powers = _powers_of_two(codes)
                    w = _operand(w, base, None, powers, PACKED, WORDS, PERMUTED, TILED, WARPS)
                    total = tl.dot(w, x.T, total)
        if PERMUTED:
            total = total.T

        columns = column + order
        known = columns < num_columns
        if WORDS and E4M3:
            total *= 8 / 9
            total += total - total  # infinite sums become NaN
        if group_scales_ptr is not None and SCALE_DEPTH is None and not POWERS:
            total *= _scales(*of_columns, 0, depth, SCALE_COLUMNS, None, 1)[None, :]
        which = row + tl.arange(0, BLOCK_ROWS)
        inside = which < end
        if bias_ptr is not None:
            at = bias_ptr + group.to(tl.int64) * num_columns + columns
            addend = tl.load(at, mask=known, other=0.0).to(tl.float32)[None, :]
            if bias_weights_ptr is not None:
                weight = tl.load(bias_weights_ptr + which, mask=inside, other=0.0)
                addend = addend * weight.to(tl.float32)[:, None]
            total += addend
        at = out_ptr + which.to(tl.int64)[:, None] * num_columns + columns[None, :]
        tl.store(at, total.to(DTYPE), mask=inside[:, None] & known[None, :])

    zeros = first_row, last_row, num_rows, num_columns
    _store_zeros(out_ptr, zeros, BLOCK_ROWS, BLOCK_COLUMNS, DTYPE, False)
