"""Sends tokens to the devices that hold their experts, and sums the rows that come back.

`combine` first sums the rows of a token's experts; without that it is the transpose of `send`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from triax.moe.expert_parallel import exchange
from triax.moe.expert_parallel.exchange import Ways
from triax.moe.permutation.ops import unpermute
from triax.moe.plans.reference import Plan
from triax.moe.quantization.ops import quantized
from triax.moe.shared.ops import Call, Op
from triax.sharding import linear

_BLOCK = 128  # numbers of a row that share a scale if rows come back in 8 bits


def in_slots(sent: Plan, capacity: int) -> Plan:
    """Returns a plan whose groups are devices, with room for `capacity` rows in every group."""
    starts = jnp.cumsum(sent.group_sizes) - sent.group_sizes
    group = jnp.maximum(sent.expert_of, 0)
    row_of = sent.row_of + (group * capacity - starts[group])
    return dataclasses.replace(
        sent,
        row_of=jnp.where(sent.row_of >= 0, row_of, -1),
        group_sizes=jnp.full_like(sent.group_sizes, capacity),
        num_rows=sent.num_experts * capacity,
        align_size=max(capacity, 2),  # more than 1: groups have rows without a token
    )


def _combined(
    rows: jax.Array,
    weights: jax.Array | None,
    received: Plan,
    ways: Ways,
    *,
    dtype: str | None,
    **options: Any,
) -> jax.Array:
    if dtype is None:
        return exchange.collect(rows, weights, received, ways, **options)
    path: dict[str, Any] = {"implementation": options["implementation"]}
    sums = unpermute(rows, received, weights, **path)
    rounded = quantized(sums, dtype, block=(1, _BLOCK), **path)
    back = functools.partial(exchange.send, ways=ways.reversed(), of_tokens=False, **options)
    return unpermute(jax.tree.map(back, rounded).dequantize(rows.dtype), ways.sent, **path)


def _combined_derivative(call: Call, arguments: Any, tangents: Any, result: jax.Array) -> jax.Array:
    *operands, received, ways = arguments

    def sums(rows: jax.Array, weights: Any) -> list[jax.Array]:
        return [unpermute(rows, received, weights, implementation=call.implementation)]

    (moved,) = linear.jvp(sums, operands, tangents[:2])[1]
    exact = _collect.of(call.implementation, axis_name=call.options["axis_name"])
    return _derivative(exact, (None, ways), (moved, None), result)


def _to_tokens(rows: jax.Array, ways: Ways, **options: Any) -> jax.Array:
    return exchange.collect(rows, None, None, ways, **options)


def _derivative(call: Call, arguments: Any, tangents: Any, result: jax.Array) -> jax.Array:
    transpose = call.replace(_collect if call.op is send else send)
    return linear.call(
        lambda ways, named: call(named["rows"], ways),
        lambda ways, cotangent: {"rows": transpose(cotangent, ways)},
        arguments[1],
        {"rows": tangents[0]},
        result,
    )


send = Op("send_tokens", xla=exchange.send, derivative=_derivative)
"""``send(x, ways)`` sends [tokens, ...]; returns received tokens in slots, by sender."""

_collect = Op("collect_tokens", xla=_to_tokens, derivative=_derivative)

combine = Op("combine_rows", xla=_combined, derivative=_combined_derivative)
"""``combine(rows, weights, received, ways)`` sums each received token's rows, multiplied by weights
[received tokens, top_k] if there are some, and returns the sums to the tokens' devices, which add
them up. Sums travel as they are, or as `dtype`, of 8 bits, with a scale for each 128 numbers: the
derivative ignores the rounding."""
