"""The kernels of quantized_outer: they quantize and transpose groups of rows, and multiply them.

Tensor cores need both 8-bit operands with the contracted dimension innermost: here the rows.
`_quantize_groups_kernel` writes rows as 8-bit columns, [columns, padded]. There a group begins at
a multiple of TILE, and zeros fill its last tile; past the last group's tiles, numbers are neither
written nor read. `_quantized_outer_kernel` multiplies two such arrays, group by group.

The schedule of ragged_dot, for tiles of TILE rows, says where groups lie: `bounds_ptr` has the
groups' bounds in rows, followed by their bounds in tiles.
"""

import triton
import triton.language as tl

from triax.moe.products.any_gpu_gradient_kernels import _num_steps, _store_outer
from triax.moe.products.any_gpu_kernels import _load_block, _ordered
from triax.moe.quantization.kernels import (
    _INFINITY,
    _inverse,
    _largest_of_columns,
    _read_back,
    _round_columns,
    _scale,
)


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
    LARGEST: tl.constexpr,
    NAN: tl.constexpr,
    INFINITY: tl.constexpr,
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
    largest = _largest_of_columns(
        rows_ptr, source_ptr, num_rows, start, end, columns, end, num_columns, BLOCK_ROWS, False
    )
    special = tl.max(largest, 0) >= _INFINITY
    if special:
        largest = _largest_of_columns(
            rows_ptr, source_ptr, num_rows, start, end, columns, end, num_columns, BLOCK_ROWS, True
        )
    scale = _scale(largest, LARGEST)
    at = scales_ptr + group.to(tl.int64) * num_columns + columns
    tl.store(at, scale, mask=columns < num_columns)
    scale = _read_back(at, columns < num_columns)
    first = tl.load(bounds_ptr + NUM_GROUPS + 1 + group) * TILE
    size = tl.cdiv(end - start, TILE) * TILE
    _round_columns(
        rows_ptr,
        source_ptr,
        num_rows,
        start,
        start + size,
        columns,
        end,
        num_columns,
        _inverse(scale),
        special,
        values_ptr,
        first,
        first + size,
        padded,
        True,
        NAN,
        INFINITY,
        BLOCK_ROWS,
    )


@triton.jit
def _of_columns(scales_ptr, group, column, num_columns, COLUMNS: tl.constexpr):
    """Loads the scales of some columns of a group."""
    columns = column + tl.arange(0, COLUMNS)
    at = scales_ptr + group.to(tl.int64) * num_columns + columns
    return tl.load(at, mask=columns < num_columns, other=0.0)


@triton.jit
def _quantized_outer_kernel(
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
    TMA: tl.constexpr,
    OUT_TMA: tl.constexpr,
    BLOCK_LEFT: tl.constexpr,
    BLOCK_RIGHT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ROW_TILES: tl.constexpr,
    IMPRECISE: tl.constexpr,
):
    # One loop over all steps of all tiles of a program, as in `_group_outer_kernel`.
    left_tiles = tl.cdiv(num_left, BLOCK_LEFT)
    right_tiles = tl.cdiv(num_right, BLOCK_RIGHT)
    per_group = left_tiles * right_tiles
    steps_ptr = bounds_ptr + NUM_GROUPS + 1
    num_steps = _num_steps(bounds_ptr, per_group, NUM_GROUPS, TILE, TILE // BLOCK_ROWS)
    tile = tl.program_id(0) - tl.num_programs(0)
    group, first, second, step, stop = 0, 0, 0, -1, 0
    total = tl.zeros([BLOCK_LEFT, BLOCK_RIGHT], tl.float32)
    for _ in range(num_steps):
        step += 1
        if step == stop:
            tile += tl.num_programs(0)
            group = tile // per_group
            left_tile, right_tile = _ordered(tile % per_group, left_tiles, right_tiles, ROW_TILES)
            first = left_tile * BLOCK_LEFT
            second = right_tile * BLOCK_RIGHT
            step = tl.load(steps_ptr + group) * (TILE // BLOCK_ROWS)
            stop = tl.load(steps_ptr + group + 1) * (TILE // BLOCK_ROWS)
            if step == stop:  # no rows: loads past the end give zeros
                step = padded // BLOCK_ROWS
                stop = step + 1
        row = step * BLOCK_ROWS
        if TMA:
            x = left.load([first, row])
            y = right.load([second, row])
        else:
            x = _load_block(left, first, num_left, row, padded, BLOCK_LEFT, BLOCK_ROWS)
            y = _load_block(right, second, num_right, row, padded, BLOCK_RIGHT, BLOCK_ROWS)
        total = tl.dot(x, y.T, total, max_num_imprecise_acc=IMPRECISE)
        if step == stop - 1:
            scales = _of_columns(left_scales_ptr, group, first, num_left, BLOCK_LEFT)
            block = total * scales[:, None]
            scales = _of_columns(right_scales_ptr, group, second, num_right, BLOCK_RIGHT)
            block = (block * scales[None, :]).to(DTYPE)
            _store_outer(
                out,
                block,
                group,
                first,
                second,
                num_left,
                num_right,
                BLOCK_LEFT,
                BLOCK_RIGHT,
                OUT_TMA,
            )
            total = tl.zeros([BLOCK_LEFT, BLOCK_RIGHT], tl.float32)
