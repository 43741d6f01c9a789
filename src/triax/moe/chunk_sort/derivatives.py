"""The chunk sort's derivatives: the same move, and the move back."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax

from triax.moe.chunk_sort import launchers, reference
from triax.moe.chunk_sort.reference import ChunkMaps
from triax.moe.shared import implementation as implementations
from triax.moe.shared import linear
from triax.moe.shared.sharding import Split


class Moved(NamedTuple):
    """Rows [rows, width], and probs [rows] or None."""

    rows: jax.Array
    probs: jax.Array | None


def chunk_maps(
    split_sizes: jax.Array, sorted_indices: jax.Array, num_rows: int, implementation: str | None
) -> ChunkMaps:
    """The maps there and back, which are integers and have no derivative."""
    run = implementations.choose(
        implementation, launchers.chunk_maps, reference.chunk_maps_reference, num_rows=num_rows
    )
    return linear.constant(run, implementation)(split_sizes, sorted_indices)


@functools.cache
def move_chunks(implementation: str | None) -> linear.Function:
    """Rows and probs moved by ``maps.forward``; their gradients move by ``maps.inverse``."""
    either = implementations.choose(
        implementation, launchers.move_rows, reference.move_rows_reference, any_bits=True
    )

    def run(rows: jax.Array, probs: jax.Array | None, maps: ChunkMaps) -> Moved:
        return Moved(*either(rows, probs, maps.forward))

    def derivative(primals: Any, tangents: Any, like: Any) -> Moved:
        return linear.call_each(move, move_back, primals[2], Moved(*tangents[:2]), like)

    def move(maps: ChunkMaps, moving: dict[str, jax.Array]) -> dict[str, Any]:
        if "rows" not in moving:
            return {"probs": op(moving["probs"][:, None], None, maps).rows[:, 0]}
        moved = op(moving["rows"], moving.get("probs"), maps)
        return {name: getattr(moved, name) for name in moving}

    def move_back(maps: ChunkMaps, gradients: dict[str, jax.Array]) -> dict[str, Any]:
        return move(ChunkMaps(forward=maps.inverse, inverse=maps.forward), gradients)

    split = Split(("_h", None, None), ("_h", None))
    op = linear.op(run, derivative, split, implementation)
    return op
