"""`sort_chunks_by_index` with the row map that TransformerEngine returns beside the rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from triax.moe.chunk_sort import api as chunks
from triax.moe.shared.implementation import Implementation
from triax.moe.transformer_engine import tables


def sort_chunks_by_index(
    inp: Any, split_sizes: Any, sorted_indices: Any, *, implementation: Implementation | None = None
) -> tuple[jax.Array, jax.Array]:
    """Cuts the rows of `inp` into chunks and puts the chunks into another order.

    `triax.moe.sort_chunks_by_index` does the same, moves probs along, and says what happens
    with sizes and indices that make no sense.

    Args:
      inp: [tokens, hidden] or [batch, sequence, hidden], any dtype.
      split_sizes: integer [chunks].
      sorted_indices: integer [chunks], a permutation of 0 to chunks - 1.
      implementation: as for `triax.moe.sort_chunks_by_index`.

    Returns:
      output: [tokens, hidden] in the dtype of `inp`.
      row_id_map: int32 [tokens], the row of the output that each row of `inp` went to. In a
        compiled program it costs nothing where nobody uses it.

    Raises:
      ArgumentTypeError: an argument is not an array, or of the wrong dtype.
      ArgumentValueError: an argument has the wrong shape, or `implementation` is unknown.
    """
    x = tables.as_table("inp", inp, "hidden")
    sort = chunks.sort_chunks_by_index
    output = sort(x, split_sizes, sorted_indices, implementation=implementation).rows
    # Where a row went to is what comes back to it when the numbers of the rows are sorted back.
    split_sizes, sorted_indices = jnp.asarray(split_sizes), jnp.asarray(sorted_indices)
    sizes, back = split_sizes[sorted_indices], jnp.argsort(sorted_indices)
    numbers = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
    return output, sort(numbers, sizes, back, implementation=implementation).rows[:, 0]
