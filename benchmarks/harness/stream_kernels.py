"""The kernel that only streams memory, the limit that ops are compared with."""

import triton
import triton.language as tl


@triton.jit
def _stream_kernel(
    source_ptr,
    unit_words,
    target_ptr,
    READS: tl.constexpr,
    WRITES: tl.constexpr,
    TOGETHER: tl.constexpr,
    STORES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Reads READS units in order, without any index, and writes their xor to each of WRITES units.
    # Units lie one after the other, and a program takes the same block of each; or, together,
    # what a program reads is one run of memory, and so is what it writes. No masks: a unit is a
    # whole number of blocks. Offsets are 64-bit, because units together pass 2**31 words.
    program = tl.program_id(0).to(tl.int64)
    word = tl.arange(0, BLOCK)
    if TOGETHER:
        step = tl.full([], BLOCK, tl.int64)
        source_ptr += program * (READS * BLOCK)
        target_ptr += program * (WRITES * BLOCK)
    else:
        step = tl.cast(unit_words, tl.int64)
        source_ptr += program * BLOCK
        target_ptr += program * BLOCK
    # A xor of all that was read: the compiler can leave no load out.
    value = tl.load(source_ptr + word)
    for unit in tl.static_range(1, READS):
        value ^= tl.load(source_ptr + unit * step + word)
    for unit in tl.static_range(WRITES):
        tl.store(target_ptr + unit * step + word, value, cache_modifier=STORES)
