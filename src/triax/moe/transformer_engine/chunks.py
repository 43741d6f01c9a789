"""`sort_chunks_by_index` with the row map that TransformerEngine returns beside the rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from triax.moe.chunk_sort import arguments as chunks
from triax.moe.chunk_sort.ops import sort_chunks
from triax.moe.shared.arguments import Array
from triax.moe.shared.implementation import Implementation
from triax.moe.transformer_engine import tables
from triax.sharding import explicit


def sort_chunks_by_index(
    inp: Array,
    split_sizes: Array,
    sorted_indices: Array,
    *,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Does `triax.moe.sort_chunks_by_index`, also for `inp` of shape [batch, sequence, hidden].

    Returns:
      output: [tokens, hidden] in the dtype of `inp`.
      row_id_map: int32 [tokens], the row of the output that each row of `inp` went to. Under `jit`
        it costs nothing if it is not used.
    """
    x = tables.as_table("inp", inp, "hidden")
    x, split_sizes, sorted_indices, _ = chunks.checked(
        x, split_sizes, sorted_indices, implementation=implementation, name="inp"
    )
    output = sort_chunks(x, split_sizes, sorted_indices, None, implementation).rows
    # Sorting the output's row numbers back gives each row of `inp` the number of its output row.
    split_sizes, sorted_indices = map(explicit.gathered, (split_sizes, sorted_indices))
    sizes, back = split_sizes[sorted_indices], jnp.argsort(sorted_indices)
    numbers = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
    return output, sort_chunks(numbers, sizes, back, None, implementation).rows[:, 0]
