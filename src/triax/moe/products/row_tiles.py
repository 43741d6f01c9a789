"""Schedules the tiles of groups, and makes descriptors that end with a group."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from triax.binding import dtypes
from triax.binding.descriptor import TensorDescriptor
from triax.binding.launch import KernelImplementation
from triax.moe.products.options import Groups
from triax.moe.products.thresholds import LARGEST_TILE
from triax.moe.shared.launching import launch

IMPRECISE = 128
"""Tensor cores accumulate products of 8-bit floats with fewer bits than float32; after this many
products the sum is promoted to float32."""

ROWS, ROW_TILES = LARGEST_TILE, 8
"""The rows of a tile and the row tiles of a set, where groups have many rows: see `DotConfig`."""

# The kernels' `_GROUP_END`, a bound that is never reached, and the number of addresses.
_GROUP_END = 1 << 30
_UNBOUNDED = 2**31 - 1
_ADDRESSES = 1 << 64


def schedule(
    groups: Groups,
    num_rows: int,
    block_rows: int,
    implementation: KernelImplementation | None,
    row_tiles: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Returns row tiles, and the bounds of groups [2, groups + 1], in rows and in tiles.

    The first array is a list of records, four numbers each. The first record is [num_tiles, last
    group's end, first group's start, unused]. The others are row tiles: [group, set's first row,
    group's end, place in its set]. A set has up to `row_tiles` tiles.
    """
    from triax.moe.products.any_gpu_kernels import _ragged_dot_schedule_kernel

    num_groups = groups.sizes.shape[0]
    num_tiles = cdiv(num_rows, block_rows) + min(num_groups, num_rows)
    return launch(
        _ragged_dot_schedule_kernel,
        groups.sizes,
        groups.first_row,
        num_rows,
        out_type=(
            jax.ShapeDtypeStruct((4 * (1 + num_tiles),), jnp.int32),
            jax.ShapeDtypeStruct((2, num_groups + 1), jnp.int32),
        ),
        grid=num_groups,
        num_warps=4,
        implementation=implementation,
        NUM_GROUPS=num_groups,
        BLOCK_ROWS=block_rows,
        ROW_TILES=row_tiles,
        BLOCK_GROUPS=256,
        BLOCK_TILES=128,
    )


def group_bounds(
    groups: Groups, num_rows: int, implementation: KernelImplementation | None
) -> jax.Array:
    """Returns the bounds of groups [2, groups + 1], in rows and in tiles of `ROWS`.

    They come from the schedule for groups with many rows, so that a program launches it once.
    """
    return schedule(groups, num_rows, ROWS, implementation, ROW_TILES)[1]


def bounded_by_group(
    array: jax.Array | jax.ShapeDtypeStruct, block_rows: int, block_columns: int, layout: Any = None
) -> TensorDescriptor:
    """Returns a descriptor that makes the hardware stop at the end of a group (see the kernels)."""
    columns = array.shape[1]
    wrap = _ADDRESSES // _GROUP_END - columns
    return TensorDescriptor(
        array,
        shape=(_UNBOUNDED, _UNBOUNDED, _GROUP_END, columns),
        strides=(wrap, columns, columns, 1),
        block_shape=(1, 1, block_rows, block_columns),
        layout=layout,
    )


def suit_tma(*arrays: Any) -> bool:
    """Whether descriptors can address arrays: rows must begin at multiples of 16 bytes."""
    return all(a.shape[-1] * a.dtype.itemsize % 16 == 0 for a in arrays) and all(
        a.shape[0] <= _GROUP_END for a in arrays
    )


def triton_dtype(dtype: Any) -> Any:
    import triton.language as tl

    return tl.dtype(dtypes.triton_name(dtype))


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
