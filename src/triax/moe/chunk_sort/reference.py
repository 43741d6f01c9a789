"""The chunk sort in plain JAX: the path for every platform without Triton.

It has the two steps of the kernels, and the same results on every input, even on invalid sizes and
indices.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from triax.moe.shared.arrays import running_sum, take_rows


class ChunkMap(NamedTuple):
    """For each chunk of the output, where its rows are read from; arrays are int32 [chunks].

    Chunk c of the output ends before row `ends[c]`. Row r of the output, if it is in chunk c, is
    row ``r + shifts[c]`` of the input. Rows past the last chunk stay where they are.
    """

    ends: jax.Array
    shifts: jax.Array


class ChunkMaps(NamedTuple):
    """The map of the sort, and that of its inverse, which moves gradients."""

    forward: ChunkMap
    inverse: ChunkMap


class Sorted(NamedTuple):
    """The result of `sort_chunks_by_index`.

    Attributes:
      rows: [tokens, hidden], the rows of `x` in their new order.
      probs: [tokens], the probs of those rows; None if none were given.
    """

    rows: jax.Array
    probs: jax.Array | None


def chunk_maps_reference(
    split_sizes: jax.Array, sorted_indices: jax.Array, *, num_rows: int
) -> ChunkMaps:
    """Makes both maps from int32 sizes and indices [chunks], at least one chunk."""
    num_chunks = split_sizes.shape[0]
    ends = running_sum(jnp.clip(split_sizes, 0, num_rows), num_rows)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    named = (sorted_indices >= 0) & (sorted_indices < num_chunks)
    index = jnp.where(named, sorted_indices, 0)
    sorted_starts = jnp.where(named, starts[index], 0)
    sorted_sizes = jnp.where(named, ends[index] - starts[index], 0)
    sorted_ends = running_sum(sorted_sizes, num_rows)
    outputs = jnp.concatenate([jnp.zeros_like(ends[:1]), sorted_ends[:-1]])
    not_named = jnp.iinfo(jnp.int32).max
    first = jnp.full_like(ends, not_named).at[index].min(jnp.where(named, outputs, not_named))
    inverse_shifts = jnp.where(first == not_named, 0, first - starts)
    return ChunkMaps(ChunkMap(sorted_ends, sorted_starts - outputs), ChunkMap(ends, inverse_shifts))


def move_chunks_reference(rows: jax.Array, probs: jax.Array | None, maps: ChunkMaps) -> Sorted:
    """Moves rows [rows, width] and probs [rows] as the forward map says."""
    num_rows, chunk_map = rows.shape[0], maps.forward
    row = jnp.arange(num_rows, dtype=jnp.int32)
    # The number of chunks that end before each row. JAX 0.10 cannot trace `searchsorted` where a
    # part of the mesh axes is manual.
    chunk = jnp.cumsum(jnp.zeros(num_rows, jnp.int32).at[chunk_map.ends].add(1, mode="drop"))
    shifts = jnp.concatenate([chunk_map.shifts, jnp.zeros_like(chunk_map.shifts[:1])])
    # Shifts are clipped before they are added, because the sum could pass 2**31.
    shift = shifts[chunk]
    source = jnp.where(
        shift < 0, row - jnp.minimum(-shift, row), row + jnp.minimum(shift, num_rows - 1 - row)
    )
    take = functools.partial(take_rows, index=source, mode="clip")
    return Sorted(take(rows), None if probs is None else take(probs))
