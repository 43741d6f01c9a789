"""The ops of the chunk sort: one makes the maps, one moves rows by them, there and back.

`sort_chunks` calls both with checked arguments.
"""

from __future__ import annotations

from typing import Any

import jax

from triax.moe.chunk_sort import launchers, reference
from triax.moe.chunk_sort.reference import ChunkMaps, Sorted
from triax.moe.shared import implementation as implementations
from triax.moe.shared.implementation import Implementation
from triax.moe.shared.ops import Call, Op
from triax.sharding import linear

chunk_maps = Op(
    "chunk_maps",
    arguments=("c", "c"),  # sizes and indices
    results="c",
    kernels=launchers.chunk_maps,
    xla=reference.chunk_maps_reference,
)


def _derivative(call: Call, primals: Any, tangents: Any, like: Any) -> Sorted:
    def move(maps: ChunkMaps, tangents: dict[str, jax.Array]) -> dict[str, Any]:
        if "rows" not in tangents:
            return {"probs": call(tangents["probs"][:, None], None, maps).rows[:, 0]}
        moved = call(tangents["rows"], tangents.get("probs"), maps)
        return {name: getattr(moved, name) for name in tangents}

    def move_back(maps: ChunkMaps, gradients: dict[str, jax.Array]) -> dict[str, Any]:
        return move(ChunkMaps(forward=maps.inverse, inverse=maps.forward), gradients)

    return linear.call_each(move, move_back, primals[2], Sorted(*tangents[:2]), like)


# Moves rows and probs by ``maps.forward``; their gradients move by ``maps.inverse``.
move_chunks = Op(
    "move_chunks",
    arguments=("rh", "r", "c"),  # rows, probs, maps
    results=("rh", "r"),
    shardable="h",
    kernels=launchers.move_chunks,
    xla=reference.move_chunks_reference,
    derivative=_derivative,
    any_bits=True,
)


def sort_chunks(
    x: jax.Array,
    split_sizes: jax.Array,
    sorted_indices: jax.Array,
    probs: jax.Array | None,
    implementation: Implementation | None,
) -> Sorted:
    """Reorders chunks of rows, by int32 sizes and indices."""
    num_rows = x.shape[0]
    if split_sizes.size == 0 or num_rows == 0 or (x.shape[1] == 0 and probs is None):
        return Sorted(x, probs)
    chosen = implementations.fit(implementation, x, probs)
    maps = chunk_maps(split_sizes, sorted_indices, num_rows=num_rows, implementation=chosen)
    moved: Sorted = move_chunks(x, probs, maps, implementation=chosen)
    return moved
