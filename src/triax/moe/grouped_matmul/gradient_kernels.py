"""The kernels of the gradients of ragged_dot's weights and bias: sums over the rows of a group."""

import triton
import triton.language as tl

from triax.moe.grouped_matmul.kernels import _GROUP_END, _load_block, _ordered, _store_rows


@triton.jit
def _outer(
    left,
    right,
    weights_ptr,
    start,
    end,
    first,
    second,
    num_left,
    num_right,
    SUM: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_LEFT: tl.constexpr,
    BLOCK_RIGHT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """A tile of left × right, and the rows of SUM ("left", "right" or None) times their weights."""
    total = tl.zeros([BLOCK_LEFT, BLOCK_RIGHT], tl.float32)
    added = tl.zeros([BLOCK_ROWS, BLOCK_LEFT if SUM == "left" else BLOCK_RIGHT], tl.float32)
    for row in range(start, end, BLOCK_ROWS):
        # Both sides are zero past the group's end: zero times another group's NaN is NaN.
        if TMA:
            bounded = _GROUP_END - (end - row)
            x = left.load([_GROUP_END, end, bounded, first]).reshape(BLOCK_ROWS, BLOCK_LEFT)
            y = right.load([_GROUP_END, end, bounded, second]).reshape(BLOCK_ROWS, BLOCK_RIGHT)
        else:
            x = _load_block(left, row, end, first, num_left, BLOCK_ROWS, BLOCK_LEFT)
            y = _load_block(right, row, end, second, num_right, BLOCK_ROWS, BLOCK_RIGHT)
        total = tl.dot(x.T, y, total, input_precision=PRECISION)
        if SUM is not None:
            added += _weighted(x if SUM == "left" else y, weights_ptr, row, end, BLOCK_ROWS)
    return total, tl.sum(added, 0)


@triton.jit
def _weighted(block, weights_ptr, row, end, ROWS: tl.constexpr):
    """A block of rows, from `row` on, in float32, times their weights if there are some."""
    block = block.to(tl.float32)
    if weights_ptr is not None:
        which = row + tl.arange(0, ROWS)
        weight = tl.load(weights_ptr + which, mask=which < end, other=0.0)
        block *= weight.to(tl.float32)[:, None]
    return block


@triton.jit
def _group_outer_kernel(
    left,
    right,
    weights_ptr,
    bounds_ptr,
    num_left,
    num_right,
    out,
    sums_ptr,
    SUM: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_LEFT: tl.constexpr,
    BLOCK_RIGHT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ROW_TILES: tl.constexpr,
):
    # One program for each group and tile of its left × right columns: the rows are summed up in
    # their order. Of SUM, the tiles at the edge of the other side sum up the rows themselves.
    left_tiles = tl.cdiv(num_left, BLOCK_LEFT)
    right_tiles = tl.cdiv(num_right, BLOCK_RIGHT)
    group = tl.program_id(0) // (left_tiles * right_tiles)
    tile = tl.program_id(0) % (left_tiles * right_tiles)
    left_tile, right_tile = _ordered(tile, left_tiles, right_tiles, ROW_TILES)
    first = left_tile * BLOCK_LEFT
    second = right_tile * BLOCK_RIGHT
    start = tl.load(bounds_ptr + group)
    end = tl.load(bounds_ptr + group + 1)
    if SUM is None:
        at_edge: tl.constexpr = False
    else:
        at_edge = (right_tile if SUM == "left" else left_tile) == 0
    if at_edge:
        total, sums = _outer(
            left,
            right,
            weights_ptr,
            start,
            end,
            first,
            second,
            num_left,
            num_right,
            SUM,
            PRECISION,
            TMA,
            BLOCK_LEFT,
            BLOCK_RIGHT,
            BLOCK_ROWS,
        )
        num_columns = num_left if SUM == "left" else num_right
        column = first if SUM == "left" else second
        columns = column + tl.arange(0, BLOCK_LEFT if SUM == "left" else BLOCK_RIGHT)
        at = sums_ptr + group.to(tl.int64) * num_columns + columns
        tl.store(at, sums.to(sums_ptr.dtype.element_ty), mask=columns < num_columns)
    else:
        total, _ = _outer(
            left,
            right,
            None,
            start,
            end,
            first,
            second,
            num_left,
            num_right,
            None,
            PRECISION,
            TMA,
            BLOCK_LEFT,
            BLOCK_RIGHT,
            BLOCK_ROWS,
        )
    block = total.to(DTYPE)
    if TMA:
        out.store([group, first, second], block.reshape(1, BLOCK_LEFT, BLOCK_RIGHT))
    else:
        matrix = out + group.to(tl.int64) * num_left * num_right
        _store_rows(
            matrix, block, first, num_left, second, num_right, BLOCK_LEFT, BLOCK_RIGHT, False
        )


@triton.jit
def _group_sum_kernel(
    rows_ptr,
    weights_ptr,
    bounds_ptr,
    num_columns,
    out_ptr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    # One program for each group and some columns: the rows are summed up in their order.
    column_blocks = tl.cdiv(num_columns, BLOCK_COLUMNS)
    group = tl.program_id(0) // column_blocks
    column = tl.program_id(0) % column_blocks * BLOCK_COLUMNS
    start = tl.load(bounds_ptr + group)
    end = tl.load(bounds_ptr + group + 1)
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for row in range(start, end, BLOCK_ROWS):
        block = _load_block(rows_ptr, row, end, column, num_columns, BLOCK_ROWS, BLOCK_COLUMNS)
        total += _weighted(block, weights_ptr, row, end, BLOCK_ROWS)
    columns = column + tl.arange(0, BLOCK_COLUMNS)
    out = tl.sum(total, 0).to(out_ptr.dtype.element_ty)
    at = out_ptr + group.to(tl.int64) * num_columns + columns
    tl.store(at, out, mask=columns < num_columns)
