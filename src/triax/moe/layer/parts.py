"""The layer's ops in turn, and how they are cut over devices together.

Without a capacity no token depends on another, so each device can route its own tokens. Op by op
that cannot be seen: the rows of all tokens are sorted by expert. On a mesh with explicit axes the
types say how tokens are cut when the layer is traced, and each device runs the layer on its part.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax

from triax.moe.activations.api import glu
from triax.moe.activations.reference import Activation
from triax.moe.grouped_matmul.api import ragged_dot
from triax.moe.permutation.api import permute, unpermute
from triax.moe.plans.api import make_plan
from triax.moe.plans.reference import Plan
from triax.moe.router.api import route
from triax.moe.router.reference import Routed
from triax.moe.shared import arguments, sharding
from triax.moe.shared.implementation import Implementation
from triax.moe.shared.sharding import Shard, Split


class FeedForward(NamedTuple):
    """What `feed_forward` returns.

    Attributes:
      tokens: [tokens, hidden], in the dtype of `x`.
      group_counts: int32 [experts], the pairs routed to each expert, including those dropped, as
        `load_balancing_loss` expects.
      num_dropped: int32 [], the pairs dropped because their expert was full.
    """

    tokens: jax.Array
    group_counts: jax.Array
    num_dropped: jax.Array


class Options(NamedTuple):
    """The non-array arguments of `feed_forward`; `router` holds keywords of `route`."""

    top_k: int
    activation: Activation
    capacity: int | None
    align_size: int
    implementation: Implementation | None
    router: dict[str, Any]


def feed_forward(options: Options, *operands: Any) -> FeedForward:
    """The layer, of x, logits, w_gate_up, w_down and bias."""
    run = functools.partial(_run, options)
    if options.capacity is not None:
        return run(*operands)

    def part(shard: Shard, *operands: Any) -> FeedForward:
        tokens, group_counts, num_dropped = run(*operands)
        return FeedForward(tokens, shard.sum("t", group_counts), shard.sum("t", num_dropped))

    # Each device runs the layer on its tokens, and all sum up what they counted.
    by_tokens = Split(("th", "te", "ehu", "ewh", "e"), ("th", "e", ""), "t", part)
    return sharding.cut_only(run, by_tokens, *operands)


def _run(
    options: Options, x: Any, logits: Any, w_gate_up: Any, w_down: Any, bias: Any
) -> FeedForward:
    weights, experts = _route(options, logits, bias)
    plan = _plan(options, experts, logits.shape[1])
    rows, row_weights, _ = permute(x, plan, weights=weights, implementation=options.implementation)
    gate_up = _multiply(options, plan, rows, w_gate_up)
    activated = _activate(options, gate_up, row_weights)
    out = _multiply(options, plan, activated, w_down)
    tokens = unpermute(out, plan, implementation=options.implementation)
    return FeedForward(tokens, plan.group_counts, plan.num_dropped)


def _route(options: Options, logits: Any, bias: Any) -> Routed:
    return route(
        logits, options.top_k, bias=bias, implementation=options.implementation, **options.router
    )


def _plan(options: Options, experts: Any, num_experts: int) -> Plan:
    return make_plan(
        experts,
        num_experts,
        capacity=options.capacity,
        num_rows=_num_rows(experts.size, num_experts, options.capacity, options.align_size),
        align_size=options.align_size,
        implementation=options.implementation,
    )


def _multiply(options: Options, plan: Plan, rows: Any, weights: Any) -> jax.Array:
    return ragged_dot(rows, weights, plan.group_sizes, implementation=options.implementation)


def _activate(options: Options, gate_up: Any, row_weights: Any) -> jax.Array:
    return glu(
        gate_up, row_weights, activation=options.activation, implementation=options.implementation
    )


def _num_rows(
    num_pairs: int, num_experts: int, capacity: int | None, align_size: int
) -> int | None:
    """The rows of full experts, if those are fewer than `make_plan` would make by default."""
    if capacity is None:
        return None
    align_size = arguments.integer("align_size", align_size, 1)
    full = -(-arguments.integer("capacity", capacity, 0) // align_size) * align_size
    return min(num_experts * full, arguments.most_rows(num_pairs, num_experts, align_size))
