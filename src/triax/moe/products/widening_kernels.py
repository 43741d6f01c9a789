"""The kernel that dequantizes weights in memory, for many rows."""

import triton
import triton.language as tl

from triax.moe.products.unpacking_kernels import (
    _ALL,
    _PART,
    _PART_OF_E4M3,
    _UP_E2M1,
    _constant,
    _first_of,
    _for_words,
    _from_tiles,
    _loaded_tiles,
    _of_parts,
)

_COLUMNS = tl.constexpr(64)


@triton.jit
def _of_bytes(codes, E4M3: tl.constexpr):
    """Returns the numbers of 8-bit codes in float32."""
    if E4M3:
        size = codes & 0x7F
        bits = (size << 20) | ((codes & 0x80) << 24)
        number = bits.to(tl.float32, bitcast=True) * 2.0**120
        return tl.where(size == 0x7F, float("nan"), number)
    else:
        return (((codes & 0xFF) ^ 0x80) - 0x80).to(tl.float32)


@triton.jit
def _widen_kernel(
    values_ptr,
    scales_ptr,
    zeros_ptr,
    global_scales_ptr,
    num_columns,
    depth,
    out_ptr,
    PACKED: tl.constexpr,
    TILED: tl.constexpr,
    CODES: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    SCALE_DEPTH: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    # A program takes 64 columns of a group, BLOCK_DEPTH deep.
    E2M1: tl.constexpr = PACKED == "float4_e2m1fn"
    E4M3: tl.constexpr = PACKED == "float8_e4m3fn"
    IS_8_BIT: tl.constexpr = E4M3 or PACKED == "int8"
    WORDS: tl.constexpr = 1024 if IS_8_BIT else 512  # of a tile
    depth_blocks = tl.cdiv(depth, BLOCK_DEPTH)
    column_blocks = tl.cdiv(num_columns, _COLUMNS)
    start = tl.program_id(0) % depth_blocks * BLOCK_DEPTH
    block = tl.program_id(0) // depth_blocks
    group = (block // column_blocks).to(tl.int64)
    column = block % column_blocks * _COLUMNS
    columns = column + tl.arange(0, _COLUMNS)
    known = columns < num_columns
    if TILED:
        at = tl.arange(0, BLOCK_DEPTH // 64 * WORDS)
        inside = start + at // WORDS * 64 < depth
        at += ((group * column_blocks + column // 64) * (depth // 64) + start // 64) * WORDS
        w = tl.load(values_ptr + at, mask=inside, other=0)
        w = _loaded_tiles(w, _COLUMNS, BLOCK_DEPTH, BLOCK_DEPTH // 32)
        if IS_8_BIT:
            first = tl.join(_of_bytes(w, E4M3), _of_bytes(w >> 16, E4M3))
            second = tl.join(_of_bytes(w >> 8, E4M3), _of_bytes(w >> 24, E4M3))
            w = tl.join(first, second).permute(0, 1, 7, 2, 3, 4, 5, 6)
            w = w.reshape(_COLUMNS, BLOCK_DEPTH)
        else:
            w = _from_tiles(w, 0x43084308, None, None, PACKED, False).to(tl.float32)
    elif IS_8_BIT:
        at = start + tl.arange(0, BLOCK_DEPTH)
        inside = known[:, None] & (at < depth)[None, :]
        at = (group * num_columns + columns)[:, None] * depth + at[None, :]
        w = _of_bytes(tl.load(values_ptr + at, mask=inside, other=0).to(tl.int32), E4M3)
    else:
        at = start // 2 + tl.arange(0, BLOCK_DEPTH // 2)
        inside = known[:, None] & (at < depth // 2)[None, :]
        at = (group * num_columns + columns)[:, None] * (depth // 2) + at[None, :]
        byte = tl.load(values_ptr + at, mask=inside, other=0).to(tl.int32)
        w = tl.join(byte & 15, byte >> 4).reshape(_COLUMNS, BLOCK_DEPTH)
        if E2M1:
            w = ((w & 7) << 6) | ((w & 8) << 12)
            w = w.to(tl.int16).to(tl.bfloat16, bitcast=True) * _constant(_UP_E2M1)
        else:
            w = (w ^ 8) - 8
        w = w.to(tl.float32)

    if scales_ptr is not None:
        LEAST: tl.constexpr = _PART_OF_E4M3 if CODES == "float8_e4m3fn" else _PART
        PART: tl.constexpr = BLOCK_DEPTH if SCALE_DEPTH is None else LEAST
        BLOCK: tl.constexpr = _ALL if SCALE_DEPTH is None else SCALE_DEPTH
        PARTS: tl.constexpr = BLOCK_DEPTH // PART
        STEP: tl.constexpr = 64 if TILED and SCALE_COLUMNS == 1 and SCALE_DEPTH is not None else 1
        of_block = _first_of(group, columns, num_columns, depth, SCALE_COLUMNS, BLOCK, STEP)
        if zeros_ptr is not None:
            zeros = _of_parts(zeros_ptr + of_block, known, start, depth, PARTS, PART, BLOCK, STEP)
            w -= _for_words(zeros.to(tl.float32), _COLUMNS, BLOCK_DEPTH)
        scales = _of_parts(scales_ptr + of_block, known, start, depth, PARTS, PART, BLOCK, STEP)
        if CODES == "float8_e4m3fn":
            scales = _of_bytes(scales.to(tl.int32), True)
        elif CODES is not None:
            scales = scales.to(tl.int32)
            bits = tl.where(scales == 255, 0x7FC00000, scales << 23)
            bits = tl.where(scales == 0, 1 << 22, bits)  # 2**-127: subnormal
            scales = bits.to(tl.float32, bitcast=True)
        else:
            scales = scales.to(tl.float32)
        w *= _for_words(scales, _COLUMNS, BLOCK_DEPTH)
        if global_scales_ptr is not None:
            at = group * tl.cdiv(num_columns, SCALE_COLUMNS) + columns // SCALE_COLUMNS
            w *= tl.load(global_scales_ptr + at, mask=known, other=0.0)[:, None]
    deep = start + tl.arange(0, BLOCK_DEPTH)
    at = (group * num_columns + columns)[:, None] * depth + deep[None, :]
    mask = known[:, None] & (deep < depth)[None, :]
    tl.store(out_ptr + at, w.to(out_ptr.dtype.element_ty), mask=mask)
