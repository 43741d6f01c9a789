"""Widens weights in tiles to bfloat16 in registers, and loads their scales and zeros.

Words of tiles stand where threads of tensor cores take them, in the order of `packing.tile`; scales
and zeros of single columns are in the order of `packing.tile_scales`. A 32-bit word holds eight
4-bit weights, of which S and S + 4 are widened together.
"""

import triton
import triton.language as tl

# An e4m3 number's bits, moved to their places in bfloat16, are 2**-120 times the number; NaN is 480
# there. Times 9 / 8, which is exact, and 2**119, only this 480 exceeds 2**128: it becomes infinite.
_FIRST = tl.constexpr(9 / 8 * 2.0**120)
_UP = tl.constexpr(2.0**119)
_DOWN = tl.constexpr(2.0**-119)
# An e2m1 number's bits, moved to their places in bfloat16, are 2**-126 times the number.
_UP_E2M1 = tl.constexpr(2.0**126)
# Either half of a word, twice, as the halves of another. Instructions on pairs take them for free.
_LOW_TWICE = tl.constexpr("{.reg .b16 l, h; mov.b32 {l, h}, $1; mov.b32 $0, {l, l};}")
_HIGH_TWICE = tl.constexpr("{.reg .b16 l, h; mov.b32 {l, h}, $1; mov.b32 $0, {h, h};}")
_ALL = tl.constexpr(1 << 30)  # exceeds any depth: one block covers the whole depth
_PART = tl.constexpr(32)  # divides the depth of every scale that is not for all of it,
_PART_OF_E4M3 = tl.constexpr(16)  # or this, if it is of e4m3


@triton.jit
def _pair(words):
    """Returns the lower and the upper half of each word, as bfloat16."""
    low = words.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (words >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return low, high


@triton.jit
def _constant(value: tl.constexpr):
    # Cast from float32, because Triton turns small bfloat16 constants into zeros.
    return tl.cast(value, tl.float32).to(tl.bfloat16)


@triton.jit
def _base(hidden, E4M3: tl.constexpr, PACKED: tl.constexpr):
    """Returns the constant that widening takes from a register, for both halves of a word.

    An instruction takes one other constant. `hidden`, which is not negative, hides it from
    compilers.
    """
    if E4M3:  # where bfloat16 has the bits of size
        return tl.where(hidden < 0, 0, 0x07F007F0)
    elif PACKED == "int8":  # 128
        return tl.where(hidden < 0, 0, 0x43004300)
    else:  # 136
        return tl.where(hidden < 0, 0, 0x43084308)


@triton.jit
def _every_other(words, base, E4M3: tl.constexpr):
    """Returns bytes 0 and 2 of each word as bfloat16. E4M3 numbers become 9 / 8 times as large, and
    NaN infinite. `base` is from `_base`."""
    if E4M3:
        low, high = _pair(((words << 4) & base) | ((words << 8) & -0x7FFF8000))
        low *= _constant(_FIRST)
        high *= _constant(_FIRST)
        low *= _constant(_UP)
        high *= _constant(_UP)
        return low * _constant(_DOWN), high * _constant(_DOWN)
    else:  # 128 plus the lowest 7 bits, minus 128, or minus 256 if negative
        low, high = _pair((words & 0x007F007F) | base)
        less_low, less_high = _pair((words & 0x00800080) | base)
        return low - less_low, high - less_high


@triton.jit
def _times(pairs, factors):
    """Multiplies pairs of bfloat16 in words; compilers may multiply each number alone."""
    return tl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;",
        "=r,r,r,r",
        [pairs, factors, tl.full([1], -0x7FFF8000, tl.int32)],  # minus zero: not added
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _two_of_eight(words, base, S: tl.constexpr, zeros, scales, E2M1: tl.constexpr):
    """Returns numbers S and S + 4 of words as bfloat16, minus `zeros` and times `scales`.

    Scales are of bfloat16, or words with 2**126 times the scale in both halves.
    """
    AT_ONCE: tl.constexpr = scales is not None and scales.dtype == tl.int32
    if E2M1:
        if S < 3:
            bits = words.to(tl.uint32, bitcast=True)
            if S > 0:
                bits = (bits >> (3 * S)) | (bits << (32 - 3 * S))
            bits = bits.to(tl.int32, bitcast=True) & -0x7E3F7E40
        else:
            bits = ((words & 0x001B001B) * 0x1084) & -0x7E3F7E40
        if AT_ONCE:
            low, high = _pair(_times(bits, scales))
        else:
            low, high = _pair(bits)
            low *= _constant(_UP_E2M1)
            high *= _constant(_UP_E2M1)
    else:
        low, high = _pair(((words >> (4 * S)) & 0x000F000F) ^ base)
        low -= 136.0
        high -= 136.0
    # After the step with a constant, by which compilers find that a pair is in one register.
    if zeros is not None:
        low -= zeros
        high -= zeros
    if scales is not None and not AT_ONCE:
        low *= scales
        high *= scales
    return tl.join(low, high)


@triton.jit
def _loaded_tiles(w, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PARTS: tl.constexpr):
    """Reorders loaded words to [64s of columns, warps, rows, PARTS of the depth, 4, words].

    8-bit weights have parts of 32.
    """
    TILES: tl.constexpr = DEPTH // 64
    if w.numel * 4 == COLUMNS * DEPTH:
        w = w.reshape(COLUMNS // 64, TILES, 4, 2, 8, 4, 4).permute(0, 2, 4, 1, 3, 5, 6)
        return w.reshape(COLUMNS // 64, 4, 8, 2 * TILES, 4, 4)
    else:
        w = w.reshape(COLUMNS // 64, TILES, 4, 8, 4, PARTS // TILES, 4 * TILES // PARTS)
        w = w.permute(0, 2, 3, 1, 5, 4, 6)
        return w.reshape(COLUMNS // 64, 4, 8, PARTS, 4, 4 * TILES // PARTS)


@triton.jit
def _two_columns(words, base, E4M3: tl.constexpr):
    """Widens 8-bit words of tiles to bfloat16 [..., neighbours, columns]."""
    low, high = _every_other(words, base, E4M3)
    low_2, high_2 = _every_other(words >> 8, base, E4M3)
    return tl.join(tl.join(low, high), tl.join(low_2, high_2))


@triton.jit
def _from_tiles(w, base, zeros, scales, PACKED: tl.constexpr, OPERAND: tl.constexpr):
    """Unpacks words from `_loaded_tiles` to bfloat16 [columns, depth].

    As an OPERAND each 64 of the depth are in the order of tensor cores, in which the kernel for
    very few rows adds them up: first the first pairs of all threads. Of 8-bit weights, and of half
    a tile, it is each 32. Otherwise the depth is in the order of parts of 32, which 4-bit weights
    alone may have.
    """
    COLUMNS: tl.constexpr = 64 * w.shape[0]
    PARTS: tl.constexpr = w.shape[3]
    E2M1: tl.constexpr = PACKED == "float4_e2m1fn"
    if PACKED == "float8_e4m3fn" or PACKED == "int8":
        w = _two_columns(w, base, PACKED == "float8_e4m3fn")
        return w.permute(0, 1, 7, 2, 3, 5, 4, 6).reshape(COLUMNS, w.numel // COLUMNS)
    else:
        zeros_2 = None
        scales_2 = None
        if zeros is not None:
            zeros, zeros_2 = _of_two_columns(zeros, COLUMNS, PARTS)
        if scales is not None:
            scales, scales_2 = _of_two_columns(scales, COLUMNS, PARTS)
        a = _two_of_eight(w, base, 0, zeros, scales, E2M1)
        b = _two_of_eight(w, base, 1, zeros_2, scales_2, E2M1)
        c = _two_of_eight(w, base, 2, zeros, scales, E2M1)
        d = _two_of_eight(w, base, 3, zeros_2, scales_2, E2M1)
        w = tl.join(tl.join(a, b), tl.join(c, d))
        # Both 32s of a tile are parts, or stand in a thread's four words.
        if not OPERAND:
            w = w.permute(0, 1, 7, 2, 3, 4, 5, 8, 6)
        elif w.shape[5] == 4:
            w = w.reshape(COLUMNS // 64, 4, 8, PARTS, 4, 2, 2, 2, 2, 2)
            w = w.permute(0, 1, 8, 2, 3, 6, 9, 5, 4, 7)
        else:
            HALVES: tl.constexpr = 2 if w.numel % (64 * COLUMNS) == 0 else 1
            w = w.reshape(COLUMNS // 64, 4, 8, PARTS // HALVES, HALVES, 4, 2, 2, 2, 2)
            w = w.permute(0, 1, 8, 2, 3, 6, 9, 4, 5, 7)
        return w.reshape(COLUMNS, w.numel // COLUMNS)


@triton.jit
def _of_two_columns(parts, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    """Returns what belongs to each of the two columns, 8 apart, that a word of a tile has.

    `parts` are of columns [COLUMNS, 2 · PARTS, PARTS or fewer], or codes in the order of
    `packing.tile_scales` [COLUMNS / 64, PARTS, 8, 4, 2].
    """
    if len(parts.shape) == 5:
        first, second = parts.permute(0, 3, 2, 1, 4).split()
    else:
        ALL: tl.constexpr = max(PARTS, parts.shape[1])
        parts = _for_words(parts, COLUMNS, ALL).reshape(COLUMNS // 64, 4, 2, 8, ALL)
        first, second = parts.permute(0, 1, 3, 4, 2).split()
    first = _of_threads(first, COLUMNS // 16, PARTS)
    second = _of_threads(second, COLUMNS // 16, PARTS)
    shape: tl.constexpr = (COLUMNS // 64, 4, 8, PARTS, first.shape[3], 1)
    return first.reshape(shape), second.reshape(shape)


@triton.jit
def _of_threads(parts, WARPS: tl.constexpr, PARTS: tl.constexpr):
    """Returns values of parts as [warps, rows, PARTS, threads, 1], for all threads if alike.

    Each half of a row's four threads has a half of the 32 neighbours of a part.
    """
    if parts.numel == WARPS * 8 * PARTS:
        return parts.reshape(WARPS, 8, PARTS, 1, 1)
    else:
        parts = parts.reshape(WARPS, 8, PARTS, 2, 1)
        return tl.broadcast_to(parts, (WARPS, 8, PARTS, 2, 2)).reshape(WARPS, 8, PARTS, 4, 1)


@triton.jit
def _powers_of_two(codes):
    """Returns 2**(codes - 127) in bfloat16; NaN for 255."""
    bits = codes.to(tl.int16) << 7
    # 2**-127 is subnormal.
    bits = tl.where((codes == 0) | (codes == 255), bits | 64, bits)
    return bits.to(tl.bfloat16, bitcast=True)


@triton.jit
def _of_e4m3(codes):
    """Returns 2**-7 times the numbers of e4m3 codes, in bfloat16."""
    codes = codes.to(tl.int16)
    size = codes & 0x7F
    number = (size << 4).to(tl.bfloat16, bitcast=True) * _constant(2.0**113)
    bits = number.to(tl.int16, bitcast=True) | ((codes & 0x80) << 8)
    bits = tl.where(size == 0x7F, 0x7FC0, bits.to(tl.int32)).to(tl.int16)
    return bits.to(tl.bfloat16, bitcast=True)


@triton.jit
def _move(words, ASSEMBLY: tl.constexpr):
    return tl.inline_asm_elementwise(
        ASSEMBLY, "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _each_e4m3(pairs):
    """Returns words with 2**119 times each of two e4m3 numbers, twice: [..., 2].

    The numbers' bits, without their signs, are where each half of a word has those of bfloat16.
    """
    pairs = _times(pairs, tl.full([1], 0x7F007F00, tl.int32))  # 2**127
    pairs = _times(pairs, tl.full([1], 0x77807780, tl.int32))  # 2**112
    return tl.join(_move(pairs, _LOW_TWICE), _move(pairs, _HIGH_TWICE))


@triton.jit
def _powers_at_once(codes):
    """Returns words with 2**126 times the power of each code, twice: right for codes below 128."""
    return codes.to(tl.int32) * 0x00800080 + 0x3F003F00


@triton.jit
def _for_words(parts, COLUMNS: tl.constexpr, WORDS: tl.constexpr):
    """Repeats the value of each part of the depth for each word in that part."""
    shape: tl.constexpr = (COLUMNS, parts.shape[1], WORDS // parts.shape[1])
    return tl.broadcast_to(parts[:, :, None], shape).reshape(COLUMNS, WORDS)


@triton.jit
def _first_of(
    group,
    columns,
    num_columns,
    depth,
    SCALE_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Returns where the scales and zeros of each column begin; blocks are BLOCK deep.

    STEP is 64 if they are in the order of `packing.tile_scales`, otherwise 1.
    """
    if STEP == 1:
        at = group.to(tl.int64) * tl.cdiv(num_columns, SCALE_COLUMNS) + columns // SCALE_COLUMNS
        return at * tl.cdiv(depth, BLOCK)
    else:
        at = (group.to(tl.int64) * num_columns + columns // STEP * STEP) * tl.cdiv(depth, BLOCK)
        return at + columns % 8 * 8 + columns % STEP // 8


@triton.jit
def _of_part(at, known, start, depth, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """Loads the scale or zero of each column at a depth."""
    return tl.load(at + start // BLOCK * STEP, mask=known & (start < depth), other=0)


@triton.jit
def _of_parts(
    at,
    known,
    start,
    depth,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Loads the block's scale or zero for each of PARTS parts, PART deep; blocks are BLOCK deep."""
    starts = start + PART * tl.arange(0, PARTS)
    return tl.load(
        at[:, None] + starts[None, :] // BLOCK * STEP,
        mask=known[:, None] & (starts < depth)[None, :],
        other=0,
    )


@triton.jit
def _scales(
    pointer,
    group,
    column,
    order,
    num_columns,
    start,
    depth,
    SCALE_COLUMNS: tl.constexpr,
    SCALE_DEPTH: tl.constexpr,
    STEP: tl.constexpr,
    MAY_END: tl.constexpr = False,
):
    """Loads column scales: [COLUMNS], or [1] if shared. SCALE_* None is the whole dimension.

    STEP is 64 if they are in the order of `packing.tile_scales`, otherwise 1.
    With MAY_END scales past the depth are zeros; otherwise none are.
    """
    COLUMNS: tl.constexpr = order.shape[0]
    if SCALE_COLUMNS is None:
        return tl.load(pointer + group + tl.zeros([1], tl.int32)).to(tl.float32)
    elif STEP == 64:
        # As words of two, which are those of a thread's columns: they need not be exchanged.
        SCALE: tl.constexpr = pointer.dtype.element_ty
        WORD: tl.constexpr = tl.int64 if SCALE == tl.float32 else tl.int32
        tile = tl.minimum(column // 64 + tl.arange(0, COLUMNS // 64), num_columns // 64 - 1)
        at = (group.to(tl.int64) * (num_columns // 64) + tile) * tl.cdiv(depth, SCALE_DEPTH)
        at += start // SCALE_DEPTH
        at = at[:, None] * 32 + tl.arange(0, 32)[None, :]
        words_ptr = pointer.to(tl.pointer_type(WORD), bitcast=True) + at
        if MAY_END:
            words = tl.load(words_ptr, mask=start < depth + tl.zeros_like(at), other=0)
        else:
            words = tl.load(words_ptr)
        if SCALE == tl.bfloat16:
            low = words << 16
            high = words & -65536
        elif SCALE == tl.float16:
            low = words.to(tl.int16).to(SCALE, bitcast=True).to(tl.float32)
            high = (words >> 16).to(tl.int16).to(SCALE, bitcast=True).to(tl.float32)
        else:
            low = words.to(tl.int32)
            high = (words >> 32).to(tl.int32)
        low = low.to(tl.float32, bitcast=True)
        scales = tl.join(low, high.to(tl.float32, bitcast=True)).reshape(COLUMNS // 64, 8, 4, 2)
        return scales.permute(0, 2, 3, 1).reshape(COLUMNS)
    else:
        same: tl.constexpr = SCALE_COLUMNS % COLUMNS == 0
        which = column + (tl.arange(0, 1) if same else order)
        BLOCK: tl.constexpr = _ALL if SCALE_DEPTH is None else SCALE_DEPTH
        at = _first_of(group, which, num_columns, depth, SCALE_COLUMNS, BLOCK, STEP)
        at += start // BLOCK
        known = which < num_columns
        if MAY_END:
            known &= start < depth
        return tl.load(pointer + at, mask=known, other=0.0).to(tl.float32)
