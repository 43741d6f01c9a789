"""The plan in plain JAX: the path for every platform without Triton.

The same results as the kernels' on every input, by a stable sort of the pairs' experts.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from triax.moe.shared.arrays import running_sum


class Placement(NamedTuple):
    """The arrays of a plan; `triax.moe.Plan` says what they hold."""

    row_of: jax.Array
    expert_of: jax.Array
    group_sizes: jax.Array
    group_counts: jax.Array
    group_filled: jax.Array
    num_dropped: jax.Array


def select_experts_reference(routing_map: jax.Array, top_k: int) -> jax.Array:
    """The first `top_k` experts of each token's mask, int32 [tokens, top_k], -1 past the last."""
    num_tokens, num_experts = routing_map.shape
    chosen = routing_map != 0
    slot = jnp.cumsum(chosen, axis=1, dtype=jnp.int32) - 1
    slot = jnp.where(chosen, slot, top_k)
    token = jnp.arange(num_tokens, dtype=jnp.int32)[:, None]
    expert = jnp.arange(num_experts, dtype=jnp.int32)[None, :]
    selected = jnp.full((num_tokens, top_k), -1, jnp.int32)
    return selected.at[token, slot].set(jnp.broadcast_to(expert, slot.shape), mode="drop")


def place_mask_reference(routing_map: jax.Array, top_k: int, **sizes: int) -> Placement:
    """The rows of all tokens of a mask, by slots."""
    num_experts = routing_map.shape[1]
    return place_pairs_reference(
        select_experts_reference(routing_map, top_k), num_experts=num_experts, **sizes
    )


def place_pairs_reference(
    selected: jax.Array, num_experts: int, num_rows: int, capacity: int, align_size: int
) -> Placement:
    """The rows of all pairs, from int32 expert ids [tokens, top_k]."""
    flat = selected.reshape(-1)
    routed = (flat >= 0) & (flat < num_experts)
    expert = jnp.where(routed, flat, num_experts)
    counts = jnp.zeros(num_experts, jnp.int32).at[expert].add(1, mode="drop")
    kept = jnp.minimum(counts, capacity)
    # No sum here can pass 2**31: each is held at the rows there are.
    held = jnp.minimum(kept, num_rows)
    aligned = held + jnp.minimum(-kept % align_size, num_rows - held)
    ends = running_sum(aligned, num_rows)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    sizes = ends - starts
    filled = jnp.minimum(kept, sizes)

    order = jnp.argsort(expert, stable=True)
    numbers = jnp.arange(flat.size, dtype=jnp.int32)
    position = jnp.zeros_like(expert).at[order].set(numbers, unique_indices=True)
    rank = position - (jnp.cumsum(counts, dtype=jnp.int32) - counts)[expert]
    start = starts[expert]
    placed = routed & (rank < capacity) & (rank < num_rows - start)
    row_of = jnp.where(placed, start + rank, -1)
    return Placement(
        row_of=row_of.reshape(selected.shape),
        expert_of=jnp.where(routed, flat, -1).reshape(selected.shape),
        group_sizes=sizes,
        group_counts=counts,
        group_filled=filled,
        num_dropped=jnp.sum(counts - filled, dtype=jnp.int32),
    )
