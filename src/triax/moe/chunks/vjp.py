"""The chunk sort's derivative: the rows' move back."""

from __future__ import annotations

import functools
from typing import Any

import jax

from triax.moe import implementation as implementations
from triax.moe.chunks import launchers, reference
from triax.moe.chunks.reference import ChunkMaps

Moved = tuple[jax.Array, jax.Array | None]


def chunk_maps(
    split_sizes: jax.Array, sorted_indices: jax.Array, num_rows: int, implementation: str | None
) -> ChunkMaps:
    """The maps there and back; integers, without derivative."""
    return implementations.run(
        implementation,
        split_sizes,
        sorted_indices,
        kernels=functools.partial(launchers.chunk_maps, num_rows=num_rows),
        xla=functools.partial(reference.chunk_maps_reference, num_rows=num_rows),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def move_chunks(
    rows: jax.Array, probs: jax.Array | None, maps: ChunkMaps, implementation: str | None
) -> Moved:
    """Rows and probs moved by ``maps.forward``; their gradients move by ``maps.inverse``."""
    return implementations.run(
        implementation,
        rows,
        probs,
        maps.forward,
        kernels=launchers.move_rows,
        xla=reference.move_rows_reference,
    )


def _move_chunks_fwd(
    rows: jax.Array, probs: jax.Array | None, maps: ChunkMaps, implementation: str | None
) -> tuple[Moved, ChunkMaps]:
    # Residuals that are inputs, JAX does not save but looks up among the inputs; inside `scan`,
    # under a second derivative, it looks in the wrong place (its count leaves out constants such
    # as the platform's index). A sum is no input. XLA removes it.
    saved = jax.tree.map(lambda leaf: leaf + 0, maps)
    return move_chunks(rows, probs, maps, implementation), saved


def _move_chunks_bwd(implementation: str | None, maps: ChunkMaps, gradients: Moved) -> Any:
    d_rows, d_probs = gradients
    back = ChunkMaps(forward=maps.inverse, inverse=maps.forward)
    if d_rows.dtype == jax.dtypes.float0:  # integer rows: only the probs have a gradient
        if d_probs is not None:
            column, _ = move_chunks(d_probs[:, None], None, back, implementation)
            d_probs = column[:, 0]
        return None, d_probs, None
    d_rows, d_probs = move_chunks(d_rows, d_probs, back, implementation)
    return d_rows, d_probs, None


move_chunks.defvjp(_move_chunks_fwd, _move_chunks_bwd)
