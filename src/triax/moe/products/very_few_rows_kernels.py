"""The kernel for very few bfloat16 rows times weights in tiles, by `mma.sync`.

A warp multiplies 64 columns, 64 of the depth at a time. A word of a tile holds weights that one
thread multiplies (`packing.tile`), so each thread widens the words that it has loaded. SPLIT warps
of a program take a part of the depth each, and their sums are added at the end.

Triton chooses the layout of an operand by the narrowest load that it is computed from: with a load
of 8 bits each thread multiplies eight neighbours of the depth. So weights are computed from such a
load, too, of a byte that is zero (`hidden`). A sum over the depth may take any order: these are the
neighbours that a thread's words hold.

Row tiles are those of ragged_dot's schedule. With few rows each program finds its own from the
sizes of groups, which takes less time than a launch.

Scales and zeros of single columns are in the order of `packing.tile_scales`. Scales of 8 bits, as
CODES of their dtype, and zeros are applied to the widened weights, which is exact in bfloat16.
Other scales multiply float32 sums. Scales of e4m3 are for 16 of the depth or more, in tiles.
"""

import triton
import triton.language as tl

from triax.moe.products.any_gpu_kernels import _store_zeros, _tile
from triax.moe.products.unpacking_kernels import (
    _PART,
    _PART_OF_E4M3,
    _base,
    _each_e4m3,
    _of_e4m3,
    _of_threads,
    _powers_at_once,
    _scales,
    _two_columns,
    _two_of_eight,
)

_TILE = tl.constexpr(64)  # a tile's columns, and its depth


@triton.jit
def _schedule(sizes_ptr, first_row_ptr, num_rows, NUM_GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """Returns each group's start, end and first row tile, and the first group's start.

    Sizes are clipped as in `_ragged_dot_schedule_kernel`.
    """
    first_row = 0
    if first_row_ptr is not None:
        first_row = tl.minimum(tl.maximum(tl.load(first_row_ptr), 0), num_rows)
    at = tl.arange(0, triton.next_power_of_2(NUM_GROUPS))
    sizes = tl.load(sizes_ptr + at, mask=at < NUM_GROUPS, other=0)
    sizes = tl.minimum(tl.maximum(sizes, 0), num_rows)
    ends = first_row + tl.cumsum(sizes, 0)
    starts = tl.minimum(ends - sizes, num_rows)
    ends = tl.minimum(ends, num_rows)
    num_tiles = tl.cdiv(ends - starts, ROWS)
    return starts, ends, tl.cumsum(num_tiles, 0) - num_tiles, first_row


@triton.jit
def _of_columns(parts):
    """Reorders values of columns, as tiles have them, [SPLIT, 8, 4, 2], to [SPLIT, columns, 1]."""
    return parts.permute(0, 2, 3, 1).reshape(parts.shape[0], _TILE, 1)


@triton.jit
def _of_words(parts):
    """Returns the values of both columns of each word, from [SPLIT, parts, 8, 4, 2]."""
    first, second = parts.permute(0, 3, 2, 1, 4).split()
    WARPS: tl.constexpr = 4 * parts.shape[0]
    return _of_threads(first, WARPS, 2), _of_threads(second, WARPS, 2)


@triton.jit
def _widened(w, base, zeros, scales, PACKED: tl.constexpr):
    """Widens words to bfloat16 [SPLIT, columns, depth], minus zeros and times scales."""
    SPLIT: tl.constexpr = w.shape[0]
    E2M1: tl.constexpr = PACKED == "float4_e2m1fn"
    if w.shape[1] == 1024:
        # Warps' columns, rows of threads, parts, threads, words, neighbours, columns.
        w = w.reshape(4 * SPLIT, 2, 8, 4, 4).permute(0, 2, 1, 3, 4)
        w = _two_columns(w, base, PACKED == "float8_e4m3fn")
        return w.permute(0, 6, 1, 2, 3, 4, 5).reshape(SPLIT, _TILE, _TILE)
    else:
        zeros_2 = None
        scales_2 = None
        if zeros is not None:
            zeros, zeros_2 = _of_words(zeros)
        if scales is not None:
            scales, scales_2 = _of_words(scales)
        w = w.reshape(4 * SPLIT, 8, 4, 2, 2).permute(0, 1, 3, 2, 4)
        a = _two_of_eight(w, base, 0, zeros, scales, E2M1)
        b = _two_of_eight(w, base, 1, zeros_2, scales_2, E2M1)
        c = _two_of_eight(w, base, 2, zeros, scales, E2M1)
        d = _two_of_eight(w, base, 3, zeros_2, scales_2, E2M1)
        # Warps' columns, rows of threads, parts, threads, words, neighbours, columns, depths.
        w = tl.join(tl.join(a, b), tl.join(c, d))
        return w.permute(0, 6, 1, 2, 3, 4, 7, 5).reshape(SPLIT, _TILE, _TILE)


@triton.jit
def _halves(array):
    """Splits the last dimension in the middle."""
    shape: tl.constexpr = (array.shape[0], array.shape[1], 2, _PART)
    return array.reshape(shape).permute(0, 1, 3, 2).split()


@triton.jit
def _parts(pointers, steps, depth, PARTS: tl.constexpr, DEEP: tl.constexpr, STEP: tl.constexpr):
    """Loads scales or zeros for PARTS parts of each step: [SPLIT, PARTS, 8, 4, 2].

    Those of e4m3 are words of four, [SPLIT, PARTS, 8, 2], for four parts: even bytes are of the
    first of two columns.
    """
    PART: tl.constexpr = _PART_OF_E4M3 if PARTS == 4 else _PART
    start = steps[:, None] * _TILE + tl.arange(0, PARTS)[None, :] * PART
    parts = tl.load(pointers[None, None, :] + (start // DEEP * STEP)[:, :, None])
    if PARTS == 4:
        return parts.reshape(steps.shape[0], PARTS, 8, 2)
    else:
        return parts.reshape(steps.shape[0], PARTS, 8, 4, 2)


@triton.jit
def _sums(
    words,
    rows,
    scales_at,
    zeros_at,
    steps,
    FORMAT: tl.constexpr,
    AT_ONCE: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Returns a tile's sums, [SPLIT, columns, rows], and the or of its CODES of scales.

    AT_ONCE multiplies by 2**126 and a scale at once, which is right for codes below 128: of e4m3,
    whose scales are taken as 2**-7 of theirs, below 127. Then some code that is returned is 128 or
    more. Otherwise weights are multiplied twice.
    """
    first_step, steps_of_part, num_steps, depth, base = steps
    PACKED: tl.constexpr = FORMAT[0]
    SCALE_DEPTH: tl.constexpr = FORMAT[1]
    CODES: tl.constexpr = FORMAT[2]
    SPLIT: tl.constexpr = first_step.shape[0]
    WORDS: tl.constexpr = words.shape[1]
    # IN_SUM: products are scaled before they are added. PARTS of a step have a scale each.
    IN_SUM: tl.constexpr = SCALE_DEPTH is not None and CODES is None
    E4M3: tl.constexpr = CODES == "float8_e4m3fn"
    DEEP: tl.constexpr = (1 << 30) if SCALE_DEPTH is None else SCALE_DEPTH
    PARTS: tl.constexpr = 4 if E4M3 else 2 if CODES is not None or DEEP % _TILE != 0 else 1
    total = tl.zeros([SPLIT, _TILE, rows.shape[1]], tl.float32)
    if E4M3 and AT_ONCE:
        seen = tl.zeros([SPLIT, PARTS, 8, 2], tl.int32)
    else:
        seen = tl.zeros([SPLIT, PARTS, 8, 4, 2], tl.int32 if AT_ONCE else tl.int16)
    for step in tl.range(0, steps_of_part, num_stages=STAGES):
        at = tl.minimum(first_step + step, num_steps - 1)
        inside = first_step + step < num_steps
        w = tl.load(words + at[:, None] * WORDS)
        x = tl.load(rows + at[:, None, None] * _TILE, mask=inside[:, None, None], other=0.0)
        zeros = None
        of_weights = None
        if zeros_at is not None:
            zeros = _parts(zeros_at, at, depth, 2, DEEP, STEP).to(tl.bfloat16)
        if scales_at is not None:
            scales = _parts(scales_at, at, depth, PARTS, DEEP, STEP)
            if IN_SUM:
                scales = scales.to(tl.float32)
        if E4M3 and AT_ONCE:
            seen |= scales | (scales + 0x01010101)
            evens = _each_e4m3((scales << 4) & base).reshape(SPLIT, PARTS, 8, 4)
            odds = _each_e4m3((scales >> 4) & base).reshape(SPLIT, PARTS, 8, 4)
            of_weights = tl.join(evens, odds)
        elif E4M3:
            evens = tl.join(scales & 0xFF, (scales >> 16) & 0xFF)
            odds = tl.join((scales >> 8) & 0xFF, (scales >> 24) & 0xFF)
            of_weights = _of_e4m3(tl.join(evens, odds).reshape(SPLIT, PARTS, 8, 4, 2))
        elif AT_ONCE:
            codes = scales.to(tl.int32)
            seen |= codes
            of_weights = _powers_at_once(codes)
        elif CODES is not None:
            codes = scales.to(tl.int16)
            seen = tl.maximum(seen, codes)
            # 2**-127 is subnormal, and infinity for 255 is overwritten at the end.
            of_weights = tl.maximum(codes << 7, 64 + tl.zeros_like(codes))
            of_weights = of_weights.to(tl.bfloat16, bitcast=True)
        w = _widened(w, base, zeros, of_weights, PACKED)
        if not IN_SUM:
            total = tl.dot(w, x.permute(0, 2, 1), total)
        elif PARTS == 1:
            total += tl.dot(w, x.permute(0, 2, 1)) * _of_columns(scales.reshape(SPLIT, 8, 4, 2))
        else:
            scale, scale_2 = scales.permute(0, 2, 3, 4, 1).split()
            w, w_2 = _halves(w)
            x, x_2 = _halves(x)
            total += tl.dot(w, x.permute(0, 2, 1)) * _of_columns(scale)
            total += tl.dot(w_2, x_2.permute(0, 2, 1)) * _of_columns(scale_2)
    if E4M3 and AT_ONCE:
        seen = tl.where((seen & -0x7F7F7F80) != 0, 128, 0)
    elif CODES is not None and not AT_ONCE and not E4M3:
        total += tl.where(_of_columns(tl.max(seen, 1)) == 255, float("nan"), 0.0)
    return total, seen


@triton.jit(do_not_specialize=["num_rows"])
def _very_few_rows_kernel(
    rows_ptr,
    words_ptr,
    tiles_ptr,
    sizes_ptr,
    first_row_ptr,
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
    NUM_GROUPS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
):
    num_column_tiles = num_columns // _TILE
    if tiles_ptr is not None:
        num_row_tiles = tl.load(tiles_ptr)
        last_row = tl.load(tiles_ptr + 1)
        first_row = tl.load(tiles_ptr + 2)
        # The highest byte of a number that is not negative.
        byte_ptr = tiles_ptr.to(tl.pointer_type(tl.int8), bitcast=True) + 3
        hidden = tl.load(byte_ptr + tl.zeros([1, 1], tl.int32)).to(tl.int32)
    else:
        starts, ends, firsts, first_row = _schedule(
            sizes_ptr, first_row_ptr, num_rows, NUM_GROUPS, BLOCK_ROWS
        )
        num_row_tiles = tl.max(firsts + tl.cdiv(ends - starts, BLOCK_ROWS), 0)
        last_row = tl.max(ends, 0)
        # A number's lowest byte, xor the number, whose lowest byte then is zero. Two volatile loads
        # of the byte would do, too, and take longer.
        byte_ptr = sizes_ptr.to(tl.pointer_type(tl.int8), bitcast=True)
        hidden = tl.load(byte_ptr + tl.zeros([1, 1], tl.int32)).to(tl.int32)
        hidden = (hidden ^ tl.load(sizes_ptr + tl.zeros([1, 1], tl.int32))) << 24
        # There are as many programs as tiles or more.
        row_tile = tl.program_id(0) // num_column_tiles
        column_tile = tl.program_id(0) % num_column_tiles
        tiles_in = row_tile - firsts
        is_it = (tiles_in >= 0) & (tiles_in < tl.cdiv(ends - starts, BLOCK_ROWS))
        group = tl.sum(tl.where(is_it, tl.arange(0, starts.shape[0]), 0), 0)
        row = tl.sum(tl.where(is_it, starts + tiles_in * BLOCK_ROWS, 0), 0)
        end = tl.sum(tl.where(is_it, ends, 0), 0)
    E4M3: tl.constexpr = PACKED == "float8_e4m3fn"
    WORDS: tl.constexpr = 1024 if E4M3 or PACKED == "int8" else 512  # of a tile
    DEEP: tl.constexpr = (1 << 30) if SCALE_DEPTH is None else SCALE_DEPTH
    IN_TILES: tl.constexpr = SCALE_DEPTH is not None and SCALE_COLUMNS == 1
    E4M3_SCALES: tl.constexpr = CODES == "float8_e4m3fn"  # which are loaded as words
    STEP: tl.constexpr = _TILE // 4 if E4M3_SCALES else _TILE if IN_TILES else 1
    AT_ONCE: tl.constexpr = CODES is not None and PACKED == "float4_e2m1fn"
    FORMAT: tl.constexpr = (PACKED, SCALE_DEPTH, CODES)
    # Weights depend on a load of 8 bits.
    base = _base(hidden, E4M3 or E4M3_SCALES, PACKED)
    num_steps = depth // _TILE
    steps_of_part = tl.cdiv(num_steps, SPLIT)
    first_step = tl.arange(0, SPLIT) * steps_of_part
    order = tl.arange(0, _TILE)  # of columns in tiles: that of `place`
    place = order % 8 * 8 + order // 8
    for tile in tl.range(tl.program_id(0), num_row_tiles * num_column_tiles, tl.num_programs(0)):
        if tiles_ptr is not None:
            group, row, end, column_tile = _tile(tiles_ptr, tile, num_column_tiles, BLOCK_ROWS)
        which = row + tl.arange(0, BLOCK_ROWS)
        columns = column_tile * _TILE + order
        # Rows past the group's end are not stored.
        at = rows_ptr + tl.minimum(which, num_rows - 1).to(tl.int64)[None, :, None] * depth
        rows = at + order[None, None, :]
        tile_at = group.to(tl.int64) * num_column_tiles + column_tile
        words = words_ptr + tile_at * num_steps * WORDS + tl.arange(0, WORDS)[None, :]
        if IN_TILES:
            of_columns = tile_at * tl.cdiv(depth, DEEP) * _TILE + order
        elif SCALE_COLUMNS is not None:
            of_columns = group.to(tl.int64) * tl.cdiv(num_columns, SCALE_COLUMNS)
            of_columns += (column_tile * _TILE + place) // SCALE_COLUMNS
            of_columns *= tl.cdiv(depth, DEEP)
        scales_at = None
        zeros_at = None
        if SCALE_DEPTH is not None or CODES is not None:
            scales_at = group_scales_ptr + of_columns
        if E4M3_SCALES:
            scales_at = group_scales_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
            scales_at += tile_at * tl.cdiv(depth, DEEP) * STEP + tl.arange(0, STEP)
        if zeros_ptr is not None:
            zeros_at = zeros_ptr + of_columns
        steps = first_step, steps_of_part, num_steps, depth, base
        total, codes = _sums(words, rows, scales_at, zeros_at, steps, FORMAT, AT_ONCE, STEP, STAGES)
        if AT_ONCE:
            if tl.max(codes) >= 128:  # a power >= 2; or an e4m3 scale that is NaN or negative
                total, _ = _sums(words, rows, scales_at, zeros_at, steps, FORMAT, False, STEP, 1)
        total = tl.sum(total, 0).T
        if E4M3_SCALES:
            total *= 128.0
        if E4M3:
            total *= 8 / 9
            total += total - total  # infinite sums become NaN
        if group_scales_ptr is not None and SCALE_DEPTH is None and CODES is None:
            of_tile = group_scales_ptr, group, column_tile * _TILE, order, num_columns
            total *= _scales(*of_tile, 0, depth, SCALE_COLUMNS, None, 1)[None, :]
        if global_scales_ptr is not None:
            of_tile = global_scales_ptr, group, column_tile * _TILE, order, num_columns
            total *= _scales(*of_tile, 0, depth, 1, None, 1)[None, :]
        inside = which < end
        if bias_ptr is not None:
            addend = tl.load(bias_ptr + group.to(tl.int64) * num_columns + columns)
            addend = addend.to(tl.float32)[None, :]
            if bias_weights_ptr is not None:
                weight = tl.load(bias_weights_ptr + which, mask=inside, other=0.0)
                addend = addend * weight.to(tl.float32)[:, None]
            total += addend
        at = out_ptr + which.to(tl.int64)[:, None] * num_columns + columns[None, :]
        tl.store(at, total.to(DTYPE), mask=inside[:, None])

    zeros = first_row, last_row, num_rows, num_columns
    _store_zeros(out_ptr, zeros, BLOCK_ROWS, _TILE, DTYPE, False)
