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


def send(x: jax.Array, ways: Ways, *, of_tokens: bool = True, **options: Any) -> jax.Array:
    """Sends tokens, or else whole slots; returns the slots received.

    Rows that are not sent, here and below, have any values.
    """
    return _exchange(x, None, None, ways, of_tokens=of_tokens, to_tokens=False, **options)


def collect(
    rows: jax.Array, weights: jax.Array | None, received: Plan | None, ways: Ways, **options: Any
) -> jax.Array:
    """Sends rows of received tokens back; returns the sum of each token's rows.

    With `received`, the plan of the received tokens, the rows are those of the plan, of which the
    sum is sent for each token: multiplied by `weights` [received tokens, top_k] if there are some.
    """
    back, path = ways.reversed(), options["implementation"]
    few = received is None or received.row_of.shape[1] <= MAX_UNROLLED_SLOTS
    if few and all(map(_is_summed_in_float32, (rows, weights))):
        return _exchange(rows, weights, received, back, of_tokens=False, to_tokens=True, **options)
    if received is not None:
        rows = unpermute(rows, received, weights, implementation=path)
    return sum_rows(send(rows, back, of_tokens=False, **options), back.sent, path)


def _is_summed_in_float32(array: jax.Array | None) -> bool:
    return array is None or array.dtype in (jnp.float32, jnp.bfloat16, jnp.float16)


def _exchange(
    x: jax.Array,
    weights: jax.Array | None,
    received: Plan | None,
    ways: Ways,
    *,
    to_tokens: bool,
    axis_name: Any,
    implementation: Implementation | None,
    **options: Any,
) -> jax.Array:
    """Exchanges slots: made of tokens or with `received` of sums, and at last summed to tokens."""
    num_rows = len(ways.sent.row_of) if to_tokens else ways.sent.num_rows
    out_type = jax.ShapeDtypeStruct((num_rows, *x.shape[1:]), x.dtype)
    operands = x, weights, received, ways
    options |= {"to_tokens": to_tokens, "axis_name": axis_name, "implementation": implementation}
    by_xla: Any = functools.partial(_on_target, None, **options)
    alone = jax.lax.axis_size(axis_name) == 1
    if (
        0 in (x.size, out_type.size)
        or alone
        or implementations.fit(implementation, x) in ("xla", "interpret")
    ):
        return by_xla(*operands)
    by_target = functools.partial(for_target, _on_target, out_type=out_type, **options)
    return jax.lax.platform_dependent(*operands, cuda=by_target, default=by_xla)


def _on_target(
    target: Target | None,
    x: jax.Array,
    weights: jax.Array | None,
    received: Plan | None,
    ways: Ways,
    *,
    of_tokens: bool,
    to_tokens: bool,
    axis_name: Any,
    implementation: Any,
) -> jax.Array:
    forms = {"of_tokens": of_tokens, "to_tokens": to_tokens}
    moved = _between_gpus(target, axis_name, x, weights, received, ways, **forms)
    if moved is not None:
        return moved
    if of_tokens:
        x = permute(x, ways.sent, implementation=implementation).rows
    if received is not None:
        x = unpermute(x, received, weights, implementation=implementation)
    x = jax.lax.all_to_all(x, axis_name, split_axis=0, concat_axis=0, tiled=True)
    return sum_rows(x, ways.sent, implementation) if to_tokens else x


def _between_gpus(
    target: Target | None,
    axis_name: Any,
    x: jax.Array,
    weights: jax.Array | None,
    received: Plan | None,
    ways: Ways,
    **forms: bool,
) -> jax.Array | None:
    """Exchanges rows by the kernel; None if there is no memory that all GPUs of the axis write."""
    if target is None:
        return None
    if target.mesh is None:
        _say_padded("the program is exported, or its `shard_map` leaves axes of the mesh to JAX")
        return None
    num_bytes = len(ways.received) * ways.capacity * x.shape[1] * x.dtype.itemsize
    try:
        peers = peer_memory.peers(target.mesh, axis_name, num_bytes)
    except peer_memory.UnavailableError as error:
        _say_padded(str(error))
        return None
    axes = tuple(name for name, size in target.mesh.shape.items() if size > 1)
    of_this = jnp.asarray(peers)[jax.lax.axis_index(axes)]
    return launchers.exchange_rows(target, of_this, x, weights, received, ways, **forms)


@functools.cache
def _say_padded(reason: str) -> None:
    logger.warning("tokens are exchanged by all_to_all, padded: %s", reason)
