"""The kernels for the gradients of ragged_dot's weights and bias: sums over a group's rows.

Tensor cores need both 8-bit operands with the contracted dimension innermost: here the rows.
`_quantize_groups_kernel` writes rows as 8-bit columns, [columns, padded]. There a group begins at
a multiple of TILE, and zeros fill its last tile; past the last group's tiles, numbers are neither
written nor read. The schedule of ragged_dot, for tiles of TILE rows, says where groups lie:
`bounds_ptr` has the groups' bounds in rows, followed by their bounds in tiles.
"""

import triton
import triton.language as tl

from triax.moe.products.any_gpu_kernels import (
    _GROUP_END,
    _halves,
    _load_block,
    _ordered,
    _store_rows,
)
from triax.moe.quantization.kernels import (
    _inverse,
    _largest_of_columns,
    _read_back,
    _round_columns,
    _scale,
)


@triton.jit
def _num_steps(
    bounds_ptr, per_group, NUM_GROUPS: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr
):
    """Returns the number of steps of this program's tiles. A group has `per_group` tiles; a tile
    takes STEPS steps for each ROWS of the group's rows, and at least one step."""
    total = tl.zeros([256], tl.int32)
    for first in range(0, NUM_GROUPS, 256):
        groups = first + tl.arange(0, 256)
        inside = groups < NUM_GROUPS
        start = tl.load(bounds_ptr + groups, mask=inside, other=0)
        size = tl.load(bounds_ptr + groups + 1, mask=inside, other=0) - start
        steps = tl.cdiv(size, ROWS) * STEPS
        before = groups * per_group - tl.program_id(0)
        tiles = tl.cdiv(tl.maximum(before + per_group, 0), tl.num_programs(0))
        tiles -= tl.cdiv(tl.maximum(before, 0), tl.num_programs(0))
        total += tl.where(inside, tl.maximum(steps, 1) * tiles, 0)
    return tl.sum(total, 0)


@triton.jit
def _quantize_groups_kernel(
    rows_ptr,
    source_ptr,
    bounds_ptr,
    num_rows,
    num_columns,
    padded,
    values_ptr,
    scales_ptr,
    NUM_GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    # A program takes some columns of a group, and reads them twice: to find their largest numbers,
    # and to round them. Row i is row i of `rows_ptr`, or the row that `source_ptr` names for it.
    column_blocks = tl.cdiv(num_columns, BLOCK_COLUMNS)
    group = tl.program_id(0) // column_blocks
    columns = tl.program_id(0) % column_blocks * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    start = tl.load(bounds_ptr + group)
    end = tl.load(bounds_ptr + group + 1)
    source = rows_ptr, source_ptr, num_rows, end, num_columns
    dtype: tl.constexpr = values_ptr.dtype.element_ty
    largest, special = _largest_of_columns(source, start, end, columns, dtype, BLOCK_ROWS)
    scale = _scale(largest, dtype)
    at = scales_ptr + group.to(tl.int64) * num_columns + columns
    tl.store(at, scale, mask=columns < num_columns)
    scale = _read_back(at, columns < num_columns)
    first = tl.load(bounds_ptr + NUM_GROUPS + 1 + group) * TILE
    size = tl.cdiv(end - start, TILE) * TILE
    stop, inverse = start + size, _inverse(scale)
    target = values_ptr, first, first + size, padded
    _round_columns(source, start, stop, columns, inverse, special, target, True, BLOCK_ROWS)


@triton.jit
def _of_columns(scales_ptr, group, column, num_columns, COLUMNS: tl.constexpr):
    """Loads the scales of some columns of a group."""
    columns = column + tl.arange(0, COLUMNS)
    at = scales_ptr + group.to(tl.int64) * num_columns + columns
    return tl.load(at, mask=columns < num_columns, other=0.0)


@triton.jit
def _group_outer_kernel(
    left,
    right,
    bounds_ptr,
    left_scales_ptr,
    right_scales_ptr,
    num_left,
    num_right,
    padded,
    out,
    NUM_GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    IMPRECISE: tl.constexpr,
    TMA: tl.constexpr,
    OUT_TMA: tl.constexpr,
    BLOCK_LEFT: tl.constexpr,
    BLOCK_RIGHT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ROW_TILES: tl.constexpr,
):
    # There are as many programs as the GPU runs at once, or one per tile of a group's left × right
    # columns. One loop runs over the steps of all tiles of a program, so that a tile is stored
    # while the next tile loads; Triton's own flattening needs tiles with equally many steps. Load
    # addresses change only right before the loads: otherwise Triton could not run loads ahead of
    # products. A tile's rows are summed in order.
    # With scales both sides are 8-bit columns, [columns, padded], in which groups begin at tiles.
    half: tl.constexpr = BLOCK_RIGHT // 2
    left_tiles = tl.cdiv(num_left, BLOCK_LEFT)
    right_tiles = tl.cdiv(num_right, BLOCK_RIGHT)
    per_group = left_tiles * right_tiles
    num_steps = _num_steps(bounds_ptr, per_group, NUM_GROUPS, TILE, TILE // BLOCK_ROWS)
    tile = tl.program_id(0) - tl.num_programs(0)
    group, first, second, row, end = 0, 0, 0, 0, 0
    total = tl.zeros([BLOCK_LEFT, BLOCK_RIGHT], tl.float32)
    for _ in range(num_steps):
        row += BLOCK_ROWS
        if row >= end:
            tile += tl.num_programs(0)
            group = tile // per_group
            left_tile, right_tile = _ordered(tile % per_group, left_tiles, right_tiles, ROW_TILES)
            first = left_tile * BLOCK_LEFT
            second = right_tile * BLOCK_RIGHT
            if left_scales_ptr is None:
                row = tl.load(bounds_ptr + group)
                end = tl.load(bounds_ptr + group + 1)
            else:
                tiles_ptr = bounds_ptr + NUM_GROUPS + 1
                row = tl.load(tiles_ptr + group) * TILE
                end = tl.load(tiles_ptr + group + 1) * TILE
                if row == end:  # no rows: loads past the end give zeros
                    row = padded
                    end = padded + BLOCK_ROWS
        if left_scales_ptr is not None:
            if TMA:
                x = left.load([first, row])
                y = right.load([second, row])
            else:
                x = _load_block(left, first, num_left, row, padded, BLOCK_LEFT, BLOCK_ROWS)
                y = _load_block(right, second, num_right, row, padded, BLOCK_RIGHT, BLOCK_ROWS)
            y = y.T
        # Both sides are zero past the group's end: zero times another group's NaN is NaN.
        elif TMA:
            bounded = _GROUP_END - (end - row)
            x = left.load([_GROUP_END, end, bounded, first]).reshape(BLOCK_ROWS, BLOCK_LEFT)
            y = right.load([_GROUP_END, end, bounded, second]).reshape(BLOCK_ROWS, BLOCK_RIGHT)
        else:
            x = _load_block(left, row, end, first, num_left, BLOCK_ROWS, BLOCK_LEFT)
            y = _load_block(right, row, end, second, num_right, BLOCK_ROWS, BLOCK_RIGHT)
        if left_scales_ptr is None:
            x = x.T
        total = tl.dot(x, y, total, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE)
        if row + BLOCK_ROWS >= end:
            block = total
            if left_scales_ptr is not None:
                scales = _of_columns(left_scales_ptr, group, first, num_left, BLOCK_LEFT)
                block *= scales[:, None]
                scales = _of_columns(right_scales_ptr, group, second, num_right, BLOCK_RIGHT)
                block *= scales[None, :]
            # Stored in two halves, for which half the shared memory is enough.
            near, far = _halves(block.to(DTYPE), BLOCK_LEFT, BLOCK_RIGHT)
            if OUT_TMA:
                out.store([group, first, second], near.reshape(1, BLOCK_LEFT, half))
                out.store([group, first, second + half], far.reshape(1, BLOCK_LEFT, half))
            else:
                matrix = out + group.to(tl.int64) * num_left * num_right
                _store_rows(
                    matrix, near, first, num_left, second, num_right, BLOCK_LEFT, half, False
                )
                _store_rows(
                    matrix, far, first, num_left, second + half, num_right, BLOCK_LEFT, half, False
                )
            total = tl.zeros([BLOCK_LEFT, BLOCK_RIGHT], tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def _group_sum_kernel(
    rows_ptr,
    weights_ptr,
    bias_ptr,
    bounds_ptr,
    num_rows,
    num_columns,
    parts,
    sums_ptr,
    products_ptr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    # A program takes a part of a group's rows and some columns. It sums the rows, each times its
    # weight. With a bias it also computes each row's product with the bias, from the same read.
    column_blocks = tl.cdiv(num_columns, BLOCK_COLUMNS)
    part = (tl.program_id(0) // column_blocks).to(tl.int64)
    block_of_columns = tl.program_id(0) % column_blocks
    group = part // parts
    columns = block_of_columns * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = columns < num_columns
    start = tl.load(bounds_ptr + group)
    end = tl.load(bounds_ptr + group + 1)
    size = tl.cdiv(end - start, parts)
    start += (part % parts).to(tl.int32) * size
    end = tl.minimum(start + size, end)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + group * num_columns + columns, mask=inside, other=0.0)
        bias = bias.to(tl.float32)[None, :]
        products_ptr += block_of_columns.to(tl.int64) * num_rows
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for row in range(start, end, BLOCK_ROWS):
        which = row + tl.arange(0, BLOCK_ROWS)
        at = rows_ptr + which.to(tl.int64)[:, None] * num_columns + columns[None, :]
        block = tl.load(at, mask=(which < end)[:, None] & inside[None, :], other=0.0)
        block = block.to(tl.float32)
        if bias_ptr is not None:
            tl.store(products_ptr + which, tl.sum(block * bias, 1), mask=which < end)
        if weights_ptr is not None:
            weight = tl.load(weights_ptr + which, mask=which < end, other=0.0)
            block *= weight.to(tl.float32)[:, None]
        total += block
    out = tl.sum(total, 0).to(sums_ptr.dtype.element_ty)
    tl.store(sums_ptr + part * num_columns + columns, out, mask=inside)
