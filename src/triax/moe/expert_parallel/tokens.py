"""Sends tokens to the devices that hold their experts, and sums the rows that come back.

`send` and `collect` are each other's transpose. XLA's kernel for ragged exchanges writes to the
other GPUs' memory: it reads each token in place, so tokens need not be copied by device first.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from triax.moe.expert_parallel import exchange
from triax.moe.expert_parallel.exchange import Pieces, Slices
from triax.moe.permutation.ops import permute, sum_rows, unpermute
from triax.moe.plans.reference import Plan
from triax.moe.quantization.ops import quantized
from triax.moe.shared.implementation import Implementation
from triax.moe.shared.ops import Call, Op
from triax.sharding import linear

# Rows of fewer bytes are first copied by device, because XLA's kernel starts a block for each row
# that it sends in place, which would take longer. On two and four H200s rows of 2,048 bytes are
# faster in place, and rows of 64 bytes slower.
_MIN_ROW_BYTES = 1024
_BLOCK = 128  # numbers of a row that share a scale if rows come back in 8 bits


class Ways(NamedTuple):
    """A ragged exchange: where rows go, and where the rows that come back for them go.

    Attributes:
      sent: the plan of the sent rows, in the order of the receiving devices.
      slices: the rows that lie together on both sides.
      pieces: the same exchange with a piece per token.
    """

    sent: Plan
    slices: Slices
    pieces: Pieces


def padded_plan(sent: Plan, capacity: int) -> Plan:
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


def ragged_ways(sent: Plan, num_rows: int, axis_name: Any) -> Ways:
    """Makes the `Ways` of a plan whose groups are devices, each of which takes `num_rows`."""
    slices = exchange.plan_slices(sent.group_sizes, axis_name, num_rows)
    device = jnp.arange(sent.num_experts, dtype=jnp.int32)[:, None]
    goes = sent.expert_of[:, None, :] == device[None]  # [tokens, devices, slots]
    row = jnp.max(jnp.where(goes, sent.row_of[:, None, :], -1), axis=2, initial=-1).T
    place = row - slices.offsets[:, None]
    sizes = ((row >= 0) & (place < slices.sizes[:, None])).astype(jnp.int32)
    targets = slices.targets[:, None] + place
    # XLA's kernel runs one block per piece if the number of pieces is odd, else 64 blocks, which
    # are too many for one row.
    rest = ((0, 0), (0, 1 - sizes.shape[1] % 2))
    sizes, targets = jnp.pad(sizes, rest), jnp.pad(targets, rest)
    offsets = jnp.broadcast_to(jnp.arange(sizes.shape[1], dtype=jnp.int32), sizes.shape)
    pieces = Pieces(offsets, sizes, targets, exchange.padded(sizes, axis_name))
    return Ways(sent, slices, pieces)


def send(
    x: jax.Array,
    ways: Ways | Plan,
    num_rows: int,
    axis_name: Any,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Sends [tokens, ...]; returns received tokens, [num_rows, ...], by device and token.

    Rows between slices are zeros. A plan alone as `ways` is for padded exchanges, and determines
    `num_rows`.
    """
    if isinstance(ways, Plan):
        rows = permute(x, ways, implementation=implementation).rows
        return exchange.padded(rows, axis_name)
    options = {"num_rows": num_rows, "axis_name": axis_name}
    received: jax.Array = _send(x, ways, implementation=implementation, **options)
    return received


def collect(
    rows: jax.Array,
    ways: Ways | Plan,
    axis_name: Any,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Returns rows [num_rows, ...] to the tokens' devices, and sums each token's rows."""
    if isinstance(ways, Plan):
        return unpermute(exchange.padded(rows, axis_name), ways, implementation=implementation)
    options = {"num_rows": len(rows), "axis_name": axis_name}
    x = _collect(rows, ways, implementation=implementation, **options)
    return checkpoint_name(x, "triax_unpermuted_tokens")


def home(rows: jax.Array, ways: Ways | Plan, axis_name: Any) -> jax.Array:
    """Returns rows to the devices that sent them, in the sent plan's order."""
    if isinstance(ways, Plan):
        return exchange.padded(rows, axis_name)
    return exchange.ragged(rows, ways.slices.reversed(), ways.sent.num_rows, axis_name)


def home_in_8_bits(
    rows: jax.Array, ways: Ways | Plan, axis_name: Any, dtype: str, implementation: Any
) -> jax.Array:
    """Does the same as `home` in 8 bits, with a scale for each 128 numbers of a row.

    The derivative is `home`'s.
    """
    options = {"axis_name": axis_name, "dtype": dtype}
    tokens: jax.Array = _home_in_8_bits(rows, ways, implementation=implementation, **options)
    return tokens


def _rounded(
    rows: jax.Array, ways: Ways | Plan, *, axis_name: Any, dtype: str, implementation: Any
) -> jax.Array:
    rounded = quantized(rows, dtype, block=(1, _BLOCK), implementation=implementation)
    here = jax.tree.map(lambda part: home(part, ways, axis_name), rounded)
    return here.dequantize(rows.dtype)


def _rounded_derivative(call: Call, arguments: Any, tangents: Any, result: jax.Array) -> jax.Array:
    axis_name, num_rows = call.options["axis_name"], len(arguments[0])

    def along(ways: Any, tangents: dict[str, jax.Array]) -> jax.Array:
        return home(tangents["rows"], ways, axis_name)

    def back(ways: Any, cotangent: jax.Array) -> dict[str, jax.Array]:
        if isinstance(ways, Plan):
            return {"rows": exchange.padded(cotangent, axis_name)}
        return {"rows": exchange.ragged(cotangent, ways.slices, num_rows, axis_name)}

    return linear.call(along, back, arguments[1], {"rows": tangents[0]}, result)


_home_in_8_bits = Op("home_in_8_bits", xla=_rounded, derivative=_rounded_derivative)


def _to_devices(
    x: jax.Array, ways: Ways, *, num_rows: int, axis_name: Any, implementation: Any
) -> jax.Array:
    if x.shape[1] * x.dtype.itemsize >= _MIN_ROW_BYTES:
        return exchange.move(x, ways.pieces, num_rows, axis_name)
    rows = permute(x, ways.sent, implementation=implementation).rows
    return exchange.ragged(rows, ways.slices, num_rows, axis_name)


def _to_tokens(
    rows: jax.Array, ways: Ways, *, num_rows: int, axis_name: Any, implementation: Any
) -> jax.Array:
    return sum_rows(home(rows, ways, axis_name), ways.sent, implementation)


def _derivative(call: Call, arguments: Any, tangents: Any, result: jax.Array) -> jax.Array:
    transpose = call.replace(_collect if call.op is _send else _send)
    return linear.call(
        lambda ways, named: call(named["rows"], ways),
        lambda ways, cotangent: {"rows": transpose(cotangent, ways)},
        arguments[1],
        {"rows": tangents[0]},
        result,
    )


_send = Op("send_tokens", xla=_to_devices, derivative=_derivative)
_collect = Op("collect_tokens", xla=_to_tokens, derivative=_derivative)
