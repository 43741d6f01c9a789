"""The kernels of quantized_outer: groups of rows in 8 bits, transposed, and their product.

Tensor cores of 8 bits read both operands with what is summed innermost: here the rows.
`_quantize_groups_kernel` writes rows as columns, [columns, padded], in 8 bits. Each group begins at
a multiple of TILE there, and zeros fill its last tile up; what lies past the last group's tiles is
not written and not read. `_quantized_outer_kernel` multiplies two such arrays, group by group.

The schedule of ragged_dot, for tiles of TILE rows, says where groups lie: `bounds_ptr` has their
bounds in rows, and after these their bounds in tiles.
"""

import triton
import triton.language as tl

from triax.moe.grouped_matmul.kernels import _halves, _load_block, _ordered, _store_rows
from triax.moe.quantization.kernels import (
    _INFINITY,
    _inverse,
    _load_tile,
    _quantized,
    _scale,
    _store_tile,
    _tile_sizes,
)


@triton.jit
def _quantize_groups_kernel(
    rows_ptr,
    bounds_ptr,
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
    # One program for some columns of a group, which it reads twice: for their largest numbers, and
    # to round them. Four values along the rows are transposed as one number.
    column_blocks = tl.cdiv(num_columns, BLOCK_COLUMNS)
    group = tl.program_id(0) // column_blocks
    columns = tl.program_id(0) % column_blocks * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    start = tl.load(bounds_ptr + group)
    end = tl.load(bounds_ptr + group + 1)
    sizes = _tile_sizes(rows_ptr, start, end, columns, end, num_columns, BLOCK_ROWS, False)
    special = tl.max(tl.max(sizes, 1), 0) >= _INFINITY
    if special:
        sizes = _tile_sizes(rows_ptr, start, end, columns, end, num_columns, BLOCK_ROWS, True)
    scale = _scale(tl.max(sizes, 0), LARGEST)
    at = scales_ptr + group.to(tl.int64) * num_columns + columns
    tl.store(at, scale, mask=columns < num_columns)

    inverse = _inverse(scale)[None, :]
    out_ptr = values_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    first = tl.load(bounds_ptr + NUM_GROUPS + 1 + group) * TILE
    for step in range(0, tl.cdiv(end - start, TILE) * TILE, BLOCK_ROWS):
        which = step // 4 + tl.arange(0, BLOCK_ROWS // 4)
        words = tl.zeros([BLOCK_ROWS // 4, BLOCK_COLUMNS], tl.int32)
        for part in tl.static_range(4):
            x = _load_tile(rows_ptr, start + 4 * which + part, columns, end, num_columns)
            values = _quantized(x, inverse, special, values_ptr, NAN, INFINITY)
            words |= values.to(tl.uint8, bitcast=True).to(tl.int32) << 8 * part
        _store_tile(out_ptr, first // 4 + which, columns, padded // 4, num_columns, words, True)


@triton.jit
def _of_columns(scales_ptr, group, column, num_columns, COLUMNS: tl.constexpr):
    """The scales of some columns of a group."""
    columns = column + tl.arange(0, COLUMNS)
    at = scales_ptr + group.to(tl.int64) * num_columns + columns
    return tl.load(at, mask=columns < num_columns, other=0.0)


@triton.jit
def _num_steps(bounds_ptr, per_group, NUM_GROUPS: tl.constexpr, STEPS: tl.constexpr):
    """The steps of all tiles of this program; a group has `per_group` tiles of as many steps as it
    has tiles of rows, times STEPS, and at least one."""
    found = tl.zeros([256], tl.int32)
    for first in range(0, NUM_GROUPS, 256):
        groups = first + tl.arange(0, 256)
        inside = groups < NUM_GROUPS
        start = tl.load(bounds_ptr + groups, mask=inside, other=0)
        steps = (tl.load(bounds_ptr + groups + 1, mask=inside, other=0) - start) * STEPS
        before = groups * per_group - tl.program_id(0)
        tiles = tl.cdiv(tl.maximum(before + per_group, 0), tl.num_programs(0))
        tiles -= tl.cdiv(tl.maximum(before, 0), tl.num_programs(0))
        found += tl.where(inside, tl.maximum(steps, 1) * tiles, 0)
    return tl.sum(found, 0)


@triton.jit
def _store(
    out,
    block,
    group,
    first,
    second,
    num_left,
    num_right,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    TMA: tl.constexpr,
):
    """Stores a block of a group's left × right."""
    if TMA:
        out.store([group, first, second], block.reshape(1, LEFT, RIGHT))
    else:
        matrix = out + group.to(tl.int64) * num_left * num_right
        _store_rows(matrix, block, first, num_left, second, num_right, LEFT, RIGHT, False)


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
    # As many programs as the GPU runs at once, or one for each group and tile of its left × right
    # columns. One loop runs over all steps of all tiles of a program, so that a tile's first loads
    # are under way while the last one is stored. Triton's own flattening wants tiles of equally
    # many steps. What loads depend on changes only before them: Triton could not run them ahead of
    # the products otherwise.
    left_tiles = tl.cdiv(num_left, BLOCK_LEFT)
    right_tiles = tl.cdiv(num_right, BLOCK_RIGHT)
    per_group = left_tiles * right_tiles
    steps_ptr = bounds_ptr + NUM_GROUPS + 1
    num_steps = _num_steps(steps_ptr, per_group, NUM_GROUPS, TILE // BLOCK_ROWS)
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
            if step == stop:  # no rows: past the end there are zeros
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
            # By halves, which need half the shared memory on their way to the output.
            half: tl.constexpr = BLOCK_RIGHT // 2
            near, far = _halves(block, BLOCK_LEFT, BLOCK_RIGHT)
            middle = second + half
            _store(out, near, group, first, second, num_left, num_right, BLOCK_LEFT, half, OUT_TMA)
            _store(out, far, group, first, middle, num_left, num_right, BLOCK_LEFT, half, OUT_TMA)
            total = tl.zeros([BLOCK_LEFT, BLOCK_RIGHT], tl.float32)
