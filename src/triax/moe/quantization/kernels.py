"""The kernels of quantize: for blocks along rows, for tiles, and for transposed columns.

Numbers are multiplied by the inverse of their block's scale in float32, and rounded to 8 bits.
"""

import triton
import triton.language as tl

_INFINITY = tl.constexpr(0x7F800000)  # the bits of float32 infinity


@triton.jit
def _sizes(x):
    """Returns the sizes of floats: their bits without the sign, ordered like magnitudes."""
    if x.dtype.primitive_bitwidth == 16:
        return x.to(tl.int16, bitcast=True) & 0x7FFF
    else:
        return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _finite(sizes, dtype: tl.constexpr):
    """Replaces the sizes of infinities and NaN of `dtype` by zero."""
    if dtype == tl.bfloat16:
        infinity = 0x7F80
    elif dtype == tl.float16:
        infinity = 0x7C00
    else:
        infinity = _INFINITY
    return tl.where(sizes < infinity, sizes, 0)


@triton.jit
def _float32(sizes, dtype: tl.constexpr):
    """Converts sizes of `dtype` to sizes of float32."""
    if dtype.primitive_bitwidth == 16:
        sizes = sizes.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return sizes.to(tl.int32, bitcast=True)


@triton.jit
def _scale(largest, LARGEST: tl.constexpr):
    """Returns the scales of blocks from their largest sizes; NaN where a size is not finite."""
    size = largest.to(tl.float32, bitcast=True)
    scale = tl.div_rn(size, tl.full(size.shape, LARGEST, tl.float32))
    scale = tl.where(scale > 1.1754943508222875e-38, scale, 1.1754943508222875e-38)  # 2**-126
    return tl.where(largest < _INFINITY, scale, float("nan"))


@triton.jit
def _inverse(scale):
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def _quantized(
    x, inverse, out_ptr, SPECIAL: tl.constexpr, NAN: tl.constexpr, INFINITY: tl.constexpr
):
    """Quantizes numbers to the dtype of `out_ptr`; with SPECIAL some numbers may not be finite.

    SPECIAL takes twice the instructions, so callers have a loop with it, a loop without it, and one
    branch around both.
    """
    x = x.to(tl.float32)
    q = x * inverse
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if NAN is None:
        # Adding 1.5 * 2**23 rounds to an integer, and puts it into the lowest bits.
        whole = (q + 12582912.0).to(tl.int32, bitcast=True)
        return tl.where(inverse == inverse, whole, 0).to(tl.int8)
    else:
        codes = q.to(dtype).to(tl.uint8, bitcast=True)
        if SPECIAL:
            sizes = _sizes(x)
            known = tl.full(codes.shape, NAN, tl.uint8)
            if INFINITY != NAN:
                infinity = tl.where(x < 0, INFINITY | 0x80, INFINITY).to(tl.uint8)
                known = tl.where(sizes == _INFINITY, infinity, known)
            codes = tl.where(sizes < _INFINITY, codes, known)
        return codes.to(dtype, bitcast=True)


@triton.jit(do_not_specialize=["num_blocks"])
def _quantize_rows_kernel(
    x_ptr,
    num_blocks,
    depth,
    blocks_per_row,
    values_ptr,
    scales_ptr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    NAN: tl.constexpr,
    INFINITY: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    # A program takes BLOCK_ROWS blocks: each BLOCK numbers of a row, or a whole row if BLOCK is
    # None. Without AT_ONCE it reads the blocks twice, the second time from the cache.
    index = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = (index < num_blocks)[:, None]
    columns = tl.arange(0, BLOCK_COLUMNS)[None, :]
    if BLOCK is None:
        row = (index.to(tl.int64) * depth)[:, None]
    else:
        row = ((index // blocks_per_row).to(tl.int64) * depth)[:, None]
        columns = (index % blocks_per_row * BLOCK)[:, None] + columns
    if AT_ONCE:
        mask = inside & (columns < depth)
        x = tl.load(x_ptr + row + columns, mask=mask, other=0.0)
        largest = _float32(tl.max(_sizes(x), 1), x.dtype)
    else:
        tl.static_assert(BLOCK is None)
        largest = _largest_of_rows(x_ptr + row, inside, columns, depth, BLOCK_COLUMNS, False)
    special = tl.max(largest, 0) >= _INFINITY
    if NAN is not None:
        if special:
            if AT_ONCE:
                largest = _float32(tl.max(_finite(_sizes(x), x.dtype), 1), x.dtype)
            else:
                largest = _largest_of_rows(x_ptr + row, inside, columns, depth, BLOCK_COLUMNS, True)
    scale = _scale(largest, LARGEST)
    tl.store(scales_ptr + index, scale, mask=index < num_blocks)
    inverse = _inverse(scale)[:, None]
    if AT_ONCE:
        if special:
            values = _quantized(x, inverse, values_ptr, True, NAN, INFINITY)
        else:
            values = _quantized(x, inverse, values_ptr, False, NAN, INFINITY)
        tl.store(values_ptr + row + columns, values, mask=mask)
    elif special:
        _round_rows(
            x_ptr + row,
            inside,
            columns,
            depth,
            inverse,
            values_ptr + row,
            BLOCK_COLUMNS,
            True,
            NAN,
            INFINITY,
        )
    else:
        _round_rows(
            x_ptr + row,
            inside,
            columns,
            depth,
            inverse,
            values_ptr + row,
            BLOCK_COLUMNS,
            False,
            NAN,
            INFINITY,
        )


@triton.jit
def _round_rows(
    row_ptr,
    inside,
    columns,
    depth,
    inverse,
    values_ptr,
    STEP: tl.constexpr,
    SPECIAL: tl.constexpr,
    NAN: tl.constexpr,
    INFINITY: tl.constexpr,
):
    """Quantizes and stores rows, STEP columns at a time."""
    for first in range(0, depth, STEP):
        mask = inside & (first + columns < depth)
        x = tl.load(row_ptr + first + columns, mask=mask, other=0.0)
        values = _quantized(x, inverse, values_ptr, SPECIAL, NAN, INFINITY)
        tl.store(values_ptr + first + columns, values, mask=mask)


@triton.jit
def _largest_of_rows(row_ptr, inside, columns, depth, STEP: tl.constexpr, FINITE: tl.constexpr):
    """Returns the size of each row's largest number, reading STEP columns at a time."""
    dtype: tl.constexpr = row_ptr.dtype.element_ty
    largest = tl.zeros(
        [inside.shape[0], STEP], tl.int16 if dtype.primitive_bitwidth == 16 else tl.int32
    )
    for first in range(0, depth, STEP):
        mask = inside & (first + columns < depth)
        sizes = _sizes(tl.load(row_ptr + first + columns, mask=mask, other=0.0))
        largest = tl.maximum(largest, _finite(sizes, dtype) if FINITE else sizes)
    return _float32(tl.max(largest, 1), dtype)


@triton.jit
def _quantize_tiles_kernel(
    x_ptr,
    depth,
    width,
    values_ptr,
    scales_ptr,
    TRANSPOSED: tl.constexpr,
    LARGEST: tl.constexpr,
    NAN: tl.constexpr,
    INFINITY: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    # A program takes a tile of a group [depth, width], with one scale. It reads the tile twice,
    # BLOCK_DEPTH rows at a time; the second time from the cache.
    column_tiles = tl.cdiv(width, TILE)
    row_tiles = tl.cdiv(depth, TILE)
    tiles = column_tiles * row_tiles
    group = tl.program_id(0).to(tl.int64) // tiles
    tile = tl.program_id(0) % tiles
    row_tile = tile // column_tiles
    column_tile = tile % column_tiles
    start = row_tile * TILE
    stop = start + TILE
    columns = column_tile * TILE + tl.arange(0, TILE)
    x_ptr += group * depth * width
    largest = _largest_of_columns(
        x_ptr, None, depth, start, stop, columns, depth, width, BLOCK_DEPTH, False
    )
    special = tl.max(largest, 0) >= _INFINITY
    if NAN is not None:
        if special:
            largest = _largest_of_columns(
                x_ptr, None, depth, start, stop, columns, depth, width, BLOCK_DEPTH, True
            )
    scale = _scale(tl.full([1], 0, tl.int32) + tl.max(largest, 0), LARGEST)
    if TRANSPOSED:
        tile = column_tile * row_tiles + row_tile
    tl.store(scales_ptr + group * tiles + tile + tl.arange(0, 1), scale)
    _round_columns(
        x_ptr,
        None,
        depth,
        start,
        stop,
        columns,
        depth,
        width,
        _inverse(scale),
        special,
        values_ptr + group * depth * width,
        start,
        depth,
        depth,
        TRANSPOSED,
        NAN,
        INFINITY,
        BLOCK_DEPTH,
    )


@triton.jit
def _quantize_columns_kernel(
    x_ptr,
    depth,
    width,
    values_ptr,
    scales_ptr,
    LARGEST: tl.constexpr,
    NAN: tl.constexpr,
    INFINITY: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    # A program takes some columns of a group [depth, width]. It reads the columns twice, to find
    # their largest numbers and to round all numbers, and writes the columns as rows.
    column_tiles = tl.cdiv(width, BLOCK_COLUMNS)
    group = tl.program_id(0).to(tl.int64) // column_tiles
    columns = tl.program_id(0) % column_tiles * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    x_ptr += group * depth * width
    largest = _largest_of_columns(
        x_ptr, None, depth, 0, depth, columns, depth, width, BLOCK_DEPTH, False
    )
    special = tl.max(largest, 0) >= _INFINITY
    if NAN is not None:
        if special:
            largest = _largest_of_columns(
                x_ptr, None, depth, 0, depth, columns, depth, width, BLOCK_DEPTH, True
            )
    at = scales_ptr + group * width + columns
    tl.store(at, _scale(largest, LARGEST), mask=columns < width)
    _round_columns(
        x_ptr,
        None,
        depth,
        0,
        depth,
        columns,
        depth,
        width,
        _inverse(_read_back(at, columns < width)),
        special,
        values_ptr + group * depth * width,
        0,
        depth,
        depth,
        True,
        NAN,
        INFINITY,
        BLOCK_DEPTH,
    )


@triton.jit
def _read_back(at, mask):
    """Reloads the scales of columns that this program has stored.

    If scales stayed in registers, the compiler would give the columns the scales' layout, and
    transpose them after rounding, byte by byte.
    """
    tl.debug_barrier()
    return tl.load(at, mask=mask, other=1.0)


@triton.jit
def _largest_of_columns(
    x_ptr,
    source_ptr,
    num_source,
    start,
    stop,
    columns,
    end,
    width,
    STEP: tl.constexpr,
    FINITE: tl.constexpr,
):
    """Returns the size of each column's largest number, from row `start` to `stop`."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    integer: tl.constexpr = tl.int16 if dtype.primitive_bitwidth == 16 else tl.int32
    largest = tl.zeros([STEP, columns.shape[0]], integer)
    for first in range(start, stop, STEP):
        rows = first + tl.arange(0, STEP)
        sizes = _sizes(_load_tile(x_ptr, source_ptr, num_source, rows, columns, end, width))
        largest = tl.maximum(largest, _finite(sizes, dtype) if FINITE else sizes)
    return _float32(tl.max(largest, 0), dtype)


@triton.jit
def _load_tile(x_ptr, source_ptr, num_source, rows, columns, end, width):
    """Loads rows before `end`; zeros past it.

    With `source_ptr`, row i is the row of `x_ptr` that `source_ptr` has for i, or zeros if that is
    not among `num_source` rows.
    """
    inside = rows < end
    if source_ptr is not None:
        rows = tl.load(source_ptr + rows, mask=inside, other=-1)
        inside = (rows >= 0) & (rows < num_source)
    at = rows.to(tl.int64)[:, None] * width + columns[None, :]
    return tl.load(x_ptr + at, mask=inside[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit
def _round_columns(
    x_ptr,
    source_ptr,
    num_source,
    start,
    stop,
    columns,
    end,
    width,
    inverse,
    special,
    values_ptr,
    to,
    to_end,
    to_depth,
    TRANSPOSED: tl.constexpr,
    NAN: tl.constexpr,
    INFINITY: tl.constexpr,
    STEP: tl.constexpr,
):
    """Quantizes columns from row `start` to `stop`, and stores rows from `to` up to `to_end`.

    TRANSPOSED columns become rows of `to_depth` numbers. The last rows are rounded first, because
    they are still in the cache.
    """
    last = (tl.cdiv(stop - start, STEP) - 1) * STEP
    if special:
        for step in range(0, stop - start, STEP):
            rows = last - step + tl.arange(0, STEP)
            x = _load_tile(x_ptr, source_ptr, num_source, start + rows, columns, end, width)
            _store_tile(
                x,
                inverse,
                values_ptr,
                to + rows,
                to_end,
                to_depth,
                columns,
                width,
                TRANSPOSED,
                True,
                NAN,
                INFINITY,
            )
    else:
        for step in range(0, stop - start, STEP):
            rows = last - step + tl.arange(0, STEP)
            x = _load_tile(x_ptr, source_ptr, num_source, start + rows, columns, end, width)
            _store_tile(
                x,
                inverse,
                values_ptr,
                to + rows,
                to_end,
                to_depth,
                columns,
                width,
                TRANSPOSED,
                False,
                NAN,
                INFINITY,
            )


@triton.jit
def _store_tile(
    x,
    inverse,
    values_ptr,
    rows,
    end,
    depth,
    columns,
    width,
    TRANSPOSED: tl.constexpr,
    SPECIAL: tl.constexpr,
    NAN: tl.constexpr,
    INFINITY: tl.constexpr,
):
    if TRANSPOSED:  # before rounding: one instruction transposes 16-bit numbers
        x = tl.trans(x)
        inverse = inverse[:, None]
        at = columns.to(tl.int64)[:, None] * depth + rows[None, :]
        mask = (columns < width)[:, None] & (rows < end)[None, :]
    else:
        inverse = inverse[None, :]
        at = rows.to(tl.int64)[:, None] * width + columns[None, :]
        mask = (rows < end)[:, None] & (columns < width)[None, :]
    values = _quantized(x, inverse, values_ptr, SPECIAL, NAN, INFINITY)
    tl.store(values_ptr + at, values, mask=mask)
