"""Launches the plan's kernels: result types, grids and configs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from triax.binding.launch import KernelImplementation
from triax.moe.plans.configs import FewPairsConfig, MaskConfig, SortConfig
from triax.moe.plans.reference import Plan
from triax.moe.shared.launching import launch

# Kernels are imported where they are launched: importing triax.moe needs no Triton.

# A program sums the blocks of some experts, this many at a time.
_SCAN = {"BLOCK_BLOCKS": 256, "BLOCK_EXPERTS": 4, "num_warps": 4}


def select_experts(
    routing_map: jax.Array, *, top_k: int, implementation: KernelImplementation | None
) -> jax.Array:
    """Returns the first `top_k` experts in each token's mask, int32 [tokens, top_k], then -1."""
    from triax.moe.plans.kernels import _select_experts_kernel

    num_tokens, num_experts = routing_map.shape
    config = MaskConfig.to_select(num_experts)
    return launch(
        _select_experts_kernel,
        routing_map,
        num_tokens,
        num_experts,
        top_k,
        out_type=_ints(num_tokens, top_k),
        # One program takes all experts of its tokens, because slots are counted along the experts.
        grid=-(-num_tokens // config.block_tokens),
        config=config,
        implementation=implementation,
    )


def place_mask(
    routing_map: jax.Array,
    *,
    top_k: int,
    num_rows: int,
    capacity: int,
    align_size: int,
    implementation: KernelImplementation | None,
) -> Plan:
    """Plans the rows of a mask's tokens; `top_k` must be at least the number of experts."""
    from triax.moe.plans.kernels import _count_mask_kernel, _place_mask_kernel

    num_tokens, num_experts = routing_map.shape
    config = MaskConfig.to_place(num_experts)
    num_blocks = -(-num_tokens // config.block_tokens)
    # The number of tokens of each block that go to each expert.
    block_counts = launch(
        _count_mask_kernel,
        routing_map,
        num_tokens,
        num_experts,
        out_type=_ints(num_blocks, num_experts),
        # A program for each block of tokens, so that no two write the same counts.
        grid=num_blocks,
        config=config,
        implementation=implementation,
    )
    block_counts, group_counts = _scan_counts(block_counts, implementation)
    bounds = (num_rows, capacity, align_size)
    plan = launch(
        _place_mask_kernel,
        routing_map,
        block_counts,
        group_counts,
        num_tokens,
        num_experts,
        top_k,
        *bounds,
        out_type=_plan_type((num_tokens, top_k), num_experts, bounds),
        # A program for each block that was counted; the first program writes the groups.
        grid=num_blocks,
        config=config,
        implementation=implementation,
    )
    return dataclasses.replace(plan, group_counts=group_counts)


def place_pairs(
    selected: jax.Array,
    *,
    num_experts: int,
    num_rows: int,
    capacity: int,
    align_size: int,
    implementation: KernelImplementation | None,
) -> Plan:
    """Plans the rows of all pairs, from int32 expert ids [tokens, top_k], at least one pair."""
    from triax.moe.plans.kernels import _count_pairs_kernel, _place_pairs_kernel

    num_pairs, bounds = selected.size, (num_rows, capacity, align_size)
    if num_pairs <= FewPairsConfig.max_pairs:
        return _place_few_pairs(selected, num_experts, bounds, implementation)
    config = SortConfig.heuristic(num_experts)
    num_parts = -(-num_pairs // config.part)
    parts_per_block = config.parts_per_block(num_pairs)
    num_blocks = -(-num_parts // parts_per_block)
    # By expert, the number of pairs before each part in its block, and of pairs in each block.
    part_counts, block_counts = launch(
        _count_pairs_kernel,
        selected,
        num_pairs,
        num_experts,
        parts_per_block * config.part,
        out_type=(_ints(num_parts, num_experts), _ints(num_blocks, num_experts)),
        # A program for each block of pairs, so that no two write the same counts.
        grid=num_blocks,
        num_warps=config.count_warps,
        config=config,
        implementation=implementation,
    )
    block_counts, group_counts = _scan_counts(block_counts, implementation)
    plan = launch(
        _place_pairs_kernel,
        selected,
        part_counts,
        block_counts,
        group_counts,
        num_pairs,
        num_experts,
        parts_per_block,
        *bounds,
        out_type=_plan_type(selected.shape, num_experts, bounds),
        # A program for each part that was counted; the first program writes the groups.
        grid=num_parts,
        num_warps=config.place_warps,
        config=config,
        implementation=implementation,
    )
    return dataclasses.replace(plan, group_counts=group_counts)


def _place_few_pairs(
    selected: jax.Array,
    num_experts: int,
    bounds: tuple[int, int, int],
    implementation: KernelImplementation | None,
) -> Plan:
    from triax.moe.plans.kernels import _place_few_pairs_kernel

    config = FewPairsConfig.heuristic(num_experts)
    return launch(
        _place_few_pairs_kernel,
        selected,
        selected.size,
        num_experts,
        *bounds,
        out_type=_plan_type(selected.shape, num_experts, bounds, counts=_ints(num_experts)),
        # Every program reads all pairs and places its own; the first writes the groups.
        grid=-(-selected.size // config.block_pairs),
        config=config,
        implementation=implementation,
    )


def _scan_counts(
    counts: jax.Array, implementation: KernelImplementation | None
) -> tuple[jax.Array, jax.Array]:
    """Returns the sums of `counts` over earlier blocks (in place) and over all blocks [experts]."""
    from triax.moe.plans.kernels import _scan_counts_kernel

    num_blocks, num_experts = counts.shape
    return launch(
        _scan_counts_kernel,
        counts,
        num_blocks,
        num_experts,
        out_type=(_ints(num_blocks, num_experts), _ints(num_experts)),
        input_output_aliases={"counts_ptr": 0},
        # Over experts only: along the blocks the sum is sequential.
        grid=-(-num_experts // _SCAN["BLOCK_EXPERTS"]),
        implementation=implementation,
        **_SCAN,
    )


def _plan_type(
    shape: tuple[int, ...], num_experts: int, bounds: tuple[int, int, int], counts: Any = None
) -> Any:
    """Returns the type of a plan for pairs of a shape; `counts` is None if counted separately."""
    ids, groups = _ints(*shape), _ints(num_experts)
    num_rows, _, align_size = bounds
    return Plan(ids, ids, groups, counts, groups, _ints(), num_rows, num_experts, align_size)


def _ints(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
