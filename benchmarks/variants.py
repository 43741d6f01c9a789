"""Other ways to make a plan and to move chunks, which `experiments.py` measures.

Each function stands in for a launcher of the library and gives the same results: those of the
plan for `triax.moe.plan.launchers.place_pairs`, those of the chunk sort for
`triax.moe.chunks.launchers.move_rows`. What a variant does not change is the library's own code,
with another config or kernel put in while it is traced. They are for many pairs: where the
library plans few in one launch, variants that only change a kernel of the three do so too.
"""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import jax
import triton
import triton.language as tl

from triax import triton_call
from triax.moe.chunks import kernels as chunk_kernels
from triax.moe.chunks import launchers as chunk_launchers
from triax.moe.chunks.kernels import _source_rows
from triax.moe.chunks.reference import ChunkMap
from triax.moe.plan import kernels as plan_kernels
from triax.moe.plan import launchers as plan_launchers
from triax.moe.plan.configs import ScanConfig, SortConfig
from triax.moe.plan.kernels import _lay_out_groups, _rank_in_part, _store_rows
from triax.moe.plan.launchers import _ints
from triax.moe.plan.reference import Placement

# The library's own, which stay what they are while variants stand in for them.
_place_pairs, _move_rows = plan_launchers.place_pairs, chunk_launchers.move_rows

# --- what several variants of the plan share -----------------------------------------


@triton.jit
def _store_groups(
    expert,
    known,
    count,
    end_before,
    num_rows,
    capacity,
    align_size,
    group_starts_ptr,
    group_sizes_ptr,
    group_filled_ptr,
):
    """Lays out some groups and stores them; where the last one ends, and the pairs dropped."""
    start, size, filled, end = _lay_out_groups(count, end_before, num_rows, capacity, align_size)
    tl.store(group_starts_ptr + expert, start, mask=known)
    tl.store(group_sizes_ptr + expert, size, mask=known)
    tl.store(group_filled_ptr + expert, filled, mask=known)
    return end, tl.sum(count - filled, 0)


@triton.jit(
    do_not_specialize=["num_pairs", "num_experts", "parts_per_block", "num_rows", "capacity"]
)
def _place_by_starts_kernel(
    selected_ptr,
    part_counts_ptr,
    block_counts_ptr,
    group_starts_ptr,
    num_pairs,
    num_experts,
    parts_per_block,
    num_rows,
    capacity,
    row_of_ptr,
    expert_of_ptr,
    PART: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    # Without counts of blocks those of parts are all there is, and ranks are found in the plain
    # way: two comparisons, summed along the second axis.
    part = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, PART)
    pair = part * PART + lane
    inside = pair < num_pairs
    selected = tl.load(selected_ptr + pair, mask=inside, other=-1)
    routed = (selected >= 0) & (selected < num_experts)
    start = tl.load(group_starts_ptr + selected, mask=routed, other=0)
    rank = tl.load(part_counts_ptr + part * num_experts + selected, mask=routed, other=0)
    if block_counts_ptr is None:
        alike = selected[:, None] == selected[None, :]
        rank += tl.sum((alike & (lane[None, :] < lane[:, None])).to(tl.int32), 1)
    else:
        earlier = block_counts_ptr + part // parts_per_block * num_experts
        rank += tl.load(earlier + selected, mask=routed, other=0)
        rank += _rank_in_part(tl.where(routed, selected, -1), PART, BLOCK_EXPERTS)
    _store_rows(
        row_of_ptr,
        expert_of_ptr,
        pair,
        inside,
        selected,
        num_experts,
        start,
        rank,
        num_rows,
        capacity,
    )


def _place_by_starts(
    selected: jax.Array,
    part_counts: jax.Array,
    block_counts: jax.Array | None,
    group_starts: jax.Array,
    bounds: tuple[int, int],
    implementation: str | None,
    *,
    part: int,
    parts_per_block: int,
    block_experts: int,
    num_warps: int,
) -> tuple[jax.Array, jax.Array]:
    num_parts, num_experts = part_counts.shape
    return triton_call(
        selected,
        part_counts,
        block_counts,
        group_starts,
        selected.size,
        num_experts,
        parts_per_block,
        *bounds,
        kernel=_place_by_starts_kernel,
        out_type=(_ints(*selected.shape), _ints(*selected.shape)),
        grid=num_parts,
        num_warps=num_warps,
        implementation=implementation,
        PART=part,
        BLOCK_EXPERTS=block_experts,
    )


# --- four launches: count and rank by comparing, one program lays out the groups ------


@triton.jit(do_not_specialize=["num_pairs", "num_experts"])
def _count_by_comparison_kernel(
    selected_ptr,
    num_pairs,
    num_experts,
    counts_ptr,
    PART: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    part = tl.program_id(0).to(tl.int64)
    pair = part * PART + tl.arange(0, PART)
    selected = tl.load(selected_ptr + pair, mask=pair < num_pairs, other=-1)
    for first_expert in range(0, num_experts, BLOCK_EXPERTS):
        expert = first_expert + tl.arange(0, BLOCK_EXPERTS)
        count = tl.sum((selected[:, None] == expert[None, :]).to(tl.int32), 0)
        tl.store(counts_ptr + part * num_experts + expert, count, mask=expert < num_experts)


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
    end = tl.zeros([1], tl.int64)
    dropped = tl.zeros([1], tl.int32)
    for first_expert in range(0, num_experts, BLOCK_EXPERTS):
        expert = first_expert + tl.arange(0, BLOCK_EXPERTS)
        known = expert < num_experts
        count = tl.load(group_counts_ptr + expert, mask=known, other=0)
        end, more = _store_groups(
            expert,
            known,
            count,
            end,
            num_rows,
            capacity,
            align_size,
            group_starts_ptr,
            group_sizes_ptr,
            group_filled_ptr,
        )
        dropped += more
    tl.store(num_dropped_ptr + tl.arange(0, 1), dropped)


def four_launches(
    selected: jax.Array,
    *,
    num_experts: int,
    num_rows: int,
    capacity: int,
    align_size: int,
    implementation: str | None,
) -> Placement:
    """Count by comparison, scan, lay out the groups, rank by comparison and place."""
    part, block_experts = 128, min(triton.next_power_of_2(num_experts), 64)
    groups = _ints(num_experts)
    counts = triton_call(
        selected,
        selected.size,
        num_experts,
        kernel=_count_by_comparison_kernel,
        out_type=_ints(triton.cdiv(selected.size, part), num_experts),
        grid=triton.cdiv(selected.size, part),
        num_warps=4,
        implementation=implementation,
        PART=part,
        BLOCK_EXPERTS=block_experts,
    )
    scan_config = functools.partial(ScanConfig, block_blocks=128, block_experts=8)
    with mock.patch.object(plan_launchers, "ScanConfig", scan_config):
        earlier, group_counts = plan_launchers._scan_counts(counts, implementation)
    starts, sizes, filled, dropped = triton_call(
        group_counts,
        num_experts,
        num_rows,
        capacity,
        align_size,
        kernel=_lay_out_groups_kernel,
        out_type=(groups, groups, groups, _ints()),
        grid=1,
        num_warps=4,
        implementation=implementation,
        BLOCK_EXPERTS=min(triton.next_power_of_2(num_experts), 1024),
    )
    row_of, expert_of = _place_by_starts(
        selected,
        earlier,
        None,
        starts,
        (num_rows, capacity),
        implementation,
        part=part,
        parts_per_block=1,
        block_experts=block_experts,
        num_warps=4,
    )
    return Placement(row_of, expert_of, sizes, group_counts, filled, dropped)


# --- two launches: no scan, every program of the second sums up all blocks itself -----


@triton.jit(
    do_not_specialize=[
        "num_pairs",
        "num_experts",
        "num_blocks",
        "num_rows",
        "capacity",
        "align_size",
    ]
)
def _sum_and_place_kernel(
    selected_ptr,
    part_counts_ptr,
    block_counts_ptr,
    num_pairs,
    num_experts,
    num_blocks,
    num_rows,
    capacity,
    align_size,
    row_of_ptr,
    expert_of_ptr,
    group_sizes_ptr,
    group_counts_ptr,
    group_filled_ptr,
    num_dropped_ptr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_BLOCKS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    # A program places a whole block, so that the sums are made once for many parts.
    this = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, PARTS * PART)
    pair = this * (PARTS * PART) + number
    inside = pair < num_pairs
    selected = tl.load(selected_ptr + pair, mask=inside, other=-1)
    routed = (selected >= 0) & (selected < num_experts)
    part = this * PARTS + number // PART
    rank = tl.load(part_counts_ptr + part * num_experts + selected, mask=routed, other=0)
    start = tl.zeros([PARTS * PART], tl.int32)
    end_before = tl.zeros([1], tl.int64)
    dropped = tl.zeros([1], tl.int32)
    for first_expert in range(0, num_experts, BLOCK_EXPERTS):
        expert = first_expert + tl.arange(0, BLOCK_EXPERTS)
        known = expert < num_experts
        total = tl.zeros([BLOCK_EXPERTS], tl.int32)
        earlier = tl.zeros([BLOCK_EXPERTS], tl.int32)
        for first in range(0, num_blocks, BLOCK_BLOCKS):
            block = first + tl.arange(0, BLOCK_BLOCKS)
            at = block_counts_ptr + block.to(tl.int64)[:, None] * num_experts + expert[None, :]
            count = tl.load(at, mask=(block < num_blocks)[:, None] & known[None, :], other=0)
            total += tl.sum(count, 0)
            earlier += tl.sum(tl.where((block < this)[:, None], count, 0), 0)
        starts, size, filled, end_before = _lay_out_groups(
            total, end_before, num_rows, capacity, align_size
        )
        local = selected - first_expert
        here = routed & (local >= 0) & (local < BLOCK_EXPERTS)
        local = tl.where(here, local, 0)
        start += tl.where(here, tl.gather(starts, local, 0), 0)
        rank += tl.where(here, tl.gather(earlier, local, 0), 0)
        if this == 0:
            tl.store(group_sizes_ptr + expert, size, mask=known)
            tl.store(group_counts_ptr + expert, total, mask=known)
            tl.store(group_filled_ptr + expert, filled, mask=known)
            dropped += tl.sum(total - filled, 0)
    if this == 0:
        tl.store(num_dropped_ptr + tl.arange(0, 1), dropped)
    # As `_rank_in_part` does it, for all parts at once.
    key = tl.reshape(tl.where(routed, selected, -1), [PARTS, PART]) * (2 * PART)
    key += tl.arange(0, PART)[None, :]
    gap = (key[:, None, :] - key[:, :, None] - 1).to(tl.uint32, bitcast=True)
    rank += tl.reshape(tl.sum((gap < PART - 1).to(tl.int32), 1), [PARTS * PART])
    _store_rows(
        row_of_ptr,
        expert_of_ptr,
        pair,
        inside,
        selected,
        num_experts,
        start,
        rank,
        num_rows,
        capacity,
    )


def two_launches(
    selected: jax.Array,
    *,
    num_experts: int,
    num_rows: int,
    capacity: int,
    align_size: int,
    implementation: str | None,
) -> Placement:
    """Count, then sum up the blocks in every program that places one: 16 parts of 64 pairs."""
    part, parts = 64, 16
    config = SortConfig(SortConfig.heuristic(num_experts).block_experts, part=part)
    with (
        mock.patch.object(SortConfig, "heuristic", return_value=config),
        mock.patch.object(SortConfig, "parts_per_block", return_value=parts),
    ):
        part_counts, block_counts = plan_launchers._count_pairs(
            selected, num_experts, implementation
        )
    ids, groups = _ints(*selected.shape), _ints(num_experts)
    outputs = triton_call(
        selected,
        part_counts,
        block_counts,
        selected.size,
        num_experts,
        block_counts.shape[0],
        num_rows,
        capacity,
        align_size,
        kernel=_sum_and_place_kernel,
        out_type=(ids, ids, groups, groups, groups, _ints()),
        grid=block_counts.shape[0],
        num_warps=16,
        implementation=implementation,
        PARTS=parts,
        PART=part,
        BLOCK_BLOCKS=32,
        BLOCK_EXPERTS=config.block_experts,
    )
    return Placement(*outputs)


# --- all parts in one histogram: bins by part and expert, and a sum along the parts ---


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "pairs_per_block"])
def _count_parts_at_once_kernel(
    selected_ptr,
    num_pairs,
    num_experts,
    pairs_per_block,
    part_counts_ptr,
    block_counts_ptr,
    PART: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    PARTS: tl.constexpr = 4,
):
    block = tl.program_id(0).to(tl.int64)
    start = block * pairs_per_block
    end = tl.minimum(start + pairs_per_block, num_pairs)
    part = tl.arange(0, PARTS)
    number = tl.arange(0, PARTS * PART)
    for first_expert in range(0, num_experts, BLOCK_EXPERTS):
        expert = first_expert + tl.arange(0, BLOCK_EXPERTS)
        known = expert < num_experts
        total = tl.zeros([BLOCK_EXPERTS], tl.int32)
        for first in range(start, end, PARTS * PART):
            selected = tl.load(selected_ptr + first + number, mask=first + number < end, other=-1)
            local = selected - first_expert
            counted = (local >= 0) & (local < BLOCK_EXPERTS)
            bins = number // PART * BLOCK_EXPERTS + local
            count = tl.histogram(bins, PARTS * BLOCK_EXPERTS, mask=counted)
            count = tl.reshape(count, [PARTS, BLOCK_EXPERTS])
            at = part_counts_ptr + (first // PART + part)[:, None] * num_experts + expert[None, :]
            counts_before = total[None, :] + tl.cumsum(count, 0) - count
            mask = (first + part * PART < end)[:, None] & known[None, :]
            tl.store(at, counts_before, mask=mask)
            total += tl.sum(count, 0)
        tl.store(block_counts_ptr + block * num_experts + expert, total, mask=known)


def parts_in_one_histogram(selected: jax.Array, **sizes: Any) -> Placement:
    """The library's launches with a count that has no loop over four parts."""
    with mock.patch.object(plan_kernels, "_count_pairs_kernel", _count_parts_at_once_kernel):
        return _place_pairs(selected, **sizes)


# --- starts by comparison: each pair compared with each expert, instead of `tl.gather` -


@triton.jit(
    do_not_specialize=[
        "num_pairs",
        "num_experts",
        "parts_per_block",
        "num_rows",
        "capacity",
        "align_size",
    ]
)
def _place_by_comparison_kernel(
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
        rank += tl.where(here, _rank_in_part(tl.where(here, local, -1), PART, BLOCK_EXPERTS), 0)
        start += tl.sum(tl.where(expert[:, None] == selected[None, :], starts[:, None], 0), 0)
        if part == 0:
            tl.store(group_sizes_ptr + expert, size, mask=known)
            tl.store(group_filled_ptr + expert, filled, mask=known)
            dropped += tl.sum(count - filled, 0)
    if part == 0:
        tl.store(num_dropped_ptr + tl.arange(0, 1), dropped)
    _store_rows(
        row_of_ptr,
        expert_of_ptr,
        pair,
        inside,
        selected,
        num_experts,
        start,
        rank,
        num_rows,
        capacity,
    )


def starts_by_comparison(selected: jax.Array, **sizes: Any) -> Placement:
    """The library's launches with a place kernel that does not gather."""
    with mock.patch.object(plan_kernels, "_place_pairs_kernel", _place_by_comparison_kernel):
        return _place_pairs(selected, **sizes)


# --- groups laid out in the scan's launch: once, by a program that sums up all blocks -


@triton.jit(do_not_specialize=["num_blocks", "num_experts", "num_rows", "capacity", "align_size"])
def _scan_and_lay_out_kernel(
    counts_ptr,
    num_blocks,
    num_experts,
    num_rows,
    capacity,
    align_size,
    earlier_ptr,
    group_starts_ptr,
    group_sizes_ptr,
    group_counts_ptr,
    group_filled_ptr,
    num_dropped_ptr,
    BLOCK_BLOCKS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    ALL_BLOCKS: tl.constexpr,
    ALL_EXPERTS: tl.constexpr,
):
    # Not in place, as the library's scan is: the first program reads what the others scan.
    if tl.program_id(0) > 0:
        expert = (tl.program_id(0) - 1) * BLOCK_EXPERTS + tl.arange(0, BLOCK_EXPERTS)
        total = tl.zeros([BLOCK_EXPERTS], tl.int32)
        for first in range(0, num_blocks, BLOCK_BLOCKS):
            block = first + tl.arange(0, BLOCK_BLOCKS)
            mask = (block < num_blocks)[:, None] & (expert < num_experts)[None, :]
            at = block.to(tl.int64)[:, None] * num_experts + expert[None, :]
            count = tl.load(counts_ptr + at, mask=mask, other=0)
            tl.store(earlier_ptr + at, total[None, :] + tl.cumsum(count, 0) - count, mask=mask)
            total += tl.sum(count, 0)
    else:
        end = tl.zeros([1], tl.int64)
        dropped = tl.zeros([1], tl.int32)
        for first_expert in range(0, num_experts, ALL_EXPERTS):
            expert = first_expert + tl.arange(0, ALL_EXPERTS)
            known = expert < num_experts
            group_count = tl.zeros([ALL_EXPERTS], tl.int32)
            for first in range(0, num_blocks, ALL_BLOCKS):
                block = first + tl.arange(0, ALL_BLOCKS)
                mask = (block < num_blocks)[:, None] & known[None, :]
                at = block.to(tl.int64)[:, None] * num_experts + expert[None, :]
                group_count += tl.sum(tl.load(counts_ptr + at, mask=mask, other=0), 0)
            tl.store(group_counts_ptr + expert, group_count, mask=known)
            end, more = _store_groups(
                expert,
                known,
                group_count,
                end,
                num_rows,
                capacity,
                align_size,
                group_starts_ptr,
                group_sizes_ptr,
                group_filled_ptr,
            )
            dropped += more
        tl.store(num_dropped_ptr + tl.arange(0, 1), dropped)


def groups_in_scan(
    selected: jax.Array,
    *,
    num_experts: int,
    num_rows: int,
    capacity: int,
    align_size: int,
    implementation: str | None,
) -> Placement:
    """Count, scan and lay out in one launch, then place by starts that are loaded."""
    sort, scan = SortConfig.heuristic(num_experts), ScanConfig()
    part_counts, block_counts = plan_launchers._count_pairs(selected, num_experts, implementation)
    groups = _ints(num_experts)
    earlier, starts, *outputs = triton_call(
        block_counts,
        block_counts.shape[0],
        num_experts,
        num_rows,
        capacity,
        align_size,
        kernel=_scan_and_lay_out_kernel,
        out_type=(_ints(*block_counts.shape), groups, groups, groups, groups, _ints()),
        grid=1 + triton.cdiv(num_experts, scan.block_experts),
        num_warps=8,
        implementation=implementation,
        BLOCK_BLOCKS=scan.block_blocks,
        BLOCK_EXPERTS=scan.block_experts,
        ALL_BLOCKS=32,
        ALL_EXPERTS=min(sort.block_experts, 256),
    )
    row_of, expert_of = _place_by_starts(
        selected,
        part_counts,
        earlier,
        starts,
        (num_rows, capacity),
        implementation,
        part=sort.part,
        parts_per_block=sort.parts_per_block(selected.size),
        block_experts=sort.block_experts,
        num_warps=sort.place_warps,
    )
    return Placement(row_of, expert_of, *outputs)


# --- eviction hints: rows are read once and written once, so caches need not keep them -


@triton.jit(do_not_specialize=["num_rows", "num_chunks", "search_steps"])
def _move_rows_with_hints_kernel(
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
    LOAD_HINT: tl.constexpr,
    STORE_HINT: tl.constexpr,
):
    width_blocks: tl.constexpr = max(1, (WIDTH + BLOCK_WIDTH - 1) // BLOCK_WIDTH)
    width_block = tl.program_id(0) % width_blocks
    first_row = tl.program_id(0) // width_blocks * BLOCK_ROWS
    row = first_row + tl.arange(0, BLOCK_ROWS)
    inside = tl.arange(0, BLOCK_ROWS) < num_rows - first_row
    source = _source_rows(
        row, ends_ptr, shifts_ptr, num_rows, num_chunks, search_steps, SEARCH_WAYS
    )
    column = width_block.to(tl.int64) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    mask = inside[:, None] & (column < WIDTH)[None, :]
    read = rows_ptr + source[:, None] * WIDTH + column[None, :]
    write = moved_rows_ptr + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    values = tl.load(read, mask=mask, eviction_policy=LOAD_HINT)
    tl.store(write, values, mask=mask, eviction_policy=STORE_HINT)
    if probs_ptr is not None:  # noqa: SIM102 - known when it compiles, unlike the other
        if width_block == 0:
            prob = tl.load(probs_ptr + source, mask=inside)
            tl.store(moved_probs_ptr + row, prob, mask=inside)


def move_rows_with_hints(
    rows: jax.Array,
    probs: jax.Array | None,
    chunk_map: ChunkMap,
    *,
    implementation: str | None,
    load_hint: str = "",
    store_hint: str = "",
) -> tuple[jax.Array, jax.Array | None]:
    """The library's launch with Triton's eviction policies for the rows; "" is none."""
    call = functools.partial(triton_call, LOAD_HINT=load_hint, STORE_HINT=store_hint)
    with (
        mock.patch.object(chunk_kernels, "_move_rows_kernel", _move_rows_with_hints_kernel),
        mock.patch.object(chunk_launchers, "triton_call", call),
    ):
        return _move_rows(rows, probs, chunk_map, implementation=implementation)
