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
def _largest(sizes, AXIS: tl.constexpr, FINITE: tl.constexpr):
    if FINITE:
        sizes = tl.where(sizes < _INFINITY, sizes, 0)
    return tl.max(sizes, AXIS)


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
        largest = _largest(sizes, 1, False)
        special = tl.max(largest, 0) >= _INFINITY
        if NAN is not None:
            if special:
                largest = _largest(sizes, 1, True)
        scale = _scale(largest, LARGEST)
        values = _quantized(x, _inverse(scale)[:, None], special, values_ptr, NAN, INFINITY)
        tl.store(values_ptr + row + columns, values, mask=mask)
    else:
        tl.static_assert(BLOCK is None)
        found = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.int32)
        for first in range(0, depth, BLOCK_COLUMNS):
            mask = inside & (first + columns < depth)
            x = tl.load(x_ptr + row + first + columns, mask=mask, other=0.0).to(tl.float32)
            found = tl.maximum(found, _magnitude(x))
        special = tl.max(tl.max(found, 1), 0) >= _INFINITY
        if NAN is not None:
            if special:  # rare: once more, of what is finite
                found = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.int32)
                for first in range(0, depth, BLOCK_COLUMNS):
                    mask = inside & (first + columns < depth)
                    x = tl.load(x_ptr + row + first + columns, mask=mask, other=0.0).to(tl.float32)
                    sizes = _magnitude(x)
                    found = tl.maximum(found, tl.where(sizes < _INFINITY, sizes, 0))
        scale = _scale(tl.max(found, 1), LARGEST)
        for first in range(0, depth, BLOCK_COLUMNS):
            mask = inside & (first + columns < depth)
            x = tl.load(x_ptr + row + first + columns, mask=mask, other=0.0).to(tl.float32)
            values = _quantized(x, _inverse(scale)[:, None], special, values_ptr, NAN, INFINITY)
            tl.store(values_ptr + row + first + columns, values, mask=mask)
    tl.store(scales_ptr + index, scale, mask=index < num_blocks)


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
    SCAN_DEPTH: tl.constexpr,
):
    # One program for some columns of a group [depth, width]: all of their depth, with a scale for
    # each column, in two passes; or one tile of it, with one scale.
    column_tiles = tl.cdiv(width, BLOCK_COLUMNS)
    tiles = column_tiles
    if not WHOLE_DEPTH:
        tiles *= tl.cdiv(depth, BLOCK_DEPTH)
    group = tl.program_id(0).to(tl.int64) // tiles
    tile = tl.program_id(0) % tiles
    columns = tile % column_tiles * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    rows = tl.arange(0, BLOCK_DEPTH)
    x_ptr += group * depth * width
    values_ptr += group * depth * width
    if WHOLE_DEPTH:
        largest = _largest_of_columns(
            x_ptr, columns, depth, width, False, SCAN_DEPTH, BLOCK_COLUMNS
        )
        special = tl.max(largest, 0) >= _INFINITY
        if NAN is not None:
            if special:  # rare: once more, of what is finite
                largest = _largest_of_columns(
                    x_ptr, columns, depth, width, True, SCAN_DEPTH, BLOCK_COLUMNS
                )
        scale = _scale(largest, LARGEST)
        tl.store(scales_ptr + group * width + columns, scale, mask=columns < width)
        for first in range(0, depth, BLOCK_DEPTH):
            x, mask = _load_tile(x_ptr, first + rows, columns, depth, width)
            values = _quantized(x, _inverse(scale)[None, :], special, values_ptr, NAN, INFINITY)
            _store_tile(values_ptr, first + rows, columns, depth, width, values, mask, TRANSPOSED)
    else:
        row_tile = tile // column_tiles
        rows += row_tile * BLOCK_DEPTH
        x, mask = _load_tile(x_ptr, rows, columns, depth, width)
        sizes = _magnitude(x)
        largest = tl.max(_largest(sizes, 1, False), 0)
        special = largest >= _INFINITY
        if NAN is not None:
            if special:
                largest = tl.max(_largest(sizes, 1, True), 0)
        scale = _scale(tl.full([1, 1], 0, tl.int32) + largest, LARGEST)
        values = _quantized(x, _inverse(scale), special, values_ptr, NAN, INFINITY)
        _store_tile(values_ptr, rows, columns, depth, width, values, mask, TRANSPOSED)
        at = tile
        if TRANSPOSED:
            at = tile % column_tiles * (tiles // column_tiles) + row_tile
        one = tl.arange(0, 1)
        tl.store(scales_ptr + group * tiles + at + one[:, None] + one[None, :], scale)


@triton.jit
def _largest_of_columns(
    x_ptr,
    columns,
    depth,
    width,
    FINITE: tl.constexpr,
    SCAN_DEPTH: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    found = tl.zeros([SCAN_DEPTH, BLOCK_COLUMNS], tl.int32)
    for first in range(0, depth, SCAN_DEPTH):
        x, _ = _load_tile(x_ptr, first + tl.arange(0, SCAN_DEPTH), columns, depth, width)
        sizes = _magnitude(x)
        if FINITE:
            sizes = tl.where(sizes < _INFINITY, sizes, 0)
        found = tl.maximum(found, sizes)
    return tl.max(found, 0)


@triton.jit
def _load_tile(x_ptr, rows, columns, depth, width):
    mask = (rows < depth)[:, None] & (columns < width)[None, :]
    at = rows.to(tl.int64)[:, None] * width + columns[None, :]
    return tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32), mask


@triton.jit
def _store_tile(values_ptr, rows, columns, depth, width, values, mask, TRANSPOSED: tl.constexpr):
    if TRANSPOSED:
        at = columns.to(tl.int64)[:, None] * depth + rows[None, :]
        tl.store(values_ptr + at, tl.trans(values), mask=tl.trans(mask))
    else:
        tl.store(values_ptr + rows.to(tl.int64)[:, None] * width + columns[None, :], values, mask)
