"""Kernels that only stream memory, the limit that the ops are compared with, and one that waits.

`_stream_kernel` reads `READS` units and writes their bitwise xor to each of `WRITES` units, in
order, aligned, without any index. `_delay_kernel` keeps the device busy without memory.
"""

# The text of a kernel is Triton's language, which only looks like Python.
# mypy: ignore-errors

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
    # Units lie one after the other, and a program takes the same block of each; or, together,
    # what a program reads is one run of memory, and so is what it writes. No masks: a unit is a
    # whole number of blocks. Offsets are 64-bit, for units together pass 2**31 words.
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


@triton.jit
def _delay_kernel(steps_ptr, out_ptr):
    # Each step waits for the one before, and no sum of it in closed form is known.
    steps = tl.load(steps_ptr)
    value = steps | 1
    for _ in range(steps):
        value ^= value << 13
        value ^= value >> 17
        value ^= value << 5
    tl.store(out_ptr, value)
