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
def _scale(largest, dtype: tl.constexpr):
    """Returns scales of blocks of `dtype` from their largest sizes; NaN where one is not finite."""
    LARGEST: tl.constexpr = (
        127.0 if dtype == tl.int8 else 448.0 if dtype == tl.float8e4nv else 57344.0
    )
    size = largest.to(tl.float32, bitcast=True)
    scale = tl.div_rn(size, tl.full(size.shape, LARGEST, tl.float32))
    scale = tl.where(scale > 1.1754943508222875e-38, scale, 1.1754943508222875e-38)  # 2**-126
    return tl.where(largest < _INFINITY, scale, float("nan"))


@triton.jit
def _inverse(scale):
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def _quantized(x, inverse, out_ptr, SPECIAL: tl.constexpr):
    """Quantizes numbers to the dtype of `out_ptr`; with SPECIAL some numbers may not be finite.

    SPECIAL takes twice the instructions, so callers have a loop with it, a loop without it, and one
    branch around both.
    """
    x = x.to(tl.float32)
    q = x * inverse
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if dtype == tl.int8:
        # Adding 1.5 * 2**23 rounds to an integer, and puts it into the lowest bits.
        whole = (q + 12582912.0).to(tl.int32, bitcast=True)
        return tl.where(inverse == inverse, whole, 0).to(tl.int8)
    else:
        codes = q.to(dtype).to(tl.uint8, bitcast=True)
        if SPECIAL:
            sizes = _sizes(x)
            if dtype == tl.float8e4nv:  # it has no infinity
                known = tl.full(codes.shape, 0x7F, tl.uint8)
            else:
                infinity = tl.where(x < 0, 0xFC, 0x7C).to(tl.uint8)
                known = tl.where(sizes == _INFINITY, infinity, tl.full(codes.shape, 0x7E, tl.uint8))
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
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    # A program takes BLOCK_ROWS blocks: each BLOCK numbers of a row, or a whole row if BLOCK is
    # None. Without AT_ONCE it reads the blocks twice, the second time from the cache.
    dtype: tl.constexpr = values_ptr.dtype.element_ty
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
    if dtype != tl.int8:
        if special:
            if AT_ONCE:
                largest = _float32(tl.max(_finite(_sizes(x), x.dtype), 1), x.dtype)
            else:
                largest = _largest_of_rows(x_ptr + row, inside, columns, depth, BLOCK_COLUMNS, True)
    scale = _scale(largest, dtype)
    tl.store(scales_ptr + index, scale, mask=index < num_blocks)
    inverse = _inverse(scale)[:, None]
    if AT_ONCE:
        if special:
            values = _quantized(x, inverse, values_ptr, True)
        else:
            values = _quantized(x, inverse, values_ptr, False)
        tl.store(values_ptr + row + columns, values, mask=mask)
    elif special:
        _round_rows(
            x_ptr + row, inside, columns, depth, inverse, values_ptr + row, BLOCK_COLUMNS, True
        )
    else:
        _round_rows(
            x_ptr + row, inside, columns, depth, inverse, values_ptr + row, BLOCK_COLUMNS, False
        )


@triton.jit
def _round_rows(
    row_ptr, inside, columns, depth, inverse, values_ptr, STEP: tl.constexpr, SPECIAL: tl.constexpr
):
    """Quantizes and stores rows, STEP columns at a time."""
    for first in range(0, depth, STEP):
        mask = inside & (first + columns < depth)
        x = tl.load(row_ptr + first + columns, mask=mask, other=0.0)
        values = _quantized(x, inverse, values_ptr, SPECIAL)
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
    TILE: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    # A program takes a tile of a group [depth, width], with one scale. It reads the tile twice,
    # BLOCK_DEPTH rows at a time; the second time from the cache.
    dtype: tl.constexpr = values_ptr.dtype.element_ty
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
    source = x_ptr + group * depth * width, None, depth, depth, width
    largest, special = _largest_of_columns(source, start, stop, columns, dtype, BLOCK_DEPTH)
    scale = _scale(tl.full([1], 0, tl.int32) + tl.max(largest, 0), dtype)
    if TRANSPOSED:
        tile = column_tile * row_tiles + row_tile
    tl.store(scales_ptr + group * tiles + tile + tl.arange(0, 1), scale)
    inverse = _inverse(scale)
    target = values_ptr + group * depth * width, start, depth, depth
    _round_columns(source, start, stop, columns, inverse, special, target, TRANSPOSED, BLOCK_DEPTH)


@triton.jit
def _quantize_columns_kernel(
    x_ptr,
    depth,
    width,
    values_ptr,
    scales_ptr,
    BLOCK_DEPTH: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    # A program takes some columns of a group [depth, width]. It reads the columns twice, to find
    # their largest numbers and to round all numbers, and writes the columns as rows.
    dtype: tl.constexpr = values_ptr.dtype.element_ty
    column_tiles = tl.cdiv(width, BLOCK_COLUMNS)
    group = tl.program_id(0).to(tl.int64) // column_tiles
    columns = tl.program_id(0) % column_tiles * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    source = x_ptr + group * depth * width, None, depth, depth, width
    largest, special = _largest_of_columns(source, 0, depth, columns, dtype, BLOCK_DEPTH)
    at = scales_ptr + group * width + columns
    tl.store(at, _scale(largest, dtype), mask=columns < width)
    inverse = _inverse(_read_back(at, columns < width))
    target = values_ptr + group * depth * width, 0, depth, depth
    _round_columns(source, 0, depth, columns, inverse, special, target, True, BLOCK_DEPTH)


@triton.jit
def _read_back(at, mask):
    """Reloads the scales of columns that this program has stored.

    If scales stayed in registers, the compiler would give the columns the scales' layout, and
    transpose them after rounding, byte by byte.
    """
    tl.debug_barrier()
    return tl.load(at, mask=mask, other=1.0)


# In these, `source` is x_ptr, source_ptr, num_source, end and width. Rows are read before `end`,
# and zeros past it. With `source_ptr`, row i is the row of `x_ptr` that `source_ptr` has for i, or
# zeros if that is not among `num_source` rows.


@triton.jit
def _largest_of_columns(source, start, stop, columns, to: tl.constexpr, STEP: tl.constexpr):
    """Returns the size of each column's largest number, and whether there was one not finite.

    If so, the largest is that of the finite numbers, unless `to`, the dtype to round to, is int8.
    """
    largest = _largest_size(source, start, stop, columns, STEP, False)
    special = tl.max(largest, 0) >= _INFINITY
    if to != tl.int8:
        if special:
            largest = _largest_size(source, start, stop, columns, STEP, True)
    return largest, special


@triton.jit
def _largest_size(source, start, stop, columns, STEP: tl.constexpr, FINITE: tl.constexpr):
    dtype: tl.constexpr = source[0].dtype.element_ty
    integer: tl.constexpr = tl.int16 if dtype.primitive_bitwidth == 16 else tl.int32
    largest = tl.zeros([STEP, columns.shape[0]], integer)
    for first in range(start, stop, STEP):
        sizes = _sizes(_load_tile(source, first + tl.arange(0, STEP), columns))
        largest = tl.maximum(largest, _finite(sizes, dtype) if FINITE else sizes)
    return _float32(tl.max(largest, 0), dtype)


@triton.jit
def _load_tile(source, rows, columns):
    x_ptr, source_ptr, num_source, end, width = source
    inside = rows < end
    if source_ptr is not None:
        rows = tl.load(source_ptr + rows, mask=inside, other=-1)
        inside = (rows >= 0) & (rows < num_source)
    at = rows.to(tl.int64)[:, None] * width + columns[None, :]
    return tl.load(x_ptr + at, mask=inside[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit
def _round_columns(
    source,
    start,
    stop,
    columns,
    inverse,
    special,
    target,
    TRANSPOSED: tl.constexpr,
    STEP: tl.constexpr,
):
    """Quantizes columns from row `start` to `stop`, and stores them.

    `target` is values_ptr, the first row there, the end of rows and the depth: TRANSPOSED columns
    become rows of so many numbers. The last rows are rounded first, because they are still in the
    cache.
    """
    last = (tl.cdiv(stop - start, STEP) - 1) * STEP
    if special:
        for step in range(0, stop - start, STEP):
            rows = last - step + tl.arange(0, STEP)
            x = _load_tile(source, start + rows, columns)
            _store_tile(x, inverse, target, rows, columns, source[4], TRANSPOSED, True)
    else:
        for step in range(0, stop - start, STEP):
            rows = last - step + tl.arange(0, STEP)
            x = _load_tile(source, start + rows, columns)
            _store_tile(x, inverse, target, rows, columns, source[4], TRANSPOSED, False)


@triton.jit
def _store_tile(
    x, inverse, target, rows, columns, width, TRANSPOSED: tl.constexpr, SPECIAL: tl.constexpr
):
    values_ptr, first, end, depth = target
    rows = first + rows
    if TRANSPOSED:  # before rounding: one instruction transposes 16-bit numbers
        x = tl.trans(x)
        inverse = inverse[:, None]
        at = columns.to(tl.int64)[:, None] * depth + rows[None, :]
        mask = (columns < width)[:, None] & (rows < end)[None, :]
    else:
        inverse = inverse[None, :]
        at = rows.to(tl.int64)[:, None] * width + columns[None, :]
        mask = (rows < end)[:, None] & (columns < width)[None, :]
    values = _quantized(x, inverse, values_ptr, SPECIAL)
    tl.store(values_ptr + at, values, mask=mask)
