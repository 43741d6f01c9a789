"""Sends tokens to the devices that hold their experts, and sums the rows that come back.

`collect` first sums the rows of a token's experts; without that it is the transpose of `send`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from triax.moe.expert_parallel import exchange
from triax.moe.expert_parallel.exchange import Ways
from triax.moe.permutation.ops import unpermute
from triax.moe.plans.reference import Plan
from triax.moe.quantization.ops import quantized
from triax.moe.shared.implementation import Implementation
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


def send(
    x: jax.Array, ways: Ways, axis_name: Any, *, implementation: Implementation | None
) -> jax.Array:
    """Sends [tokens, ...]; returns received tokens in slots, by sender."""
    received: jax.Array = _send(x, ways, axis_name=axis_name, implementation=implementation)
    return received


def collect(
    rows: jax.Array,
    weights: jax.Array | None,
    received: Plan,
    ways: Ways,
    axis_name: Any,
    *,
    implementation: Implementation | None,
) -> jax.Array:
    """Sums each received token's rows, multiplied by `weights` [received tokens, top_k] if given;
    returns the sums to the tokens' devices, and sums them there."""
    options = {"axis_name": axis_name, "implementation": implementation}
    x = _collect_of_experts(rows, weights, received, ways, **options)
    return checkpoint_name(x, "triax_unpermuted_tokens")


def home_in_8_bits(
    rows: jax.Array, ways: Ways, axis_name: Any, dtype: str, implementation: Any
) -> jax.Array:
    """Returns rows to the devices of their tokens in 8 bits, with a scale for each 128 numbers.

    The derivative ignores the rounding.
    """
    options = {"axis_name": axis_name, "dtype": dtype}
    tokens: jax.Array = _home_in_8_bits(rows, ways, implementation=implementation, **options)
    return tokens


def _rounded(
    rows: jax.Array, ways: Ways, *, axis_name: Any, dtype: str, implementation: Any
) -> jax.Array:
    rounded = quantized(rows, dtype, block=(1, _BLOCK), implementation=implementation)
    here = jax.tree.map(
        lambda part: exchange.swap(part, ways.reversed(), axis_name, implementation), rounded
    )
    return here.dequantize(rows.dtype)


def _rounded_derivative(call: Call, arguments: Any, tangents: Any, result: jax.Array) -> jax.Array:
    axis_name, path = call.options["axis_name"], call.implementation

    def along(ways: Ways, tangents: dict[str, jax.Array]) -> jax.Array:
        return exchange.swap(tangents["rows"], ways.reversed(), axis_name, path)

    def back(ways: Ways, cotangent: jax.Array) -> dict[str, jax.Array]:
        return {"rows": exchange.swap(cotangent, ways, axis_name, path)}

    return linear.call(along, back, arguments[1], {"rows": tangents[0]}, result)


_home_in_8_bits = Op("home_in_8_bits", xla=_rounded, derivative=_rounded_derivative)


def _to_devices(x: jax.Array, ways: Ways, *, axis_name: Any, implementation: Any) -> jax.Array:
    return exchange.send(x, ways, axis_name, implementation)


def _to_tokens(rows: jax.Array, ways: Ways, *, axis_name: Any, implementation: Any) -> jax.Array:
    return exchange.collect(rows, None, None, ways, axis_name, implementation)


def _derivative(call: Call, arguments: Any, tangents: Any, result: jax.Array) -> jax.Array:
    transpose = call.replace(_collect if call.op is _send else _send)
    return linear.call(
        lambda ways, named: call(named["rows"], ways),
        lambda ways, cotangent: {"rows": transpose(cotangent, ways)},
        arguments[1],
        {"rows": tangents[0]},
        result,
    )


def _of_experts(
    rows: jax.Array, weights: Any, received: Plan, ways: Ways, *, axis_name: Any, **path: Any
) -> jax.Array:
    return exchange.collect(rows, weights, received, ways, axis_name, path["implementation"])


def _of_experts_derivative(
    call: Call, arguments: Any, tangents: Any, result: jax.Array
) -> jax.Array:
    *operands, received, ways = arguments

    def sums(rows: jax.Array, weights: Any) -> list[jax.Array]:
        return [unpermute(rows, received, weights, implementation=call.implementation)]

    (moved,) = linear.jvp(sums, operands, tangents[:2])[1]
    return _derivative(call.replace(_collect), (None, ways), (moved, None), result)


_collect_of_experts = Op("combine_rows", xla=_of_experts, derivative=_of_experts_derivative)
_send = Op("send_tokens", xla=_to_devices, derivative=_derivative)
_collect = Op("collect_tokens", xla=_to_tokens, derivative=_derivative)
