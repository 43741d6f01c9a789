"""The plan's kernels: a stable counting sort of (token, slot) pairs by expert.

Pairs are numbered token by token, slot by slot, and cut into blocks. `_count_pairs_kernel`
writes how many pairs of each block go to each expert, `_scan_counts_kernel` turns that into
how many pairs of earlier blocks do, `_lay_out_groups_kernel` gives each expert its rows, and
`_place_pairs_kernel` adds up the first row of the expert, the pairs of earlier blocks, and the
rank inside the block. `_select_experts_kernel` turns a mask into expert ids before that.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens", "num_experts", "top_k"])
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


@triton.jit(do_not_specialize=["num_pairs", "num_experts"])
def _count_pairs_kernel(
    selected_ptr,
    num_pairs,
    num_experts,
    counts_ptr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    # Comparing instead of counting with atomics: it needs no zeroed memory.
    block = tl.program_id(0).to(tl.int64)
    pair = block * BLOCK_PAIRS + tl.arange(0, BLOCK_PAIRS)
    selected = tl.load(selected_ptr + pair, mask=pair < num_pairs, other=-1)
    for first in range(0, num_experts, BLOCK_EXPERTS):
        expert = first + tl.arange(0, BLOCK_EXPERTS)
        count = tl.sum((selected[:, None] == expert[None, :]).to(tl.int32), 0)
        tl.store(counts_ptr + block * num_experts + expert, count, mask=expert < num_experts)


@triton.jit(do_not_specialize=["num_blocks", "num_experts"])
def _scan_counts_kernel(
    counts_ptr,
    num_blocks,
    num_experts,
    group_counts_ptr,
    BLOCK_BLOCKS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    # In place: each count becomes the sum of those of the same expert in earlier blocks.
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


@triton.jit(do_not_specialize=["num_experts", "num_rows", "capacity", "align_size"])
def _lay_out_groups_kernel(
    group_counts_ptr,
    num_experts,
    num_rows,
    capacity,
    align_size,
    group_starts_ptr,
    group_sizes_ptr,
    group_filled_ptr,
    num_dropped_ptr,
    BLOCK_EXPERTS: tl.constexpr,
):
    # Sums are 64-bit and clipped to the rows there are only when stored, so that no alignment
    # can make them wrap around.
    end_before = tl.zeros([1], tl.int64)
    dropped = tl.zeros([1], tl.int32)
    for first in range(0, num_experts, BLOCK_EXPERTS):
        expert = first + tl.arange(0, BLOCK_EXPERTS)
        known = expert < num_experts
        count = tl.load(group_counts_ptr + expert, mask=known, other=0)
        kept = tl.minimum(count, capacity)
        aligned = (kept.to(tl.int64) + align_size - 1) // align_size * align_size
        end = end_before + tl.cumsum(aligned, 0)
        start = tl.minimum(end - aligned, num_rows).to(tl.int32)
        size = tl.minimum(end, num_rows).to(tl.int32) - start
        filled = tl.minimum(kept, size)
        tl.store(group_starts_ptr + expert, start, mask=known)
        tl.store(group_sizes_ptr + expert, size, mask=known)
        tl.store(group_filled_ptr + expert, filled, mask=known)
        end_before += tl.sum(aligned, 0)
        dropped += tl.sum(count - filled, 0)
    tl.store(num_dropped_ptr + tl.arange(0, 1), dropped)


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "num_rows", "capacity"])
def _place_pairs_kernel(
    selected_ptr,
    earlier_ptr,
    group_starts_ptr,
    num_pairs,
    num_experts,
    num_rows,
    capacity,
    row_of_ptr,
    expert_of_ptr,
    BLOCK_PAIRS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_PAIRS)
    pair = block * BLOCK_PAIRS + lane
    inside = pair < num_pairs
    selected = tl.load(selected_ptr + pair, mask=inside, other=-1)
    routed = (selected >= 0) & (selected < num_experts)
    start = tl.load(group_starts_ptr + selected, mask=routed, other=0)
    rank = tl.load(earlier_ptr + block * num_experts + selected, mask=routed, other=0)
    alike = selected[:, None] == selected[None, :]
    rank += tl.sum((alike & (lane[None, :] < lane[:, None])).to(tl.int32), 1)
    # Not `start + rank < num_rows`: the sum may pass 2**31.
    placed = routed & (rank < capacity) & (rank < num_rows - start)
    tl.store(row_of_ptr + pair, tl.where(placed, start + rank, -1), mask=inside)
    tl.store(expert_of_ptr + pair, tl.where(routed, selected, -1), mask=inside)
