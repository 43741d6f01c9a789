"""What launches of ragged_dot share: the tiles of groups, and descriptors that end with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from triax.binding import dtypes
from triax.binding.descriptor import TensorDescriptor
from triax.binding.launch import KernelImplementation
from triax.moe.grouped_matmul.options import Groups
from triax.moe.shared.launching import launch

IMPRECISE = 128
"""Tensor cores add products of 8-bit floats with fewer bits than float32; after this many products
the sum is added to a float32 one."""

ROWS, ROW_TILES = 128, 8
"""Of a row tile where groups have many rows, and of a set of these: see `DotConfig`."""

# The bound and the index of the kernels' `_GROUP_END`, and a dimension that is never the limit.
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
    """Row tiles, four numbers each after the first four, and the bounds of groups [2, groups + 1].

    The first four begin with how many tiles there are, where the groups end and where they begin. A
    tile's say of its set, of up to `row_tiles` of a group: the group, the first row, the group's
    end, and the tile's place in it. Bounds are in rows and in tiles.
    """
    from triax.moe.grouped_matmul.kernels import _ragged_dot_schedule_kernel

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
    """The bounds of groups [2, groups + 1], in rows and in tiles of `ROWS`.

    From the schedule that products of many rows have, which is then launched once in a program.
    """
    return schedule(groups, num_rows, ROWS, implementation, ROW_TILES)[1]


def bounded_by_group(array: jax.Array, block_rows: int, block_columns: int) -> TensorDescriptor:
    """Rows and columns shown so that the hardware stops at the end of a group (see the kernels)."""
    columns = array.shape[1]
    wrap = _ADDRESSES // _GROUP_END - columns
    return TensorDescriptor(
        array,
        shape=(_UNBOUNDED, _UNBOUNDED, _GROUP_END, columns),
        strides=(wrap, columns, columns, 1),
        block_shape=(1, 1, block_rows, block_columns),
    )


def written(out_type: jax.ShapeDtypeStruct, show: Callable[[jax.Array], Any]) -> dict[str, Any]:
    """What `launch` takes for an output that the kernel writes through a descriptor of it."""
    empty = jax.lax.empty(out_type.shape, out_type.dtype)
    return {"out": show(empty), "input_output_aliases": {"out": 0}}


def suit_tma(*arrays: Any) -> bool:
    """Whether descriptors can address these: rows begin at multiples of 16 bytes."""
    return all(a.shape[-1] * a.dtype.itemsize % 16 == 0 for a in arrays) and all(
        a.shape[0] <= _GROUP_END for a in arrays
    )


def triton_dtype(dtype: Any) -> Any:
    import triton.language as tl

    return tl.dtype(dtypes.triton_name(dtype))


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
