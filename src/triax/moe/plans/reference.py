"""The plan in plain JAX: the path for every platform without Triton.

It gives the kernels' results on every input, by a stable sort of the pairs' experts.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from triax import messages
from triax.moe.shared.arrays import is_nonzero, running_sum


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """Which row every (token, slot) goes to; made by `make_plan`.

    Rows are grouped by expert in ascending order. Within a group, tokens keep their original order;
    a token that names the expert twice keeps the order of its slots. Pad rows then fill the group
    up to a multiple of `align_size`, and the remaining rows follow the last group. Pad rows and
    rows past the groups are zero.

    A plan is a pytree: its arrays are leaves, its sizes are static. Under `jax.checkpoint`
    the arrays carry the name "triax_plan".

    Attributes:
      row_of: int32 [tokens, top_k], the row; -1 if not routed or dropped.
      expert_of: int32 [tokens, top_k], the expert; -1 if not routed. A dropped pair still has the
        expert that was full.
      group_sizes: int32 [experts], the rows of each group, pad rows included, clipped to
        `num_rows`: what `jax.lax.ragged_dot` expects.
      group_counts: int32 [experts], the pairs routed to each expert, before capacity, alignment and
        dropping. Their sum is the number of filled rows plus `num_dropped`.
      group_filled: int32 [experts], the rows of each group that hold a token.
      num_dropped: int32 [], the routed pairs that got no row.
      num_rows: the number of rows.
      num_experts: the number of groups.
      align_size: group sizes and `num_rows` are multiples of this.
    """

    row_of: jax.Array
    expert_of: jax.Array
    group_sizes: jax.Array
    group_counts: jax.Array
    group_filled: jax.Array
    num_dropped: jax.Array
    num_rows: int = dataclasses.field(metadata={"static": True})
    num_experts: int = dataclasses.field(metadata={"static": True})
    align_size: int = dataclasses.field(metadata={"static": True})

    def __repr__(self) -> str:
        return messages.fields(self)


def select_experts_reference(routing_map: jax.Array, top_k: int) -> jax.Array:
    """Returns the first `top_k` experts in each token's mask, int32 [tokens, top_k], then -1."""
    num_tokens, num_experts = routing_map.shape
    chosen = is_nonzero(routing_map)
    slot = jnp.cumsum(chosen, axis=1, dtype=jnp.int32) - 1
    # An extra column takes the experts that are not kept: under XLA's deterministic scatter an
    # index out of bounds in one of two dimensions would write to the next row.
    slot = jnp.minimum(jnp.where(chosen, slot, top_k), top_k)
    token = jnp.arange(num_tokens, dtype=jnp.int32)[:, None]
    expert = jnp.arange(num_experts, dtype=jnp.int32)[None, :]
    selected = jnp.full((num_tokens, top_k + 1), -1, jnp.int32)
    return selected.at[token, slot].set(jnp.broadcast_to(expert, slot.shape))[:, :top_k]


def place_mask_reference(routing_map: jax.Array, top_k: int, **sizes: int) -> Plan:
    """Plans the rows of a mask's tokens."""
    num_experts = routing_map.shape[1]
    return place_pairs_reference(
        select_experts_reference(routing_map, top_k), num_experts=num_experts, **sizes
    )


def place_pairs_reference(
    selected: jax.Array, num_experts: int, num_rows: int, capacity: int, align_size: int
) -> Plan:
    """Plans the rows of all pairs, from int32 expert ids [tokens, top_k]."""
    flat = selected.reshape(-1)
    routed = (flat >= 0) & (flat < num_experts)
    expert = jnp.where(routed, flat, num_experts)
    counts = jnp.zeros(num_experts, jnp.int32).at[expert].add(1, mode="drop")
    kept = jnp.minimum(counts, capacity)
    # Every sum is clipped to `num_rows`, so that it cannot pass 2**31.
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
    return Plan(
        row_of=row_of.reshape(selected.shape),
        expert_of=jnp.where(routed, flat, -1).reshape(selected.shape),
        group_sizes=sizes,
        group_counts=counts,
        group_filled=filled,
        num_dropped=jnp.sum(counts - filled, dtype=jnp.int32),
        num_rows=num_rows,
        num_experts=num_experts,
        align_size=align_size,
    )
