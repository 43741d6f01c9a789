"""Exchanges tokens, and plans the received tokens' rows by the experts of the device."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from triax import messages
from triax.moe.expert_parallel.exchange import Ways
from triax.moe.expert_parallel.tokens import combine, in_slots, send
from triax.moe.permutation.ops import permute, weights_by_slot
from triax.moe.plans.ops import make_plan, make_plan_from_mask
from triax.moe.plans.reference import Plan
from triax.moe.shared import arguments
from triax.moe.shared.implementation import Implementation
from triax.sharding.explicit import gathered


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["ways", "received"],
    meta_fields=["axis_name", "num_rows"],
)
@dataclasses.dataclass(frozen=True)
class DispatchPlan:
    """How rows come back; made by `dispatch` for `combine`.

    Attributes:
      ways: which tokens go to which device, and how many come from each.
      received: the plan of the received tokens, whose groups are this device's experts.
      axis_name: the mesh axis.
      num_rows: the rows made on each device.
    """

    ways: Ways
    received: Plan
    axis_name: Any
    num_rows: int

    def __repr__(self) -> str:
        return messages.fields(self)


class Dispatched(NamedTuple):
    """The result of `dispatch`, for the experts of this device.

    Attributes:
      rows: [rows, hidden], sorted by expert, in the dtype of `x`; zero past the groups.
      weights: [rows], the router's weight of each row, in the dtype of `weights`.
      scales: [rows, scales] in the dtype of `scales`, or None.
      group_sizes: int32 [local experts], the rows of each group, as `ragged_dot` expects.
      group_counts: int32 [local experts], the received pairs of token and expert.
      num_dropped: int32 [], the pairs beyond `capacity`, and those that did not fit in `num_rows`,
        summed over the devices of the axis.
      plan: for `combine`.
    """

    rows: jax.Array
    weights: jax.Array
    scales: jax.Array | None
    group_sizes: jax.Array
    group_counts: jax.Array
    num_dropped: jax.Array
    plan: DispatchPlan


def by_expert(sent: Dispatched, implementation: Implementation | None) -> Dispatched:
    """Sorts the result of `exchanged` by expert, as `dispatch` returns it."""
    operands = sent.rows, sent.plan.received, sent.weights, sent.scales
    moved: Any = permute(*operands, implementation=implementation)
    return sent._replace(rows=moved.rows, weights=moved.weights, scales=moved.scales)


def exchanged(
    x: jax.Array,
    weights: jax.Array,
    experts: jax.Array,
    num_experts: int,
    axis_name: Any,
    *,
    capacity: int | None = None,
    num_rows: int | None = None,
    scales: jax.Array | None = None,
    implementation: Implementation | None,
) -> Dispatched:
    """Runs `dispatch` up to the sort by expert, with checked arguments: `experts` are int32.

    Rows, weights and scales are those of the received tokens; weights have `top_k` columns.
    """
    num_devices = jax.lax.axis_size(axis_name)
    num_local = num_experts // num_devices
    num_tokens, top_k = experts.shape
    capacity = num_tokens if capacity is None else min(capacity, num_tokens)
    can_drop = capacity < num_tokens or num_rows is not None
    if num_rows is None:
        # A token may name an expert twice: `top_k` bounds its rows, not the device's experts.
        num_rows = arguments.integer("num_rows", num_devices * capacity * top_k, 0)
    path: dict[str, Any] = {"implementation": implementation}
    weights, experts = gathered(weights), gathered(experts)
    routed = (experts >= 0) & (experts < num_experts)
    experts = jnp.where(routed, experts, -1)
    device_of = jnp.where(routed, experts // num_local, -1)
    devices = jnp.arange(num_devices, dtype=jnp.int32)[None, None, :]
    needed = jnp.any(device_of[:, :, None] == devices, axis=1)
    sent = make_plan_from_mask(needed, min(top_k, num_devices), capacity=capacity, **path)
    ways = Ways.of(in_slots(sent, capacity), axis_name, implementation)

    def to_devices(array: jax.Array) -> jax.Array:
        sent: jax.Array = send(array, ways, axis_name=axis_name, **path)
        return sent

    # Experts are numbered from 1, so that zeros in rows without a token mean no expert. The numbers
    # are exact in float32, and so travel with the weights.
    dtype = weights.dtype if weights.dtype.itemsize >= 4 else jnp.float32
    numbers = (experts + 1).astype(dtype)
    both = to_devices(jnp.concatenate([weights.astype(dtype), numbers], axis=1))
    here_weights = both[:, :top_k].astype(weights.dtype)
    here_experts = both[:, top_k:].astype(jnp.int32) - 1
    received = make_plan(
        here_experts - jax.lax.axis_index(axis_name) * num_local,
        num_local,
        num_rows=num_rows,
        **path,
    )
    arrived = jnp.any(here_experts >= 0, axis=1).reshape(num_devices, capacity)
    ways = ways._replace(
        filled=sent.group_filled, received=jnp.sum(arrived, axis=1, dtype=jnp.int32)
    )
    here_scales = None if scales is None else to_devices(scales)
    num_dropped = received.num_dropped
    if capacity < num_tokens:
        arrives = (sent.row_of >= 0)[:, None, :] & (
            device_of[:, :, None] == sent.expert_of[:, None, :]
        )
        num_dropped += jnp.sum(routed & ~jnp.any(arrives, axis=2), dtype=jnp.int32)
    return Dispatched(
        to_devices(x),
        here_weights,
        here_scales,
        received.group_sizes,
        received.group_counts,
        jax.lax.psum(num_dropped, axis_name) if can_drop else jnp.zeros((), jnp.int32),
        DispatchPlan(ways, received, axis_name, num_rows),
    )


def combined(
    rows: jax.Array,
    plan: DispatchPlan,
    weights: jax.Array | None,
    dtype: str | None = None,
    *,
    implementation: Implementation | None,
) -> jax.Array:
    """Runs `combine` with checked arguments; `dtype` is what rows are rounded to on their way."""
    if weights is not None:
        weights = weights_by_slot(weights, plan.received, implementation)
    options = {"axis_name": plan.axis_name, "dtype": dtype, "implementation": implementation}
    tokens = combine(rows, weights, plan.received, plan.ways, **options)
    return checkpoint_name(tokens, "triax_unpermuted_tokens")
