"""The kernels of ragged_dot: rows times the weights of their group.

`_ragged_dot_schedule_kernel` cuts groups into row tiles, and combines row tiles into sets.
`_ragged_dot_kernel` takes tiles of rows × columns from this schedule. Group sizes are clipped when
they are read, so that no sizes, however wrong, lead out of bounds. The first group need not begin
at row 0. Result rows before the first group and past the last group are zero.

With TMA, operands are descriptors, otherwise pointers. The hardware stops at the end of the array,
but must stop at the end of a group. So descriptors by `bounded_by_group` have three dimensions for
rows. With G = `_GROUP_END`, row r of a group that ends at E has the indices [G, E, G - (E - r)].
The last of them has the bound G, which it reaches at r = E: from there on loads give zeros, and
stores do nothing. The last two indices, with the stride of a row, lead to row G + r; the first
leads back by G rows, as its large stride makes the address wrap around.
"""

import triton
import triton.language as tl

_GROUP_END = tl.constexpr(1 << 30)
_MOST_OF_SET = tl.constexpr(64)  # more than the row tiles of any set


@triton.jit(do_not_specialize=["num_rows"])
def _ragged_dot_schedule_kernel(
    group_sizes_ptr,
    first_row_ptr,
    num_rows,
    tiles_ptr,
    bounds_ptr,
    NUM_GROUPS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ROW_TILES: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    # One program per group. It sums rows and tiles of the groups before it, and writes its tiles in
    # sets of ROW_TILES. The tiles of a set share weights, so a group's last set may be smaller.
    group = tl.program_id(0)
    first_row = 0
    if first_row_ptr is not None:
        first_row = tl.minimum(tl.maximum(tl.load(first_row_ptr), 0), num_rows)
    rows = tl.zeros([1], tl.int64) + first_row
    tiles = tl.zeros([1], tl.int32)
    for first in range(0, group, BLOCK_GROUPS):
        before = first + tl.arange(0, BLOCK_GROUPS)
        size = tl.load(group_sizes_ptr + before, mask=before < group, other=0)
        size = tl.maximum(size, 0).to(tl.int64)
        end = rows + tl.cumsum(size, 0)
        filled = tl.minimum(end, num_rows) - tl.minimum(end - size, num_rows)
        tiles += tl.sum(tl.cdiv(filled, BLOCK_ROWS), 0).to(tl.int32)
        rows += tl.sum(size, 0)
    first_tile = tl.sum(tiles, 0)
    start = tl.sum(tl.minimum(rows, num_rows), 0)
    size = tl.maximum(tl.load(group_sizes_ptr + group), 0)
    end = tl.minimum(start + size, num_rows).to(tl.int32)
    start = start.to(tl.int32)
    num_tiles = tl.cdiv(end - start, BLOCK_ROWS)
    tile_bounds_ptr = bounds_ptr + NUM_GROUPS + 1
    tl.store(bounds_ptr + group + 1, end)
    tl.store(tile_bounds_ptr + group + 1, first_tile + num_tiles)
    if group == 0:
        tl.store(bounds_ptr, start)
        tl.store(tile_bounds_ptr, 0)
        tl.store(tiles_ptr + 2, start)
    if group == NUM_GROUPS - 1:
        tl.store(tiles_ptr, first_tile + num_tiles)
        tl.store(tiles_ptr + 1, end)
    for first in range(0, num_tiles, BLOCK_TILES):
        tile = first + tl.arange(0, BLOCK_TILES)
        record = tiles_ptr + 4 * (1 + first_tile + tile)
        inside = tile < num_tiles
        first_of_set = tile // ROW_TILES * ROW_TILES
        of_set = tl.minimum(num_tiles - first_of_set, ROW_TILES)
        tl.store(record, tl.zeros_like(tile) + group, mask=inside)
        tl.store(record + 1, start + first_of_set * BLOCK_ROWS, mask=inside)
        tl.store(record + 2, tl.zeros_like(tile) + end, mask=inside)
        place = (tile - first_of_set) * _MOST_OF_SET + of_set
        tl.store(record + 3, place, mask=inside)


@triton.jit
def _tile(tiles_ptr, tile, num_column_tiles, BLOCK_ROWS: tl.constexpr):
    """Returns the group, first row, group's end and column tile of a tile of rows × columns.

    All row tiles of a set come before the next column tile, so that weights stay in L2.
    """
    # The records of a set's row tiles differ only in `place`: the index in the set, and its size.
    row_tile = tile // num_column_tiles
    record = tiles_ptr + 4 * (1 + row_tile)
    group = tl.load(record)
    row = tl.load(record + 1)
    end = tl.load(record + 2)
    place = tl.load(record + 3)
    of_set = place % _MOST_OF_SET
    in_set = tile - (row_tile - place // _MOST_OF_SET) * num_column_tiles
    return group, row + in_set % of_set * BLOCK_ROWS, end, in_set // of_set


@triton.jit
def _ordered(tile, num_row_tiles, num_column_tiles, ROW_TILES: tl.constexpr):
    """Returns a tile's row and column tile; ROW_TILES tiles in a row share columns, kept in L2."""
    per_set = ROW_TILES * num_column_tiles
    first = tile // per_set * ROW_TILES
    row_tiles = tl.minimum(num_row_tiles - first, ROW_TILES)
    return first + tile % per_set % row_tiles, tile % per_set // row_tiles


@triton.jit
def _load_block(pointer, row, end, column, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Loads a block of a row-major array, zeros from row `end` on and past the last column."""
    rows = row + tl.arange(0, ROWS)
    columns = column + tl.arange(0, COLUMNS)
    mask = (rows < end)[:, None] & (columns < num_columns)[None, :]
    offset = rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    return tl.load(pointer + offset, mask=mask, other=0.0)


@triton.jit
def _store_rows(
    out,
    block,
    row,
    end,
    column,
    num_columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TMA: tl.constexpr,
):
    """Stores a block of rows, up to row `end` and the last column."""
    if TMA:
        bounded = _GROUP_END - (end - row)
        out.store([_GROUP_END, end, bounded, column], block.reshape(1, 1, ROWS, COLUMNS))
    else:
        rows = row + tl.arange(0, ROWS)
        columns = column + tl.arange(0, COLUMNS)
        mask = (rows < end)[:, None] & (columns < num_columns)[None, :]
        offset = rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
        tl.store(out + offset, block, mask=mask)


@triton.jit
def _num_outside(first_row, last_row, num_rows, ROWS: tl.constexpr):
    """Returns the number of row tiles before and past the groups."""
    return tl.cdiv(first_row, ROWS) + tl.cdiv(num_rows - last_row, ROWS)


@triton.jit
def _outside(row_tile, first_row, last_row, num_rows, ROWS: tl.constexpr):
    """Returns the first row of a row tile before or past the groups, and the end of such rows."""
    before = tl.cdiv(first_row, ROWS)
    is_before = row_tile < before
    row = tl.where(is_before, 0, last_row - before * ROWS) + row_tile * ROWS
    return row, tl.where(is_before, first_row, num_rows)


@triton.jit
def _store_zeros(
    out,
    sizes,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DTYPE: tl.constexpr,
    TMA: tl.constexpr,
):
    """Stores zeros in rows before and past the groups."""
    first_row, last_row, num_rows, num_columns = sizes
    num_column_tiles = tl.cdiv(num_columns, COLUMNS)
    num_empty = _num_outside(first_row, last_row, num_rows, ROWS) * num_column_tiles
    zeros = tl.zeros([ROWS, COLUMNS], DTYPE)
    for tile in range(tl.program_id(0), num_empty, tl.num_programs(0)):
        row, end = _outside(tile // num_column_tiles, first_row, last_row, num_rows, ROWS)
        column = tile % num_column_tiles * COLUMNS
        _store_rows(out, zeros, row, end, column, num_columns, ROWS, COLUMNS, TMA)


@triton.jit
def _halves(block, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns the left and the right half of a block."""
    return block.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1).split()


@triton.jit
def _row_scales(pointer, row, end, depth, start, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Loads the scales of some rows: of whole rows, or of the BLOCK of depth at `start`."""
    which = row + tl.arange(0, ROWS)
    at = pointer + which
    if BLOCK is not None:
        at = pointer + which.to(tl.int64) * tl.cdiv(depth, BLOCK) + start // BLOCK
    return tl.load(at, mask=which < end, other=0.0).to(tl.float32)


@triton.jit
def _column_scales(
    pointer,
    group,
    column,
    num_columns,
    depth,
    start,
    COLUMNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """Loads the scales of a block of a group's columns, [COLUMNS] or [1]: of the whole depth, or of
    the BLOCK_DEPTH at `start`. BLOCK_COLUMNS columns share a scale; None: all of a group's do."""
    if BLOCK_COLUMNS is None:
        at = pointer + group + tl.zeros([1], tl.int32)
        mask = tl.full([1], True, tl.int1)
    else:
        same: tl.constexpr = BLOCK_COLUMNS % COLUMNS == 0
        which = column + tl.arange(0, 1 if same else COLUMNS)
        blocks = tl.cdiv(num_columns, BLOCK_COLUMNS)
        mask = which < num_columns
        at = pointer
        if BLOCK_DEPTH is None:
            at += group.to(tl.int64) * blocks + which // BLOCK_COLUMNS
        else:
            deep = tl.cdiv(depth, BLOCK_DEPTH)
            at += group.to(tl.int64) * blocks * deep
            if TRANSPOSED:
                at += which // BLOCK_COLUMNS * deep + start // BLOCK_DEPTH
            else:
                at += start // BLOCK_DEPTH * blocks + which // BLOCK_COLUMNS
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def _ragged_dot_kernel(
    rows,
    weights,
    tiles_ptr,
    row_scales_ptr,
    group_scales_ptr,
    bias_ptr,
    bias_weights_ptr,
    num_rows,
    depth,
    num_columns,
    out,
    TRANSPOSED: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    IMPRECISE: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    WEIGHT_COLUMNS: tl.constexpr,
    WEIGHT_DEPTH: tl.constexpr,
):
    # There are as many programs as the GPU runs at once, or one per tile. With TMA the loops over
    # tiles and depth are flattened into one, so that a tile is stored while the next tile loads.
    num_row_tiles = tl.load(tiles_ptr)
    last_row = tl.load(tiles_ptr + 1)
    first_row = tl.load(tiles_ptr + 2)
    num_column_tiles = tl.cdiv(num_columns, BLOCK_COLUMNS)
    num_tiles = num_row_tiles * num_column_tiles
    half: tl.constexpr = BLOCK_COLUMNS // 2
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=TMA):
        group, row, end, column_tile = _tile(tiles_ptr, tile, num_column_tiles, BLOCK_ROWS)
        column = column_tile * BLOCK_COLUMNS
        if group_scales_ptr is not None:
            of_weights = group_scales_ptr, group, column, num_columns, depth
        total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
        for start in range(0, depth, BLOCK_DEPTH):
            if TMA:
                x = rows.load([row, start])
                if TRANSPOSED:
                    w = weights.load([group, column, start]).reshape(BLOCK_COLUMNS, BLOCK_DEPTH).T
                else:
                    w = weights.load([group, start, column]).reshape(BLOCK_DEPTH, BLOCK_COLUMNS)
            else:
                matrix = weights + group.to(tl.int64) * depth * num_columns
                x = _load_block(rows, row, end, start, depth, BLOCK_ROWS, BLOCK_DEPTH)
                if TRANSPOSED:
                    w = _load_block(
                        matrix, column, num_columns, start, depth, BLOCK_COLUMNS, BLOCK_DEPTH
                    ).T
                else:
                    w = _load_block(
                        matrix, start, depth, column, num_columns, BLOCK_DEPTH, BLOCK_COLUMNS
                    )
            if w.dtype.primitive_bitwidth < x.dtype.primitive_bitwidth:
                if w.dtype == tl.float8e5:  # a direct cast makes inf and NaN finite
                    w = w.to(tl.float16)
                w = w.to(x.dtype)
            if ROW_BLOCK is None and WEIGHT_DEPTH is None:
                total = tl.dot(
                    x, w, total, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE
                )
            else:  # blocks of the depth have scales, which load while tensor cores multiply
                scale = tl.full([1, 1], 1.0, tl.float32)
                if ROW_BLOCK is not None:
                    scale = _row_scales(
                        row_scales_ptr, row, end, depth, start, BLOCK_ROWS, ROW_BLOCK
                    )[:, None]
                if WEIGHT_DEPTH is not None:
                    scale *= _column_scales(
                        *of_weights, start, BLOCK_COLUMNS, WEIGHT_COLUMNS, WEIGHT_DEPTH, TRANSPOSED
                    )[None, :]
                total += tl.dot(x, w, input_precision=PRECISION) * scale
        if bias_ptr is not None:  # loaded before the wait for the last product
            # A half has no more elements than a program has threads, so each thread loads those
            # that it needs. Of a whole block, threads would exchange elements, and wait for that
            # before the next product.
            which = column + tl.arange(0, half)
            at = bias_ptr + group.to(tl.int64) * num_columns + which
            near = tl.load(at, mask=which < num_columns, other=0.0)
            far = tl.load(at + half, mask=which + half < num_columns, other=0.0)
            bias_weight = tl.full([1], 1.0, tl.float32)
            if bias_weights_ptr is not None:
                rows_of_block = row + tl.arange(0, BLOCK_ROWS)
                bias_weight = tl.load(
                    bias_weights_ptr + rows_of_block, mask=rows_of_block < end, other=0.0
                )
        if row_scales_ptr is not None and ROW_BLOCK is None:
            total *= _row_scales(row_scales_ptr, row, end, depth, 0, BLOCK_ROWS, None)[:, None]
        if group_scales_ptr is not None and WEIGHT_DEPTH is None:
            total *= _column_scales(
                *of_weights, 0, BLOCK_COLUMNS, WEIGHT_COLUMNS, None, TRANSPOSED
            )[None, :]
        # Stored in two halves, one after the other, for which half the shared memory is enough.
        left, right = _halves(total, BLOCK_ROWS, BLOCK_COLUMNS)
        if bias_ptr is not None:
            weight = bias_weight.to(tl.float32)[:, None]
            left += near.to(tl.float32)[None, :] * weight
            right += far.to(tl.float32)[None, :] * weight
        _store_rows(out, left.to(DTYPE), row, end, column, num_columns, BLOCK_ROWS, half, TMA)
        _store_rows(
            out, right.to(DTYPE), row, end, column + half, num_columns, BLOCK_ROWS, half, TMA
        )

    zeros = first_row, last_row, num_rows, num_columns
    _store_zeros(out, zeros, BLOCK_ROWS, half, DTYPE, TMA)
