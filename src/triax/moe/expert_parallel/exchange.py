"""Rows from every device of a mesh axis to every other: in slots of one size, or as they come.

`padded` exchanges slots of equal size, full or not. `ragged` exchanges slices whose sizes only the
devices know; `Slices` says where they lie on both sides. Both run inside `jax.shard_map`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from triax.compat import jax_private

# XLA's kernel gives each slice a small part of the GPU: two H100s took 91 ms for 0.47 GB in one
# slice for each peer, 1.36 in 512 pieces, where `all_to_all` took 0.95.
_PIECES = 512


class Slices(NamedTuple):
    """What one device sends and receives; int32 [devices, slices of each].

    Attributes:
      offsets: the first row here of each slice for each device.
      sizes: its rows.
      targets: the row there that its first row becomes.
      received_offsets, received_sizes, received_from: the same of the slices from each device:
        where they begin here, their rows, and where they began there.
    """

    offsets: jax.Array
    sizes: jax.Array
    targets: jax.Array
    received_offsets: jax.Array
    received_sizes: jax.Array
    received_from: jax.Array

    def reversed(self) -> Slices:
        """The way back."""
        return Slices(*self[3:], *self[:3])


def padded(rows: jax.Array, axis_name: Any) -> jax.Array:
    """[devices * slot, ...]: what each device gets, and then what each device gave."""
    return jax.lax.all_to_all(rows, axis_name, split_axis=0, concat_axis=0, tiled=True)


def plan_slices(
    counts: jax.Array, axis_name: Any, *, num_rows: int, align_size: int
) -> tuple[Slices, jax.Array]:
    """Where each device's slices go, if slices of one number lie together, in the devices' order.

    Args:
      counts: int32 [devices, slices], the rows of each slice here; one after the other.
      num_rows: how many rows a device takes: slices end there, or fall away.
      align_size: slices of one number together are padded to a multiple of this.

    Returns:
      The slices, and int32 [slices], how many rows came to each number here, before `num_rows`.
    """
    this = jax.lax.axis_index(axis_name)
    of_all = jax.lax.all_gather(counts, axis_name)  # [from, to, slice]
    totals = jnp.sum(of_all, axis=0)
    aligned = -(-totals // align_size) * align_size
    starts = jnp.cumsum(aligned, axis=1) - aligned
    targets = jnp.minimum(starts + jnp.cumsum(of_all, axis=0) - of_all, num_rows)
    sizes = jnp.minimum(of_all, num_rows - targets)
    flat = of_all.reshape(len(of_all), -1)
    offsets = (jnp.cumsum(flat, axis=1) - flat).reshape(of_all.shape)
    slices = Slices(
        *(array[this] for array in (offsets, sizes, targets)),
        *(array[:, this] for array in (targets, sizes, offsets)),
    )
    return slices, totals[this]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def ragged(rows: jax.Array, slices: Slices, num_rows: int, axis_name: Any) -> jax.Array:
    """[num_rows, ...], the slices from all devices; zeros between them. The gradient goes back."""
    return _move(rows, slices, num_rows, axis_name)


def _fwd(rows: jax.Array, slices: Slices, num_rows: int, axis_name: Any) -> Any:
    return _move(rows, slices, num_rows, axis_name), (slices, rows[:, :0])


def _bwd(num_rows: int, axis_name: Any, residuals: Any, gradient: jax.Array) -> Any:
    slices, rows = residuals
    return _move(gradient, slices.reversed(), rows.shape[0], axis_name), None


ragged.defvjp(_fwd, _bwd)


def _move(rows: jax.Array, slices: Slices, num_rows: int, axis_name: Any) -> jax.Array:
    zeros = jnp.zeros((num_rows, *rows.shape[1:]), rows.dtype)
    pieces = _cut(slices, max(1, _PIECES // slices.sizes.shape[1]))
    operands = jax_private.insert_varying_casts([rows, zeros, *pieces])
    return jax.lax.platform_dependent(
        *operands,
        cuda=functools.partial(jax.lax.ragged_all_to_all, axis_name=axis_name),
        default=functools.partial(_emulate, axis_name=axis_name),
    )


def _cut(slices: Slices, count: int) -> tuple[jax.Array, ...]:
    """What `jax.lax.ragged_all_to_all` takes, with every slice cut into `count` equal pieces."""
    piece = jnp.arange(count, dtype=jnp.int32)

    def cut(sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
        each, rest = sizes[..., None] // count, sizes[..., None] % count
        return piece * each + jnp.minimum(piece, rest), each + (piece < rest)

    starts, sizes = cut(slices.sizes)
    found = (
        slices.offsets[..., None] + starts,
        sizes,
        slices.targets[..., None] + starts,
        cut(slices.received_sizes)[1],
    )
    return tuple(array.reshape(-1).astype(jnp.int32) for array in found)


def _emulate(
    rows: jax.Array,
    out: jax.Array,
    offsets: jax.Array,
    sizes: jax.Array,
    targets: jax.Array,
    received_sizes: jax.Array,
    *,
    axis_name: Any,
) -> jax.Array:
    """`jax.lax.ragged_all_to_all` where there is none: every device sees all rows."""
    del received_sizes
    num_devices = jax.lax.axis_size(axis_name)
    # The slice that each row is in: of several that begin at one row, the last is not empty.
    order = jnp.lexsort((sizes, offsets))
    row = jnp.arange(rows.shape[0], dtype=jnp.int32)
    place = jnp.searchsorted(offsets[order], row, side="right") - 1
    slice_of = order[jnp.maximum(place, 0)]
    behind = row - offsets[slice_of]
    inside = (behind >= 0) & (behind < sizes[slice_of])
    device = jnp.where(inside, slice_of // (len(sizes) // num_devices), -1)
    target = jnp.where(inside, targets[slice_of] + behind, -1)
    gather = functools.partial(jax.lax.all_gather, axis_name=axis_name, tiled=True)
    mine = gather(device) == jax.lax.axis_index(axis_name)
    return out.at[jnp.where(mine, gather(target), len(out))].set(gather(rows), mode="drop")
