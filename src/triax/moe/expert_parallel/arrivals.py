"""Exchanges tokens, and plans the received tokens' rows by the experts of the device."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from triax import messages
from triax.moe.expert_parallel import exchange as exchanges
from triax.moe.expert_parallel.choices import ExchangeMethod, Scheme, choose, is_better_ragged
from triax.moe.expert_parallel.tokens import (
    Ways,
    collect,
    home,
    home_in_8_bits,
    padded_plan,
    ragged_ways,
    send,
)
from triax.moe.permutation.ops import permute, unpermute, weights_by_slot
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
      ways: the exchange in both directions; the groups of its plan are devices, or all experts. A
        `Plan` alone for padded exchanges.
      received: the plan of the received tokens, whose groups are this device's experts; None if
        rows came straight to their experts.
      axis_name: the mesh axis.
      num_rows: the rows made on each device.
    """

    ways: Ways | Plan
    received: Plan | None
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
    if sent.plan.received is None:
        return sent
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
    scheme: Scheme | None = None,
    exchange: ExchangeMethod | None = None,
    implementation: Implementation | None,
) -> Dispatched:
    """Runs `dispatch` up to the sort by expert, with checked arguments: `experts` are int32.

    Rows, weights and scales are as received. In scheme "token" rows are tokens, and weights have
    `top_k` columns; in scheme "choice" rows are in the order of experts already.
    """
    num_devices = jax.lax.axis_size(axis_name)
    num_local = num_experts // num_devices
    limit = experts.shape[0]
    if capacity is not None:
        limit = min(capacity, limit)
        scheme = scheme or "token"  # `capacity` means something else in scheme "choice"
    ragged = is_better_ragged(x, num_devices)
    scheme, exchange = choose(scheme, exchange, experts.shape[1], num_devices, ragged)
    if num_rows is None:
        # A token may name an expert twice: `top_k` bounds its rows, not the device's experts.
        pairs = limit * experts.shape[1]
        if scheme == "choice" and capacity is not None:
            pairs = min(experts.size, capacity * num_local)
        num_rows = arguments.integer("num_rows", num_devices * pairs, 0)
    weights, experts = gathered(weights), gathered(experts)
    experts = jnp.where((experts >= 0) & (experts < num_experts), experts, -1)
    axis, path = _Axis(axis_name, num_devices, num_local), {"implementation": implementation}
    operands = _Operands(x, weights, experts, scales, axis, num_rows, path)
    if scheme == "choice":
        return _send_choices(operands, capacity)
    return _send_tokens(operands, limit, exchange == "padded")


class _Axis(NamedTuple):
    name: Any
    devices: int
    experts: int  # of each device


class _Operands(NamedTuple):
    """The checked arguments of `exchanged`; each device receives up to `num_rows`."""

    x: jax.Array
    weights: jax.Array
    experts: jax.Array
    scales: Any
    axis: _Axis
    num_rows: int
    path: dict[str, Any]


def _send_tokens(operands: _Operands, capacity: int, padded: bool) -> Dispatched:
    """Sends each token once to each device that needs it, and plans rows for received tokens."""
    x, weights, experts, scales, axis, num_rows, path = operands
    top_k = experts.shape[1]
    routed = experts >= 0
    device_of = jnp.where(routed, experts // axis.experts, -1)
    devices = jnp.arange(axis.devices, dtype=jnp.int32)[None, None, :]
    needed = jnp.any(device_of[:, :, None] == devices, axis=1)
    sent = make_plan_from_mask(needed, min(top_k, axis.devices), capacity=capacity, **path)
    room = axis.devices * capacity
    ways: Ways | Plan = (
        padded_plan(sent, capacity) if padded else ragged_ways(sent, room, axis.name)
    )

    def to_devices(array: jax.Array) -> jax.Array:
        return send(array, ways, room, axis.name, **path)

    # Experts are numbered from 1, so that zeros in rows without a token mean no expert. The numbers
    # are exact in float32, and so travel with the weights.
    dtype = weights.dtype if weights.dtype.itemsize >= 4 else jnp.float32
    numbers = (experts + 1).astype(dtype)
    both = to_devices(jnp.concatenate([weights.astype(dtype), numbers], axis=1))
    here_weights = both[:, :top_k].astype(weights.dtype)
    here_experts = both[:, top_k:].astype(jnp.int32) - 1
    received = make_plan(
        here_experts - jax.lax.axis_index(axis.name) * axis.experts,
        axis.experts,
        num_rows=num_rows,
        **path,
    )
    here_scales = None if scales is None else to_devices(scales)
    num_dropped = received.num_dropped
    if capacity < x.shape[0]:
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
        jax.lax.psum(num_dropped, axis.name),
        DispatchPlan(ways, received, axis.name, num_rows),
    )


def _send_choices(operands: _Operands, capacity: int | None) -> Dispatched:
    """Sends each pair of token and expert as a row, straight to its place on the other device."""
    x, weights, experts, scales, axis, num_rows, path = operands
    sent = make_plan(experts, axis.experts * axis.devices, capacity=capacity, **path)
    moved: Any = permute(x, sent, weights, scales, **path)
    counts = sent.group_sizes.reshape(axis.devices, axis.experts)
    slices, group_sizes, totals = exchanges.plan_slices(counts, axis.name, num_rows)
    count = functools.partial(jnp.sum, dtype=jnp.int32)

    def to_devices(array: Any) -> jax.Array:
        return exchanges.ragged(array, slices, num_rows, axis.name)

    return Dispatched(
        to_devices(moved.rows),
        to_devices(moved.weights[:, None])[:, 0],
        None if scales is None else to_devices(moved.scales),
        group_sizes,
        totals,
        jax.lax.psum(count(experts >= 0) - count(slices.sizes), axis.name),
        DispatchPlan(Ways(sent, slices, None), None, axis.name, num_rows),
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
    ways, axis_name = plan.ways, plan.axis_name
    sent = ways if isinstance(ways, Plan) else ways.sent

    def back(rows: jax.Array) -> jax.Array:
        if dtype is None:
            return home(rows, ways, axis_name)
        return home_in_8_bits(rows, ways, axis_name, dtype, implementation)

    if plan.received is not None:
        rows = _weighted_sum(rows, plan.received, weights, implementation)
        if dtype is None:
            return collect(rows, ways, axis_name, implementation=implementation)
        return unpermute(back(rows), sent, implementation=implementation)
    if weights is not None:
        weights = home(weights[:, None], ways, axis_name)[:, 0]
    # So the gradient has as many rows as the caller's `rows`, and zeros past the groups.
    return _weighted_sum(back(rows), sent, weights, implementation)


def _weighted_sum(rows: jax.Array, plan: Plan, weights: Any, implementation: Any) -> jax.Array:
    """`unpermute` with a weight for each row."""
    if weights is not None:
        weights = weights_by_slot(weights, plan, implementation)
    return unpermute(rows, plan, weights, implementation=implementation)
