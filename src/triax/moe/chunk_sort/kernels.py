"""The chunk sort's kernels: one maps every chunk to its place, one moves the rows.

`_chunk_maps_kernel` reads sizes and indices, a few hundred numbers, and writes one map for
each direction. `_move_rows_kernel` reads a map and moves the rows; it is the same kernel
forward and backward.
"""

import triton
import triton.language as tl

_NOT_NAMED = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=["num_rows", "num_chunks"])
def _chunk_maps_kernel(
    split_sizes_ptr,
    sorted_indices_ptr,
    num_rows,
    num_chunks,
    ends_ptr,
    shifts_ptr,
    inverse_ends_ptr,
    inverse_shifts_ptr,
    BLOCK: tl.constexpr,
):
    # One program: the two running sums are sequential, and a barrier between the passes is
    # cheaper than a launch. Sums are 64-bit and clipped to `num_rows` only when stored, so
    # that no sizes, however wrong, can wrap around.
    total = tl.zeros([1], tl.int64)
    for first in range(0, num_chunks, BLOCK):
        chunk = first + tl.arange(0, BLOCK)
        inside = chunk < num_chunks
        size = tl.load(split_sizes_ptr + chunk, mask=inside, other=0)
        size = tl.maximum(size, 0).to(tl.int64)
        end = tl.minimum(total + tl.cumsum(size, 0), num_rows)
        total += tl.sum(size, 0)
        tl.store(inverse_ends_ptr + chunk, end.to(tl.int32), mask=inside)
        tl.store(inverse_shifts_ptr + chunk, _NOT_NAMED, mask=inside)
    tl.debug_barrier()

    total = tl.zeros([1], tl.int64)
    for first in range(0, num_chunks, BLOCK):
        chunk = first + tl.arange(0, BLOCK)
        inside = chunk < num_chunks
        index = tl.load(sorted_indices_ptr + chunk, mask=inside, other=-1)
        named = (index >= 0) & (index < num_chunks)
        source = tl.load(inverse_ends_ptr + index - 1, mask=named & (index > 0), other=0)
        size = tl.load(inverse_ends_ptr + index, mask=named, other=0) - source
        end = total + tl.cumsum(size.to(tl.int64), 0)
        start = tl.minimum(end - size, num_rows).to(tl.int32)
        total += tl.sum(size.to(tl.int64), 0)
        tl.store(ends_ptr + chunk, tl.minimum(end, num_rows).to(tl.int32), mask=inside)
        tl.store(shifts_ptr + chunk, source - start, mask=inside)
        # A minimum of integers does not depend on their order: of several output chunks
        # that name one input chunk, the first wins in every run. The barriers order the
        # atomic with the other accesses, so that it may be relaxed, which saves fences.
        tl.atomic_min(inverse_shifts_ptr + index, start, mask=named, sem="relaxed")
    tl.debug_barrier()

    for first in range(0, num_chunks, BLOCK):
        chunk = first + tl.arange(0, BLOCK)
        inside = chunk < num_chunks
        source = tl.load(inverse_ends_ptr + chunk - 1, mask=inside & (chunk > 0), other=0)
        start = tl.load(inverse_shifts_ptr + chunk, mask=inside, other=0)
        shift = tl.where(start == _NOT_NAMED, 0, start - source)
        tl.store(inverse_shifts_ptr + chunk, shift, mask=inside)


@triton.jit
def _source_rows(
    row, ends_ptr, shifts_ptr, num_rows, num_chunks, search_steps, SEARCH_WAYS: tl.constexpr
):
    """Returns the 64-bit row that each output row is read from, always in [0, num_rows)."""
    # Searches for the first chunk that ends past the row. Each step splits the chunks that are
    # left into SEARCH_WAYS parts and loads the ends of all parts at once: dependent loads
    # cost a small program more than many independent ones.
    low = tl.zeros_like(row)
    left = num_chunks
    way = tl.arange(0, SEARCH_WAYS)
    for _ in range(search_steps):
        left = tl.cdiv(left, SEARCH_WAYS)
        last = low[:, None] + (way + 1)[None, :] * left - 1
        end = tl.load(ends_ptr + last, mask=last < num_chunks, other=2**31 - 1)
        low += left * tl.sum((end <= row[:, None]).to(tl.int32), 1)
    # Rows past the last chunk stay where they are.
    shift = tl.load(shifts_ptr + low, mask=low < num_chunks, other=0)
    source = row.to(tl.int64) + shift
    return tl.minimum(tl.maximum(source, 0), num_rows - 1)


@triton.jit(do_not_specialize=["num_rows", "num_chunks", "search_steps"])
def _move_rows_kernel(
    rows_ptr,
    probs_ptr,
    ends_ptr,
    shifts_ptr,
    num_rows,
    num_chunks,
    search_steps,
    moved_rows_ptr,
    moved_probs_ptr,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    SEARCH_WAYS: tl.constexpr,
):
    # Programs that share rows are neighbours, so that a row is read and written in one go.
    width_blocks: tl.constexpr = max(1, (WIDTH + BLOCK_WIDTH - 1) // BLOCK_WIDTH)
    row_block = tl.program_id(0) // width_blocks
    width_block = tl.program_id(0) % width_blocks
    first_row = row_block * BLOCK_ROWS
    row = first_row + tl.arange(0, BLOCK_ROWS)
    # Not `row < num_rows`: the rows past the end of the last block may pass 2**31.
    inside = tl.arange(0, BLOCK_ROWS) < num_rows - first_row
    source = _source_rows(
        row, ends_ptr, shifts_ptr, num_rows, num_chunks, search_steps, SEARCH_WAYS
    )

    # 64-bit: rows times width passes 2**31 in ordinary programs.
    column = width_block.to(tl.int64) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    mask = inside[:, None] & (column < WIDTH)[None, :]
    read = rows_ptr + source[:, None] * WIDTH + column[None, :]
    write = moved_rows_ptr + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(write, tl.load(read, mask=mask), mask=mask)

    if probs_ptr is not None:
        if width_block == 0:
            prob = tl.load(probs_ptr + source, mask=inside)
            tl.store(moved_probs_ptr + row, prob, mask=inside)
