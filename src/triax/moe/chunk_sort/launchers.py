"""Launches the chunk sort's kernels: result types, grids and configs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from triax.binding.launch import KernelImplementation
from triax.moe.chunk_sort.configs import ChunkMoveConfig
from triax.moe.chunk_sort.reference import ChunkMap, ChunkMaps, Sorted
from triax.moe.shared.arrays import absent, as_words, from_words
from triax.moe.shared.launching import launch

# Kernels are imported where they are launched: importing triax.moe needs no Triton.


def chunk_maps(
    split_sizes: jax.Array,
    sorted_indices: jax.Array,
    *,
    num_rows: int,
    implementation: KernelImplementation | None,
) -> ChunkMaps:
    """Makes both maps from int32 sizes and indices [chunks], at least one chunk."""
    from triax.moe.chunk_sort.kernels import _chunk_maps_kernel

    num_chunks = split_sizes.shape[0]
    ints: Any = jax.ShapeDtypeStruct((num_chunks,), jnp.int32)
    return launch(
        _chunk_maps_kernel,
        split_sizes,
        sorted_indices,
        num_rows,
        num_chunks,
        out_type=ChunkMaps(ChunkMap(ints, ints), ChunkMap(ints, ints)),
        # One program walks over all chunks.
        grid=1,
        num_warps=4,
        implementation=implementation,
        BLOCK=1024,
    )


def move_chunks(
    rows: jax.Array,
    probs: jax.Array | None,
    maps: ChunkMaps,
    *,
    implementation: KernelImplementation | None,
) -> Sorted:
    """Moves rows [rows, width] and probs [rows] as the forward map says."""
    from triax.moe.chunk_sort.kernels import _move_rows_kernel

    num_rows, width = rows.shape
    num_chunks = maps.forward.ends.shape[0]
    config = ChunkMoveConfig.heuristic(width, rows.dtype.itemsize)
    row_blocks = -(-num_rows // config.block_rows)
    # At least one, because probs move even if rows have no elements.
    width_blocks = max(1, -(-width // config.block_width))
    words = [as_words(array) for array in (rows, probs)]
    moved, moved_probs = launch(
        _move_rows_kernel,
        *words,
        *maps.forward,
        num_rows,
        num_chunks,
        config.search_steps(num_chunks),
        out_type=jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tuple(words)),
        # Exactly the blocks that hold elements, all on one axis: the other axes are limited to
        # 65535 programs.
        grid=row_blocks * width_blocks,
        config=config,
        implementation=implementation,
        WIDTH=width,
        **absent(moved_probs_ptr=probs),
    )
    return Sorted(from_words(moved, rows), from_words(moved_probs, probs))
