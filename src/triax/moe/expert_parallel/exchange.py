"""Exchanges rows between all devices of a mesh axis, in slots of equal size.

Of an array [devices * capacity, ...] each device has a slot of `capacity` rows. An exchange sends
slot d to device d, where slots are by sender. Between the GPUs of one host a kernel sends the rows
that are filled, straight from where they are; elsewhere `all_to_all` exchanges whole slots. All run
inside `jax.shard_map`.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from triax.compat import peer_memory
from triax.moe.expert_parallel import launchers
from triax.moe.expert_parallel.launchers import Moves
from triax.moe.permutation.configs import MAX_UNROLLED_SLOTS
from triax.moe.permutation.ops import permute, sum_rows, unpermute
from triax.moe.plans.reference import Plan
from triax.moe.shared import implementation as implementations
from triax.moe.shared.implementation import Implementation
from triax.moe.shared.target import Target, for_target

logger = logging.getLogger(__name__)


class Ways(NamedTuple):
    """Who sends how many tokens to whom.

    Attributes:
      position: int32 [1], this device's position along the axis. It differs on all devices, and so
        do the results of all ops that take it, though tokens and plan may be the same on all.
      sent: the plan of this device's tokens, whose groups are the slots of the receiving devices.
      source: int32 [rows], the token of each row of the plan; -1 for a row without one.
      filled: int32 [devices], how many rows of each slot are sent, from its start.
      received: int32 [devices], how many rows come from each device.
    """

    position: jax.Array
    sent: Plan
    source: jax.Array
    filled: jax.Array
    received: jax.Array

    @classmethod
    def of(cls, sent: Plan, axis_name: Any, implementation: Implementation | None) -> Ways:
        """Returns the ways of whole slots, full or not: rows without a token are zero."""
        number = jnp.arange(1, len(sent.row_of) + 1, dtype=jnp.int32)[:, None]
        source = permute(number, sent, implementation=implementation).rows[:, 0] - 1
        position = jax.lax.axis_index(axis_name).astype(jnp.int32)[None]
        return cls(position, sent, source, sent.group_sizes, sent.group_sizes)

    @property
    def capacity(self) -> int:
        return self.sent.num_rows // self.sent.num_experts

    def reversed(self) -> Ways:
        return self._replace(filled=self.received, received=self.filled)


def send(x: jax.Array, ways: Ways, axis_name: Any, path: Implementation | None) -> jax.Array:
    """Sends tokens to slots; returns the slots received.

    Rows that are not sent, here and below, have any values.
    """
    return _for_target(_send, ways.sent.num_rows, (x, ways), path, axis_name)


def swap(rows: jax.Array, ways: Ways, axis_name: Any, path: Implementation | None) -> jax.Array:
    """Exchanges slots."""
    return _for_target(_swap, len(rows), (rows, ways), path, axis_name)


def collect(
    rows: jax.Array,
    weights: jax.Array | None,
    received: Plan | None,
    ways: Ways,
    axis_name: Any,
    path: Implementation | None,
) -> jax.Array:
    """Sends rows of received tokens back; returns the sum of each token's rows.

    With `received`, the plan of the received tokens, the rows are those of the plan, of which the
    sum is sent for each token: multiplied by `weights` [received tokens, top_k] if there are some.
    """
    few = received is None or received.row_of.shape[1] <= MAX_UNROLLED_SLOTS
    if not few or not all(map(_is_summed_in_float32, (rows, weights))):
        if received is not None:
            rows = unpermute(rows, received, weights, implementation=path)
        return sum_rows(swap(rows, ways.reversed(), axis_name, path), ways.sent, path)
    operands = rows, weights, received, ways
    return _for_target(_collect, len(ways.sent.row_of), operands, path, axis_name)


def _is_summed_in_float32(array: jax.Array | None) -> bool:
    return array is None or array.dtype in (jnp.float32, jnp.bfloat16, jnp.float16)


def _for_target(
    write: Any, num_rows: int, operands: Any, path: Implementation | None, axis_name: Any
) -> jax.Array:
    """Runs `write` with the GPU as its target, where there is one."""
    x, *_ = operands
    options = {"axis_name": axis_name, "implementation": path}
    by_xla = functools.partial(write, None, **options)
    out_type = jax.ShapeDtypeStruct((num_rows, *x.shape[1:]), x.dtype)
    alone = jax.lax.axis_size(axis_name) == 1
    if (
        0 in (x.size, out_type.size)
        or alone
        or implementations.fit(path, x) in ("xla", "interpret")
    ):
        return by_xla(*operands)
    by_target = functools.partial(for_target, write, out_type=out_type, **options)
    return jax.lax.platform_dependent(*operands, cuda=by_target, default=by_xla)


def _send(
    target: Target | None,
    x: jax.Array,
    ways: Ways,
    *,
    axis_name: Any,
    implementation: Any,
) -> jax.Array:
    moves = Moves(ways.position, ways.filled, ways.received, ways.capacity, source=ways.source)
    rows = _between_gpus(target, x, moves, axis_name)
    if rows is None:
        rows = _padded(permute(x, ways.sent, implementation=implementation).rows, axis_name)
    return rows


def _swap(
    target: Target | None,
    rows: jax.Array,
    ways: Ways,
    *,
    axis_name: Any,
    implementation: Any,
) -> jax.Array:
    del implementation
    moves = Moves(ways.position, ways.filled, ways.received, ways.capacity)
    moved = _between_gpus(target, rows, moves, axis_name)
    return _padded(rows, axis_name) if moved is None else moved


def _collect(
    target: Target | None,
    rows: jax.Array,
    weights: jax.Array | None,
    received: Plan | None,
    ways: Ways,
    *,
    axis_name: Any,
    implementation: Any,
) -> jax.Array:
    terms = None if received is None else received.row_of
    moves = Moves(
        ways.position,
        ways.received,
        ways.filled,
        ways.capacity,
        row_of=ways.sent.row_of,
        terms=terms,
        weights=weights,
    )
    sums = _between_gpus(target, rows, moves, axis_name)
    if sums is None:
        if received is not None:
            rows = unpermute(rows, received, weights, implementation=implementation)
        sums = sum_rows(_padded(rows, axis_name), ways.sent, implementation)
    return sums


def _padded(rows: jax.Array, axis_name: Any) -> jax.Array:
    """Exchanges whole slots by XLA's collective."""
    return jax.lax.all_to_all(rows, axis_name, split_axis=0, concat_axis=0, tiled=True)


def _between_gpus(
    target: Target | None, x: jax.Array, moves: Moves, axis_name: Any
) -> jax.Array | None:
    """Exchanges rows by the kernel; None if there is no memory that all GPUs of the axis write."""
    if target is None or target.mesh is None:
        return None
    num_bytes = len(moves.received) * moves.capacity * x.shape[1] * x.dtype.itemsize
    try:
        peers = peer_memory.peers(target.mesh, axis_name, num_bytes)
    except peer_memory.UnavailableError as error:
        _say_padded(str(error))
        return None
    of_this = jnp.asarray(peers)[jax.lax.axis_index(target.mesh.axis_names)]
    return launchers.exchange_rows(target, of_this, x, moves)


@functools.cache
def _say_padded(reason: str) -> None:
    logger.warning("tokens are exchanged by all_to_all, padded: %s", reason)
