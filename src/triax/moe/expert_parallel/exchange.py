"""Exchanges rows between all devices of a mesh axis, padded or ragged.

`padded` exchanges slots of equal size, full or not. `ragged` exchanges slices whose sizes only the
devices know; `Slices` says where they lie on both sides. `move` exchanges `Pieces`, which may lie
anywhere. All run inside `jax.shard_map`.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from triax.compat import jax_private
from triax.moe.shared.arrays import running_sum
from triax.moe.shared.ops import Call, Op
from triax.sharding import linear
from triax.sharding.explicit import explicit_mesh

ExchangeMethod = Literal["padded", "ragged"]
# The most GPUs, all of one process, that XLA's kernel for ragged exchanges supports; with more XLA
# of JAX 0.11 wants flags, or stops with an error.
_MOST_GPUS = 8
# The fewest bytes of a device's tokens for a ragged exchange, which first needs more messages: on
# two H200s 15 MB go there and back in 0.38 ms padded and 0.45 ragged, 59 MB in 1.19 and 1.11.
_MIN_RAGGED_BYTES = 1 << 25

# XLA's kernel gives each slice a small part of the GPU. Two H100s took 91 ms to exchange 0.47 GB in
# one slice for each peer, 1.36 ms in 512 pieces, and 0.95 ms by `all_to_all`. On four H200s 256 to
# 2,048 pieces are equally fast.
_PIECES = 512


def is_better_ragged(x: jax.Array, num_devices: int) -> bool:
    """Whether a ragged exchange of the tokens `x` is possible, and faster."""
    job = jax_private.key_value_client()  # `jax.process_count` would start a backend
    local = 1 < num_devices <= _MOST_GPUS and (job is None or job.num_processes == 1)
    # Ragged exchanges have not been tried on GPUs beside explicit axes.
    return local and x.size * x.dtype.itemsize >= _MIN_RAGGED_BYTES and explicit_mesh(x) is None


class Slices(NamedTuple):
    """The slices that one device sends and receives, one for each device; int32 [devices].

    Attributes:
      offsets: the first row of each slice on the sender.
      sizes: the number of rows of each slice.
      targets: the first row of each slice on the receiver.
      received_offsets, received_sizes, received_from: for the slices from each device, the first
        row on this device, the number of rows, and the first row on the sender.
    """

    offsets: jax.Array
    sizes: jax.Array
    targets: jax.Array
    received_offsets: jax.Array
    received_sizes: jax.Array
    received_from: jax.Array

    def reversed(self) -> Slices:
        """Returns the slices of the exchange back."""
        return Slices(*self[3:], *self[:3])


class Pieces(NamedTuple):
    """The arguments of `jax.lax.ragged_all_to_all`; int32 [devices, pieces of each].

    Attributes:
      offsets: the first row of each piece on the sender.
      sizes: the number of rows of each piece.
      targets: the first row of each piece on the receiver.
      received_sizes: the number of rows of each received piece.
    """

    offsets: jax.Array
    sizes: jax.Array
    targets: jax.Array
    received_sizes: jax.Array


def padded(rows: jax.Array, axis_name: Any) -> jax.Array:
    """Exchanges equal slots, [devices * slot, ...]: rows are by receiver, the result by sender."""
    return jax.lax.all_to_all(rows, axis_name, split_axis=0, concat_axis=0, tiled=True)


def plan_slices(counts: jax.Array, axis_name: Any, num_rows: int) -> Slices:
    """Plans an exchange after which a device's rows are in the order of their senders.

    Args:
      counts: int32 [devices], the rows that this device sends to each device, in order.
      num_rows: how many rows a device can receive. What does not fit is not sent.
    """
    this = jax.lax.axis_index(axis_name)
    of_all = jax.lax.all_gather(counts, axis_name)  # [from, to]
    # Sums are clipped to `num_rows`, so that no sum passes 2**31 and no offset is out of bounds.
    ends = running_sum(jnp.minimum(of_all, num_rows), num_rows)
    targets = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    sizes = jnp.minimum(of_all, num_rows - targets)
    offsets = jnp.cumsum(of_all, axis=1) - of_all
    return Slices(
        *(array[this] for array in (offsets, sizes, targets)),
        *(array[:, this] for array in (targets, sizes, offsets)),
    )


def ragged(rows: jax.Array, slices: Slices, num_rows: int, axis_name: Any) -> jax.Array:
    """Exchanges slices; returns the received rows, [num_rows, ...]. Gradients go the other way.

    Rows between slices are zeros, also in the gradient.
    """
    options = {"num_rows": num_rows, "axis_name": axis_name}
    moved: jax.Array = _exchange(rows, slices, implementation=None, **options)
    return moved


def _there(rows: jax.Array, slices: Slices, *, implementation: None, **options: Any) -> jax.Array:
    return move(rows, _cut(slices), **options)


def _derivative(call: Call, arguments: Any, tangents: Any, result: jax.Array) -> jax.Array:
    num_sent = arguments[0].shape[0]

    def forth(slices: Slices, tangents: dict[str, jax.Array]) -> jax.Array:
        moved: jax.Array = call(tangents["rows"], slices)
        return moved

    def back(slices: Slices, gradient: jax.Array) -> dict[str, jax.Array]:
        return {"rows": call.replace(num_rows=num_sent)(gradient, slices.reversed())}

    return linear.call(forth, back, arguments[1], {"rows": tangents[0]}, result)


_exchange = Op("ragged_exchange", xla=_there, derivative=_derivative)


def move(rows: jax.Array, pieces: Pieces, num_rows: int, axis_name: Any) -> jax.Array:
    """Exchanges pieces; returns [num_rows, ...].

    Differentiate `ragged` instead: JAX's derivative of `ragged_all_to_all` may be wrong.
    """
    dtype = rows.dtype
    if dtype.itemsize == 1 and jnp.issubdtype(dtype, jnp.floating):  # some such floats lack a zero
        words = jax.lax.bitcast_convert_type(rows, jnp.uint8)
        words = move(words, pieces, num_rows, axis_name)
        return jax.lax.bitcast_convert_type(words, dtype)
    out = jnp.zeros((num_rows, *rows.shape[1:]), dtype)
    if rows.size == 0 or out.size == 0:  # some backends refuse collectives of empty arrays
        return jax_private.insert_varying_casts([rows, out, *pieces])[1]
    # `vmap` of `ragged_all_to_all` fails unless all operands are batched. So a zero that depends on
    # all operands is added to the pieces.
    none = sum(jnp.count_nonzero(array[:0]).astype(jnp.int32) for array in (rows, *pieces))
    flat = (array.reshape(-1) + none for array in pieces)
    operands = jax_private.insert_varying_casts([rows, out, *flat])
    return jax.lax.platform_dependent(
        *operands,
        cuda=functools.partial(jax.lax.ragged_all_to_all, axis_name=axis_name),
        default=functools.partial(_emulate, axis_name=axis_name),
    )


def _cut(slices: Slices) -> Pieces:
    """Cuts every slice into `_PIECES` pieces, equal up to one row."""
    piece = jnp.arange(_PIECES, dtype=jnp.int32)[None, :]

    def cut(sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
        each, rest = sizes[:, None] // _PIECES, sizes[:, None] % _PIECES
        return piece * each + jnp.minimum(piece, rest), each + (piece < rest).astype(jnp.int32)

    starts, sizes = cut(slices.sizes)
    pieces = (
        slices.offsets[:, None] + starts,
        sizes,
        slices.targets[:, None] + starts,
        cut(slices.received_sizes)[1],
    )
    return Pieces(*(array.astype(jnp.int32) for array in pieces))


def _emulate(rows: jax.Array, out: jax.Array, *pieces: jax.Array, axis_name: Any) -> jax.Array:
    """Emulates `jax.lax.ragged_all_to_all` where it does not exist; devices gather all rows."""
    this, num_devices = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name)
    gather = functools.partial(jax.lax.all_gather, axis_name=axis_name)
    # The pieces that this device receives, with offsets into the gathered rows of all devices.
    offsets, sizes, targets = (
        gather(array.reshape(num_devices, -1))[:, this] for array in pieces[:3]
    )
    offsets += jnp.arange(num_devices, dtype=jnp.int32)[:, None] * len(rows)
    offsets, sizes, targets = (array.reshape(-1) for array in (offsets, sizes, targets))
    targets = jnp.where(sizes > 0, targets, len(out))
    order = jnp.argsort(targets)
    row = jnp.arange(len(out), dtype=jnp.int32)
    # The last piece that begins at or before each row. JAX 0.10 cannot trace `searchsorted` where a
    # part of the mesh axes is manual.
    begun = jnp.cumsum(jnp.zeros(len(out), jnp.int32).at[targets].add(1, mode="drop"))
    piece = order[jnp.maximum(begun - 1, 0)]
    behind = row - targets[piece]
    inside = (behind >= 0) & (behind < sizes[piece])
    source = gather(rows, tiled=True)[jnp.where(inside, offsets[piece] + behind, 0)]
    return jnp.where(inside.reshape(-1, *(1 for _ in rows.shape[1:])), source, out)
