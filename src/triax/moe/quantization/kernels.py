"""The kernels of quantize: one for blocks along rows, one for blocks whose values are transposed.

A number is multiplied by the inverse of its block's scale in float32, and then rounded to 8 bits.
"""

import triton
import triton.language as tl

_INFINITY = tl.constexpr(0x7F800000)  # the bits of float32's


@triton.jit
def _magnitude(x):
    """The bits of floats without their signs, which are in the order of the numbers."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _finite(sizes):
    return tl.where(sizes < _INFINITY, sizes, 0)


@triton.jit
def _scale(largest, LARGEST: tl.constexpr):
    """The scale of blocks; NaN where something that is not finite was left among `largest`."""
    size = largest.to(tl.float32, bitcast=True)
    scale = tl.div_rn(size, tl.full(size.shape, LARGEST, tl.float32))
    scale = tl.where(scale > 1.1754943508222875e-38, scale, 1.1754943508222875e-38)  # 2**-126
    return tl.where(largest < _INFINITY, scale, float("nan"))


@triton.jit
def _inverse(scale):
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def _quantized(x, inverse, special, out_ptr, NAN: tl.constexpr, INFINITY: tl.constexpr):
    """Numbers in the dtype of `out_ptr`; `special` says that some may not be finite."""
    q = x * inverse
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if NAN is None:
        # Adding 1.5 * 2**23 rounds to an integer, which is then the lowest bits.
        whole = (q + 12582912.0).to(tl.int32, bitcast=True)
        return tl.where(inverse == inverse, whole, 0).to(tl.int8)
    else:
        codes = q.to(dtype).to(tl.uint8, bitcast=True)
        if special:
            sizes = _magnitude(x)
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
    # One program for BLOCK_ROWS blocks: parts of BLOCK numbers of rows, or whole rows if it is
    # None. They are read twice, the second time from the cache, if they are too large for AT_ONCE.
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
        x = tl.load(x_ptr + row + columns, mask=mask, other=0.0).to(tl.float32)
        sizes = _magnitude(x)
        largest = tl.max(sizes, 1)
        special = tl.max(largest, 0) >= _INFINITY
        if NAN is not None:
            if special:
                largest = tl.max(_finite(sizes), 1)
        scale = _scale(largest, LARGEST)
        values = _quantized(x, _inverse(scale)[:, None], special, values_ptr, NAN, INFINITY)
        tl.store(values_ptr + row + columns, values, mask=mask)
    else:
        tl.static_assert(BLOCK is None)
        sizes = _row_sizes(x_ptr + row, inside, columns, depth, BLOCK_COLUMNS, False)
        special = tl.max(tl.max(sizes, 1), 0) >= _INFINITY
        if NAN is not None:
            if special:
                sizes = _row_sizes(x_ptr + row, inside, columns, depth, BLOCK_COLUMNS, True)
        scale = _scale(tl.max(sizes, 1), LARGEST)
        for first in range(0, depth, BLOCK_COLUMNS):
            mask = inside & (first + columns < depth)
            x = tl.load(x_ptr + row + first + columns, mask=mask, other=0.0).to(tl.float32)
            values = _quantized(x, _inverse(scale)[:, None], special, values_ptr, NAN, INFINITY)
            tl.store(values_ptr + row + first + columns, values, mask=mask)
    tl.store(scales_ptr + index, scale, mask=index < num_blocks)


@triton.jit
def _row_sizes(row_ptr, inside, columns, depth, STEP: tl.constexpr, FINITE: tl.constexpr):
    """The largest of every STEP numbers of rows, over all of their depth."""
    found = tl.zeros([inside.shape[0], STEP], tl.int32)
    for first in range(0, depth, STEP):
        mask = inside & (first + columns < depth)
        x = tl.load(row_ptr + first + columns, mask=mask, other=0.0).to(tl.float32)
        sizes = _magnitude(x)
        found = tl.maximum(found, _finite(sizes) if FINITE else sizes)
    return found


@triton.jit
def _quantize_tiles_kernel(
    x_ptr,
    depth,
    width,
    values_ptr,
    scales_ptr,
    WHOLE_DEPTH: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    LARGEST: tl.constexpr,
    NAN: tl.constexpr,
    INFINITY: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    IN_WORDS: tl.constexpr,
):
    # One program for some columns of a group [depth, width]: all of their depth, with a scale for
    # each; or one tile, with one scale, whose second read is from the cache. IN_WORDS transposes
    # four values along the depth as one number.
    column_tiles = tl.cdiv(width, BLOCK_COLUMNS)
    tiles = column_tiles
    if not WHOLE_DEPTH:
        tiles *= tl.cdiv(depth, BLOCK_DEPTH)
    group = tl.program_id(0).to(tl.int64) // tiles
    tile = tl.program_id(0) % tiles
    column_tile = tile % column_tiles
    columns = column_tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    x_ptr += group * depth * width
    values_ptr += group * depth * width
    start = 0
    stop = depth
    if not WHOLE_DEPTH:
        start = tile // column_tiles * BLOCK_DEPTH
        stop = start + BLOCK_DEPTH

    sizes = _tile_sizes(x_ptr, start, stop, columns, depth, width, BLOCK_DEPTH, False)
    top = tl.max(tl.max(sizes, 1), 0)
    special = top >= _INFINITY
    if NAN is not None:
        if special:
            sizes = _tile_sizes(x_ptr, start, stop, columns, depth, width, BLOCK_DEPTH, True)
            top = tl.max(tl.max(sizes, 1), 0)
    if WHOLE_DEPTH:
        largest = tl.max(sizes, 0)
        at = group * width + columns
        mask = columns < width
    else:
        largest = tl.full([BLOCK_COLUMNS], 0, tl.int32) + top
        if TRANSPOSED:
            tile = column_tile * (tiles // column_tiles) + tile // column_tiles
        at = group * tiles + tile + tl.zeros_like(columns)
        mask = columns % BLOCK_COLUMNS == 0
    scale = _scale(largest, LARGEST)
    tl.store(scales_ptr + at, scale, mask=mask)

    inverse = _inverse(scale)[None, :]
    for first in range(start, stop, BLOCK_DEPTH):
        if IN_WORDS:
            rows = first // 4 + tl.arange(0, BLOCK_DEPTH // 4)
            words = tl.zeros([BLOCK_DEPTH // 4, BLOCK_COLUMNS], tl.int32)
            for part in tl.static_range(4):
                x = _load_tile(x_ptr, 4 * rows + part, columns, depth, width)
                values = _quantized(x, inverse, special, values_ptr, NAN, INFINITY)
                words |= values.to(tl.uint8, bitcast=True).to(tl.int32) << 8 * part
            out_ptr = values_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
            _store_tile(out_ptr, rows, columns, depth // 4, width, words, TRANSPOSED)
        else:
            rows = first + tl.arange(0, BLOCK_DEPTH)
            x = _load_tile(x_ptr, rows, columns, depth, width)
            values = _quantized(x, inverse, special, values_ptr, NAN, INFINITY)
            _store_tile(values_ptr, rows, columns, depth, width, values, TRANSPOSED)


@triton.jit
def _tile_sizes(
    x_ptr, start, stop, columns, depth, width, STEP: tl.constexpr, FINITE: tl.constexpr
):
    """The largest of every STEP numbers of columns, from row `start` to `stop`."""
    found = tl.zeros([STEP, columns.shape[0]], tl.int32)
    for first in range(start, stop, STEP):
        x = _load_tile(x_ptr, first + tl.arange(0, STEP), columns, depth, width)
        sizes = _magnitude(x)
        found = tl.maximum(found, _finite(sizes) if FINITE else sizes)
    return found


@triton.jit
def _load_tile(x_ptr, rows, columns, depth, width):
    at = rows.to(tl.int64)[:, None] * width + columns[None, :]
    mask = (rows < depth)[:, None] & (columns < width)[None, :]
    return tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_tile(values_ptr, rows, columns, depth, width, values, TRANSPOSED: tl.constexpr):
    if TRANSPOSED:
        values = tl.trans(values)
        at = columns.to(tl.int64)[:, None] * depth + rows[None, :]
        mask = (columns < width)[:, None] & (rows < depth)[None, :]
    else:
        at = rows.to(tl.int64)[:, None] * width + columns[None, :]
        mask = (rows < depth)[:, None] & (columns < width)[None, :]
    tl.store(values_ptr + at, values, mask=mask)
