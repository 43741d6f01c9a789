"""The kernel for few bfloat16 rows times weights in tiles, which are widened in registers.

Row tiles are as in the kernels of ragged_dot, and so is `_GROUP_END`: with it the hardware reads no
rows past the end of a group.

A sum over the depth may take any order. The words of a tile stand where threads take them
(`packing.tile`), so each thread multiplies the weights that it has loaded, in the order in which
they come out of its registers, and rows are put into the same order before the launch. With
WEIGHTS_LEFT weights are the left operand, which Hopper's tensor cores read from registers.

Zeros, and scales of 8 bits, which come as CODES of their dtype, are applied to the widened weights,
which is exact in bfloat16. Other scales multiply sums in float32: the whole sum, the sum over each
block of the depth, or that over each half of a block (HALVES).

AT_ONCE is for MXFP4 and NVFP4: one instruction multiplies a weight by its scale and by the factor
that widening needs. Both together fit bfloat16 for powers below 2, and for 2**-7 times any scale of
e4m3, of which NaN and negative ones are left out. A tile with others is summed up again, with two
multiplications.
"""

import triton
import triton.language as tl

from triax.moe.products.any_gpu_kernels import _GROUP_END, _store_zeros, _tile
from triax.moe.products.unpacking_kernels import (
    _ALL,
    _PART,
    _PART_OF_E4M3,
    _base,
    _each_e4m3,
    _first_of,
    _from_tiles,
    _loaded_tiles,
    _of_e4m3,
    _of_part,
    _of_parts,
    _powers_at_once,
    _powers_of_two,
    _scales,
)


@triton.jit
def _of_codes(codes, CODES: tl.constexpr):
    """Returns scales in bfloat16, times 2**-7 if they are of e4m3."""
    if CODES == "float8_e4m3fn":
        return _of_e4m3(codes)
    else:
        return _powers_of_two(codes)


@triton.jit
def _plus(total, w, x, scale, WEIGHTS_LEFT: tl.constexpr):
    """Returns `total` plus the product of rows and weights, times the scales of columns."""
    if WEIGHTS_LEFT:
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
    global_scales_ptr,
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
    CODES: tl.constexpr,
    WEIGHTS_LEFT: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    num_row_tiles = tl.load(tiles_ptr)
    last_row = tl.load(tiles_ptr + 1)
    first_row = tl.load(tiles_ptr + 2)
    num_column_tiles = tl.cdiv(num_columns, BLOCK_COLUMNS)
    num_tiles = num_row_tiles * num_column_tiles
    E4M3: tl.constexpr = PACKED == "float8_e4m3fn"
    TILE_ROWS: tl.constexpr = 32 if E4M3 or PACKED == "int8" else 16  # of 32 words
    # IN_SUM: a block's product is scaled before it is added. HALVES: so is that of each half of a
    # block, because each has its own scale and zero. PART: a depth with one code and one zero.
    IN_SUM: tl.constexpr = SCALE_DEPTH is not None and CODES is None
    E4M3_SCALES: tl.constexpr = CODES == "float8_e4m3fn"
    HALVES: tl.constexpr = IN_SUM and SCALE_DEPTH % BLOCK_DEPTH != 0
    HALF: tl.constexpr = BLOCK_DEPTH // 2
    PART: tl.constexpr = BLOCK_DEPTH if CODES is None else _PART_OF_E4M3 if E4M3_SCALES else _PART
    PARTS: tl.constexpr = BLOCK_DEPTH // PART
    BLOCK: tl.constexpr = _ALL if SCALE_DEPTH is None else SCALE_DEPTH
    OF_TILES: tl.constexpr = max(PARTS // 2 if E4M3_SCALES else PARTS, BLOCK_DEPTH // 64)
    IN_TILES: tl.constexpr = 2 if HALVES else OF_TILES
    STEP: tl.constexpr = 64 if SCALE_COLUMNS == 1 and SCALE_DEPTH is not None else 1
    order = tl.arange(0, BLOCK_COLUMNS)
    hidden = tl.load(tiles_ptr + tl.zeros([1, 1], tl.int32))
    base = _base(hidden, E4M3, PACKED)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=FLATTEN):
        group, row, end, column_tile = _tile(tiles_ptr, tile, num_column_tiles, BLOCK_ROWS)
        column = column_tile * BLOCK_COLUMNS
        total = tl.zeros(
            [BLOCK_COLUMNS, BLOCK_ROWS] if WEIGHTS_LEFT else [BLOCK_ROWS, BLOCK_COLUMNS], tl.float32
        )
        if group_scales_ptr is not None:
            of_columns = group_scales_ptr, group, column, order, num_columns
        if CODES is not None or HALVES or zeros_ptr is not None:
            columns = column + order
            known = columns < num_columns
            at = _first_of(group, columns, num_columns, depth, SCALE_COLUMNS, BLOCK, STEP)
            # Scales and zeros are loaded one step ahead, while the step's weights are multiplied.
            if AT_ONCE and E4M3_SCALES:
                seen = tl.zeros([BLOCK_COLUMNS // 64, PARTS, 8, 4], tl.int32)
            elif AT_ONCE:
                seen = tl.zeros([BLOCK_COLUMNS // 64, PARTS, 8, 4, 2], tl.uint8)
            elif CODES is not None:
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
            w = weights.load([group, column // 64, start // 64 * TILE_ROWS, 0])
            w = _loaded_tiles(w, BLOCK_COLUMNS, BLOCK_DEPTH, IN_TILES)
            x = rows.load([_GROUP_END, end, _GROUP_END - (end - row), start])
            x = x.reshape(BLOCK_ROWS, HALF if HALVES else BLOCK_DEPTH)
            after = start + BLOCK_DEPTH
            less = None
            factors = None
            if not HALVES:
                if zeros_ptr is not None:
                    less = zeros.to(tl.bfloat16)
                    zeros = _of_parts(zeros_ptr + at, known, after, depth, PARTS, PART, BLOCK, STEP)
                if AT_ONCE:  # a descriptor of [groups, tiles of columns, parts of the depth, 64]
                    codes = group_scales_ptr.load([group, column // 64, start // PART, 0])
                    codes = codes.reshape(BLOCK_COLUMNS // 64, PARTS, 8, 4, 2)
                    if E4M3_SCALES:
                        first, second = codes.to(tl.int32).split()
                        codes = first | (second << 16)
                        seen |= codes | (codes + 0x00010001)
                        factors = _each_e4m3(codes << 4)
                    else:
                        seen |= codes
                        factors = _powers_at_once(codes)
                elif CODES is not None:
                    factors = _of_codes(codes, CODES)
                    codes = _of_parts(
                        group_scales_ptr + at, known, after, depth, PARTS, PART, BLOCK, STEP
                    )
                w = _from_tiles(w, base, less, factors, PACKED, True)
            if not IN_SUM:
                if WEIGHTS_LEFT:
                    total = tl.dot(w, x.T, total)
                else:
                    total = tl.dot(x, w.T, total)
            elif not HALVES:
                scale = _scales(*of_columns, start, depth, SCALE_COLUMNS, SCALE_DEPTH, STEP)
                total = _plus(total, w, x, scale, WEIGHTS_LEFT)
            else:
                # Names in `_2` belong to the second half.
                w, w_2 = w.permute(0, 1, 2, 4, 5, 3).split()
                x_2 = rows.load([_GROUP_END, end, _GROUP_END - (end - row), start + HALF])
                x_2 = x_2.reshape(BLOCK_ROWS, HALF)
                less_2 = None
                if zeros_ptr is not None:
                    less = zero[:, None].to(tl.bfloat16)
                    less_2 = zero_2[:, None].to(tl.bfloat16)
                    zero = _of_part(zeros_ptr + at, known, after, depth, BLOCK, STEP)
                    zero_2 = _of_part(zeros_ptr + at, known, after + HALF, depth, BLOCK, STEP)
                w = _from_tiles(w.expand_dims(3), base, less, None, PACKED, True)
                w_2 = _from_tiles(w_2.expand_dims(3), base, less_2, None, PACKED, True)
                now, now_2 = scale, scale_2
                scale = _scales(*of_columns, after, depth, SCALE_COLUMNS, SCALE_DEPTH, STEP, True)
                after += HALF
                scale_2 = _scales(*of_columns, after, depth, SCALE_COLUMNS, SCALE_DEPTH, STEP, True)
                total = _plus(total, w, x, now, WEIGHTS_LEFT)
                total = _plus(total, w_2, x_2, now_2, WEIGHTS_LEFT)
        if AT_ONCE:
            if E4M3_SCALES:
                seen = tl.where((seen & 0x00800080) != 0, 128, 0)
            if tl.max(seen.to(tl.int32)) >= 128:  # a power >= 2; or an e4m3 scale that is left out
                total = tl.zeros_like(total)
                for start in tl.range(0, depth, BLOCK_DEPTH, num_stages=1):
                    w = weights.load([group, column // 64, start // 64 * TILE_ROWS, 0])
                    w = _loaded_tiles(w, BLOCK_COLUMNS, BLOCK_DEPTH, IN_TILES)
                    x = rows.load([_GROUP_END, end, _GROUP_END - (end - row), start])
                    x = x.reshape(BLOCK_ROWS, BLOCK_DEPTH)
                    codes = group_scales_ptr.load([group, column // 64, start // PART, 0])
                    codes = codes.reshape(BLOCK_COLUMNS // 64, PARTS, 8, 4, 2)
                    factors = _of_codes(codes, CODES)
                    w = _from_tiles(w, base, None, factors, PACKED, True)
                    total = tl.dot(w, x.T, total)
        if WEIGHTS_LEFT:
            total = total.T

        columns = column + order
        known = columns < num_columns
        if E4M3:
            total *= 8 / 9
            total += total - total  # infinite sums become NaN
        if group_scales_ptr is not None and SCALE_DEPTH is None and CODES is None:
            total *= _scales(*of_columns, 0, depth, SCALE_COLUMNS, None, 1)[None, :]
        if E4M3_SCALES:
            total *= 128.0
        if global_scales_ptr is not None:
            of_all = global_scales_ptr, group, column, order, num_columns
            total *= _scales(*of_all, 0, depth, 1, None, 1)[None, :]
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
