"""The plan's kernels: a stable counting sort of (token, slot) pairs by expert.

Pairs are numbered token by token, slot by slot. The row of a pair is the first row of its
expert, plus the number of earlier pairs with the same expert. Three kernels find that number:
`_count_pairs_kernel` cuts the pairs into blocks, and blocks into parts, and writes for each
part how many earlier pairs of its block name each expert; `_scan_counts_kernel` does the
same for the blocks; `_place_pairs_kernel` adds both counts and the earlier pairs of the part.
For few pairs `_place_few_pairs_kernel` does all three steps: each program reads every pair.
`_select_experts_kernel` first turns a mask into expert ids.
A mask that keeps all of its experts needs no ids: `_count_mask_kernel` counts the tokens of each
expert by blocks, and `_place_mask_kernel` gives the experts of a token their rows.
"""

import triton
import triton.language as tl

# Triton does not specialise on these arguments, so that a new size compiles nothing.
_SIZES = (
    "num_tokens num_experts num_pairs num_blocks num_rows top_k capacity align_size "
    "pairs_per_block parts_per_block"
).split()


@triton.jit(do_not_specialize=_SIZES)
def _select_experts_kernel(
    mask_ptr,
    num_tokens,
    num_experts,
    top_k,
    selected_ptr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    inside = token < num_tokens
    taken = tl.zeros([BLOCK_TOKENS], tl.int32)
    for first in range(0, num_experts, BLOCK_EXPERTS):
        expert = first + tl.arange(0, BLOCK_EXPERTS)
        known = inside[:, None] & (expert < num_experts)[None, :]
        at = mask_ptr + token[:, None] * num_experts + expert[None, :]
        chosen = (tl.load(at, mask=known, other=0) != 0).to(tl.int32)
        slot = taken[:, None] + tl.cumsum(chosen, 1) - chosen
        write = selected_ptr + token[:, None] * top_k + slot
        ids = tl.broadcast_to(expert[None, :], [BLOCK_TOKENS, BLOCK_EXPERTS])
        tl.store(write, ids, mask=known & (chosen != 0) & (slot < top_k))
        taken += tl.sum(chosen, 1)
    for first in range(0, top_k, BLOCK_EXPERTS):
        slot = first + tl.arange(0, BLOCK_EXPERTS)
        free = (slot[None, :] >= taken[:, None]) & (slot < top_k)[None, :]
        write = selected_ptr + token[:, None] * top_k + slot[None, :]
        none = tl.full([BLOCK_TOKENS, BLOCK_EXPERTS], -1, tl.int32)
        tl.store(write, none, mask=inside[:, None] & free)


@triton.jit(do_not_specialize=_SIZES)
def _count_mask_kernel(
    mask_ptr,
    num_tokens,
    num_experts,
    block_counts_ptr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    token = block * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    for first in range(0, num_experts, BLOCK_EXPERTS):
        expert = first + tl.arange(0, BLOCK_EXPERTS)
        known = expert < num_experts
        at = mask_ptr + token[:, None] * num_experts + expert[None, :]
        mask = tl.load(at, mask=(token < num_tokens)[:, None] & known[None, :], other=0)
        count = tl.sum((mask != 0).to(tl.int32), 0)
        tl.store(block_counts_ptr + block * num_experts + expert, count, mask=known)


@triton.jit
def _histogram(selected, first_expert, BLOCK_EXPERTS: tl.constexpr):
    """Counts how often `selected` names each expert of a block; other ids are not counted."""
    local = selected - first_expert
    return tl.histogram(local, BLOCK_EXPERTS, mask=(local >= 0) & (local < BLOCK_EXPERTS))


@triton.jit
def _lay_out_groups(count, end_before, num_rows, capacity, align_size):
    """Returns the first row, size and filled rows of some experts' groups, and the last one's end.

    `end_before` is the end of the group before them. Sums are 64-bit and only then clipped to
    `num_rows`, so that no alignment can make them wrap around.
    """
    kept = tl.minimum(count, capacity)
    aligned = (kept.to(tl.int64) + align_size - 1) // align_size * align_size
    end = end_before + tl.cumsum(aligned, 0)
    start = tl.minimum(end - aligned, num_rows).to(tl.int32)
    size = tl.minimum(end, num_rows).to(tl.int32) - start
    return start, size, tl.minimum(kept, size), end_before + tl.sum(aligned, 0)


@triton.jit
def _store_rows(
    row_of_ptr, expert_of_ptr, pair, inside, selected, routed, start, rank, num_rows, capacity
):
    """Stores the row and the expert of each pair, -1 if the pair has none."""
    # Not `start + rank < num_rows`: the sum may pass 2**31.
    placed = routed & (rank < capacity) & (rank < num_rows - start)
    tl.store(row_of_ptr + pair, tl.where(placed, start + rank, -1), mask=inside)
    tl.store(expert_of_ptr + pair, tl.where(routed, selected, -1), mask=inside)


@triton.jit(do_not_specialize=_SIZES)
def _count_pairs_kernel(
    selected_ptr,
    num_pairs,
    num_experts,
    pairs_per_block,
    part_counts_ptr,
    block_counts_ptr,
    PART: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    start = block * pairs_per_block
    end = tl.minimum(start + pairs_per_block, num_pairs)
    lane = tl.arange(0, PART)
    for first_expert in range(0, num_experts, BLOCK_EXPERTS):
        expert = first_expert + tl.arange(0, BLOCK_EXPERTS)
        known = expert < num_experts
        total = tl.zeros([BLOCK_EXPERTS], tl.int32)
        selected = tl.load(selected_ptr + start + lane, mask=start + lane < end, other=-1)
        for first in range(start, end, PART):
            # The next part's ids are loaded before this part's counts are stored. The compiler
            # cannot reorder the two, because it does not know that the arrays are different.
            pair = first + PART + lane
            following = tl.load(selected_ptr + pair, mask=pair < end, other=-1)
            tl.store(part_counts_ptr + first // PART * num_experts + expert, total, mask=known)
            total += _histogram(selected, first_expert, BLOCK_EXPERTS)
            selected = following
        tl.store(block_counts_ptr + block * num_experts + expert, total, mask=known)


@triton.jit(do_not_specialize=_SIZES)
def _scan_counts_kernel(
    counts_ptr,
    num_blocks,
    num_experts,
    group_counts_ptr,
    BLOCK_BLOCKS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    # Each count is replaced by the sum of the same expert's counts in earlier blocks.
    expert = tl.program_id(0) * BLOCK_EXPERTS + tl.arange(0, BLOCK_EXPERTS)
    known = expert < num_experts
    total = tl.zeros([BLOCK_EXPERTS], tl.int32)
    for first in range(0, num_blocks, BLOCK_BLOCKS):
        block = first + tl.arange(0, BLOCK_BLOCKS)
        mask = (block < num_blocks)[:, None] & known[None, :]
        at = counts_ptr + block.to(tl.int64)[:, None] * num_experts + expert[None, :]
        count = tl.load(at, mask=mask, other=0)
        tl.store(at, total[None, :] + tl.cumsum(count, 0) - count, mask=mask)
        total += tl.sum(count, 0)
    tl.store(group_counts_ptr + expert, total, mask=known)


@triton.jit
def _rank_in_part(local, PART: tl.constexpr, BLOCK_EXPERTS: tl.constexpr):
    """Counts, for each lane, earlier lanes with the same number, less than `BLOCK_EXPERTS`."""
    # One comparison instead of two: the keys of equal numbers are less than PART apart, and the
    # keys of unequal numbers at least PART + 1. Unsigned, a negative gap is a large number.
    tl.static_assert(2 * PART * BLOCK_EXPERTS < 2**31)
    key = local * (2 * PART) + tl.arange(0, PART)
    gap = (key[None, :] - key[:, None] - 1).to(tl.uint32, bitcast=True)
    # Summed along the first axis, so that each thread adds up only its own comparisons.
    return tl.sum((gap < PART - 1).to(tl.int32), 0)


@triton.jit(do_not_specialize=_SIZES)
def _place_pairs_kernel(
    selected_ptr,
    part_counts_ptr,
    block_counts_ptr,
    group_counts_ptr,
    num_pairs,
    num_experts,
    parts_per_block,
    num_rows,
    capacity,
    align_size,
    row_of_ptr,
    expert_of_ptr,
    group_sizes_ptr,
    group_filled_ptr,
    num_dropped_ptr,
    PART: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    part = tl.program_id(0).to(tl.int64)
    pair = part * PART + tl.arange(0, PART)
    inside = pair < num_pairs
    selected = tl.load(selected_ptr + pair, mask=inside, other=-1)
    routed = (selected >= 0) & (selected < num_experts)
    rank = tl.load(part_counts_ptr + part * num_experts + selected, mask=routed, other=0)
    earlier = block_counts_ptr + part // parts_per_block * num_experts
    rank += tl.load(earlier + selected, mask=routed, other=0)

    # Every program lays out the groups for itself, which costs less than another launch.
    start = tl.zeros([PART], tl.int32)
    end_before = tl.zeros([1], tl.int64)
    dropped = tl.zeros([1], tl.int32)
    for first_expert in range(0, num_experts, BLOCK_EXPERTS):
        expert = first_expert + tl.arange(0, BLOCK_EXPERTS)
        known = expert < num_experts
        count = tl.load(group_counts_ptr + expert, mask=known, other=0)
        starts, size, filled, end_before = _lay_out_groups(
            count, end_before, num_rows, capacity, align_size
        )
        local = selected - first_expert
        here = routed & (local >= 0) & (local < BLOCK_EXPERTS)
        local = tl.where(here, local, -1)
        rank += tl.where(here, _rank_in_part(local, PART, BLOCK_EXPERTS), 0)
        start += tl.where(here, tl.gather(starts, tl.maximum(local, 0), 0), 0)
        if part == 0:
            tl.store(group_sizes_ptr + expert, size, mask=known)
            tl.store(group_filled_ptr + expert, filled, mask=known)
            dropped += tl.sum(count - filled, 0)
    if part == 0:
        tl.store(num_dropped_ptr + tl.arange(0, 1), dropped)
    _store_rows(
        row_of_ptr, expert_of_ptr, pair, inside, selected, routed, start, rank, num_rows, capacity
    )


@triton.jit(do_not_specialize=_SIZES)
def _place_few_pairs_kernel(
    selected_ptr,
    num_pairs,
    num_experts,
    num_rows,
    capacity,
    align_size,
    row_of_ptr,
    expert_of_ptr,
    group_sizes_ptr,
    group_counts_ptr,
    group_filled_ptr,
    num_dropped_ptr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_OTHERS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    pair = tl.program_id(0) * BLOCK_PAIRS + tl.arange(0, BLOCK_PAIRS)
    inside = pair < num_pairs
    selected = tl.load(selected_ptr + pair, mask=inside, other=-1)
    routed = (selected >= 0) & (selected < num_experts)
    start = tl.zeros([BLOCK_PAIRS], tl.int32)
    rank = tl.zeros([BLOCK_PAIRS], tl.int32)
    end_before = tl.zeros([1], tl.int64)
    dropped = tl.zeros([1], tl.int32)
    for first_expert in range(0, num_experts, BLOCK_EXPERTS):
        expert = first_expert + tl.arange(0, BLOCK_EXPERTS)
        known = expert < num_experts
        count = tl.zeros([BLOCK_EXPERTS], tl.int32)
        for first in range(0, num_pairs, BLOCK_OTHERS):
            other = first + tl.arange(0, BLOCK_OTHERS)
            others = tl.load(selected_ptr + other, mask=other < num_pairs, other=-1)
            count += _histogram(others, first_expert, BLOCK_EXPERTS)
            if first_expert == 0:
                before = (others[:, None] == selected[None, :]) & (other[:, None] < pair[None, :])
                rank += tl.sum(before.to(tl.int32), 0)
        count = tl.where(known, count, 0)
        starts, size, filled, end_before = _lay_out_groups(
            count, end_before, num_rows, capacity, align_size
        )
        same = expert[:, None] == selected[None, :]
        start += tl.sum(tl.where(same, starts[:, None], 0), 0)
        if tl.program_id(0) == 0:
            tl.store(group_sizes_ptr + expert, size, mask=known)
            tl.store(group_counts_ptr + expert, count, mask=known)
            tl.store(group_filled_ptr + expert, filled, mask=known)
            dropped += tl.sum(count - filled, 0)
    if tl.program_id(0) == 0:
        tl.store(num_dropped_ptr + tl.arange(0, 1), dropped)
    _store_rows(
        row_of_ptr, expert_of_ptr, pair, inside, selected, routed, start, rank, num_rows, capacity
    )


@triton.jit(do_not_specialize=_SIZES)
def _place_mask_kernel(
    mask_ptr,
    block_counts_ptr,
    group_counts_ptr,
    num_tokens,
    num_experts,
    top_k,
    num_rows,
    capacity,
    align_size,
    row_of_ptr,
    expert_of_ptr,
    group_sizes_ptr,
    group_filled_ptr,
    num_dropped_ptr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    token = block * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    inside = token < num_tokens
    first_slot = token[:, None] * top_k
    taken = tl.zeros([BLOCK_TOKENS], tl.int32)
    # Every program lays out the groups for itself, which costs less than another launch.
    end_before = tl.zeros([1], tl.int64)
    dropped = tl.zeros([1], tl.int32)
    for first in range(0, num_experts, BLOCK_EXPERTS):
        expert = first + tl.arange(0, BLOCK_EXPERTS)
        known = expert < num_experts
        count = tl.load(group_counts_ptr + expert, mask=known, other=0)
        start, size, filled, end_before = _lay_out_groups(
            count, end_before, num_rows, capacity, align_size
        )
        if block == 0:
            tl.store(group_sizes_ptr + expert, size, mask=known)
            tl.store(group_filled_ptr + expert, filled, mask=known)
            dropped += tl.sum(count - filled, 0)
        earlier = tl.load(block_counts_ptr + block * num_experts + expert, mask=known, other=0)
        at = mask_ptr + token[:, None] * num_experts + expert[None, :]
        mask = tl.load(at, mask=inside[:, None] & known[None, :], other=0)
        chosen = (mask != 0).to(tl.int32)
        rank = earlier[None, :] + tl.cumsum(chosen, 0) - chosen
        # Not `start + rank < num_rows`: the sum may pass 2**31.
        placed = (rank < capacity) & (rank < num_rows - start[None, :])
        slot = first_slot + taken[:, None] + tl.cumsum(chosen, 1) - chosen
        row = tl.where(placed, start[None, :] + rank, -1)
        tl.store(row_of_ptr + slot, row, mask=chosen != 0)
        ids = tl.broadcast_to(expert[None, :], [BLOCK_TOKENS, BLOCK_EXPERTS])
        tl.store(expert_of_ptr + slot, ids, mask=chosen != 0)
        taken += tl.sum(chosen, 1)
    if block == 0:
        tl.store(num_dropped_ptr + tl.arange(0, 1), dropped)
    none = tl.full([BLOCK_TOKENS, BLOCK_EXPERTS], -1, tl.int32)
    for first in range(0, top_k, BLOCK_EXPERTS):
        slot = (first + tl.arange(0, BLOCK_EXPERTS))[None, :]
        free = inside[:, None] & (slot >= taken[:, None]) & (slot < top_k)
        tl.store(row_of_ptr + first_slot + slot, none, mask=free)
        tl.store(expert_of_ptr + first_slot + slot, none, mask=free)
