"""The arguments of `jax.lax.ragged_all_to_all`, and the sorts before and after it, under the names
of TransformerEngine's `MoEBlock`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from triax.errors import ArgumentValueError
from triax.moe.chunk_sort import arguments as chunk_arguments
from triax.moe.chunk_sort.ops import sort_chunks
from triax.moe.shared import arguments
from triax.moe.shared.arguments import Array
from triax.moe.shared.implementation import Implementation
from triax.moe.transformer_engine import tables
from triax.sharding import explicit

_Parameters = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def compute_ragged_all_to_all_params(
    all_shards_tokens_per_expert: Array, shard_id: Array | int, num_expert_shards: int
) -> _Parameters:
    """Computes the exchange in which each shard gets the rows of its experts.

    The rows of the shard that sends are sorted by expert.

    Args:
      all_shards_tokens_per_expert: integer [shards, experts], the rows of each shard for each
        expert.
      shard_id: integer [], this shard; may be traced.
      num_expert_shards: the number of shards, which divides the experts evenly.

    Returns:
      input_offsets, send_sizes, output_offsets, recv_sizes: integer [shards] each, for
      `jax.lax.ragged_all_to_all`. The receiving array must have room for the sum of recv_sizes:
      nothing is clipped.
    """
    counts = _counts(all_shards_tokens_per_expert, num_expert_shards)
    return _parameters(jnp.sum(counts, axis=2), shard_id)


def compute_reverse_ragged_all_to_all_params(
    all_shards_tokens_per_expert: Array, shard_id: Array | int, num_expert_shards: int
) -> _Parameters:
    """Computes the arguments of the exchange back; see `compute_ragged_all_to_all_params`."""
    counts = _counts(all_shards_tokens_per_expert, num_expert_shards)
    return _parameters(jnp.sum(counts, axis=2).T, shard_id)


def local_permute_after_a2a(
    x_recv: Array,
    all_shards_tokens_per_expert: Array,
    shard_id: Array | int,
    num_expert_shards: int,
    *,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Sorts received rows, which arrive by shard and then by expert, by expert alone.

    Args:
      x_recv: [rows, hidden], the result of `jax.lax.ragged_all_to_all`.
      all_shards_tokens_per_expert, shard_id, num_expert_shards: as for
        `compute_ragged_all_to_all_params`.

    Returns:
      sorted_x: [rows, hidden]; rows past the last received one stay where they are.
      local_group_sizes: integer [local experts], the rows of each expert.
      state: for `local_unpermute_before_a2a`.
    """
    sizes = _counts(all_shards_tokens_per_expert, num_expert_shards)[:, _index(shard_id)]
    chunks = jnp.arange(sizes.size, dtype=jnp.int32).reshape(sizes.shape).T.reshape(-1)
    sorted_x = _sorted("x_recv", x_recv, sizes.reshape(-1), chunks, implementation)
    state = {
        "sorted_split_sizes": sizes.T.reshape(-1),
        "inverse_chunk_indices": jnp.argsort(chunks),
    }
    return sorted_x, jnp.sum(sizes, axis=0), state


def local_unpermute_before_a2a(
    expert_outputs: Array,
    state: dict[str, jax.Array],
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Sorts rows back by shard and then by expert: the inverse of `local_permute_after_a2a`."""
    sizes, chunks = state["sorted_split_sizes"], state["inverse_chunk_indices"]
    return _sorted("expert_outputs", expert_outputs, sizes, chunks, implementation)


def _sorted(
    name: str, rows: Any, sizes: Any, chunks: Any, implementation: Implementation | None
) -> jax.Array:
    """Returns the rows in the order of `chunks`; `name` is the caller's for them."""
    rows = tables.as_table(name, rows, "hidden")
    operands = chunk_arguments.checked(
        rows, sizes, chunks, implementation=implementation, name=name
    )
    return sort_chunks(*operands, implementation).rows


def _counts(counts: Any, num_shards: int) -> jax.Array:
    """Checks the counts and returns them as [from, to, local experts]."""
    name = "all_shards_tokens_per_expert"
    counts = arguments.array(name, counts, ("shards", "experts"), jnp.integer)
    num_shards = arguments.integer("num_expert_shards", num_shards, 1)
    if counts.shape[0] != num_shards or counts.shape[1] % num_shards:
        raise ArgumentValueError(
            f"Argument `{name}` must have a row for each of the {num_shards} shards, and a number "
            f"of experts that the shards divide evenly; got shape {counts.shape}."
        )
    return explicit.gathered(counts).reshape(num_shards, num_shards, -1)


def _index(shard_id: Any) -> Any:
    if isinstance(shard_id, (int, np.integer)):
        return arguments.integer("shard_id", shard_id, 0)
    return arguments.array("shard_id", shard_id, (), jnp.integer)


def _parameters(rows: jax.Array, shard_id: Any) -> _Parameters:
    """Computes the arguments from the numbers of rows that shards send to shards, [from, to]."""
    shard = _index(shard_id)
    sent, before = rows[shard], jnp.cumsum(rows, axis=0) - rows
    return jnp.cumsum(sent) - sent, sent, before[shard], rows[:, shard]
