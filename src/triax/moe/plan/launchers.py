"""The plan's kernel launches: output types, grids, and the calls of the bridge."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from triax.bridge.call import triton_call
from triax.moe.plan.configs import LayOutConfig, PlaceConfig, ScanConfig, SelectConfig
from triax.moe.plan.reference import Placement

# Kernels are imported where they are launched: importing triax.moe needs no Triton.


def select_experts(routing_map: jax.Array, *, top_k: int, implementation: str | None) -> jax.Array:
    """The first `top_k` experts of each token's mask, int32 [tokens, top_k], -1 past the last."""
    from triax.moe.plan.kernels import _select_experts_kernel

    num_tokens, num_experts = routing_map.shape
    config = SelectConfig.heuristic(num_experts)
    return triton_call(
        routing_map,
        num_tokens,
        num_experts,
        top_k,
        kernel=_select_experts_kernel,
        out_type=_ints(num_tokens, top_k),
        # Every token once: a program walks over all experts, for slots are counted along them.
        grid=-(-num_tokens // config.block_tokens),
        num_warps=config.num_warps,
        name="select_experts",
        vmap_method="sequential",
        implementation=implementation,
        BLOCK_TOKENS=config.block_tokens,
        BLOCK_EXPERTS=config.block_experts,
    )


def place_pairs(
    selected: jax.Array,
    *,
    num_experts: int,
    num_rows: int,
    capacity: int,
    align_size: int,
    implementation: str | None,
) -> Placement:
    """The rows of all pairs, from int32 expert ids [tokens, top_k], at least one of them."""
    counts = _count_pairs(selected, num_experts, implementation)
    earlier, group_counts = _scan_counts(counts, implementation)
    starts, group_sizes, group_filled, num_dropped = _lay_out_groups(
        group_counts, num_rows, capacity, align_size, implementation
    )
    row_of, expert_of = _place_pairs(selected, earlier, starts, num_rows, capacity, implementation)
    return Placement(row_of, expert_of, group_sizes, group_counts, group_filled, num_dropped)


def _count_pairs(selected: jax.Array, num_experts: int, implementation: str | None) -> jax.Array:
    """The pairs of each block that go to each expert: the counting sort's one workspace."""
    from triax.moe.plan.kernels import _count_pairs_kernel

    config = PlaceConfig.heuristic(num_experts)
    num_blocks = -(-selected.size // config.block_pairs)
    return triton_call(
        selected,
        selected.size,
        num_experts,
        kernel=_count_pairs_kernel,
        out_type=_ints(num_blocks, num_experts),
        # A program for each block of pairs, so that no two write the same counts.
        grid=num_blocks,
        num_warps=config.num_warps,
        name="count_pairs",
        vmap_method="sequential",
        implementation=implementation,
        BLOCK_PAIRS=config.block_pairs,
        BLOCK_EXPERTS=config.block_experts,
    )


def _scan_counts(counts: jax.Array, implementation: str | None) -> tuple[jax.Array, jax.Array]:
    """The pairs of earlier blocks, in place of `counts`, and those of all blocks [experts]."""
    from triax.moe.plan.kernels import _scan_counts_kernel

    config = ScanConfig()
    num_blocks, num_experts = counts.shape
    earlier, group_counts = triton_call(
        counts,
        num_blocks,
        num_experts,
        kernel=_scan_counts_kernel,
        out_type=(_ints(num_blocks, num_experts), _ints(num_experts)),
        input_output_aliases={"counts_ptr": 0},
        # Over experts only: along the blocks the sum is sequential.
        grid=-(-num_experts // config.block_experts),
        num_warps=config.num_warps,
        name="scan_counts",
        vmap_method="sequential",
        implementation=implementation,
        BLOCK_BLOCKS=config.block_blocks,
        BLOCK_EXPERTS=config.block_experts,
    )
    return earlier, group_counts


def _lay_out_groups(
    group_counts: jax.Array,
    num_rows: int,
    capacity: int,
    align_size: int,
    implementation: str | None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The first row of each group, its size, its rows with a token; and what was dropped."""
    from triax.moe.plan.kernels import _lay_out_groups_kernel

    num_experts = group_counts.shape[0]
    config = LayOutConfig.heuristic(num_experts)
    starts, sizes, filled, num_dropped = triton_call(
        group_counts,
        num_experts,
        num_rows,
        capacity,
        align_size,
        kernel=_lay_out_groups_kernel,
        out_type=(_ints(num_experts), _ints(num_experts), _ints(num_experts), _ints()),
        # One program: where a group starts depends on all before it.
        grid=1,
        num_warps=config.num_warps,
        name="lay_out_groups",
        vmap_method="sequential",
        implementation=implementation,
        BLOCK_EXPERTS=config.block_experts,
    )
    return starts, sizes, filled, num_dropped


def _place_pairs(
    selected: jax.Array,
    earlier: jax.Array,
    group_starts: jax.Array,
    num_rows: int,
    capacity: int,
    implementation: str | None,
) -> tuple[jax.Array, jax.Array]:
    """The row and the expert of each pair, -1 for none."""
    from triax.moe.plan.kernels import _place_pairs_kernel

    num_experts = group_starts.shape[0]
    config = PlaceConfig.heuristic(num_experts)
    row_of, expert_of = triton_call(
        selected,
        earlier,
        group_starts,
        selected.size,
        num_experts,
        num_rows,
        capacity,
        kernel=_place_pairs_kernel,
        out_type=(_ints(*selected.shape), _ints(*selected.shape)),
        # The blocks that were counted, no others: `earlier` has a line for each.
        grid=earlier.shape[0],
        num_warps=config.num_warps,
        name="place_pairs",
        vmap_method="sequential",
        implementation=implementation,
        BLOCK_PAIRS=config.block_pairs,
    )
    return row_of, expert_of


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
