"""The layer's ops in turn, on one device or with its experts spread over several.

Without a capacity no token depends on another, so each device can route its own tokens. Op by op
that cannot be seen: the rows of all tokens are sorted by expert. On a mesh with explicit axes the
types say how tokens are cut when the layer is traced, and each device runs the layer on its part.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from triax.moe.activations.api import closes_over_traced, glu
from triax.moe.activations.reference import Activation
from triax.moe.expert_parallel.api import combine
from triax.moe.expert_parallel.arrivals import by_expert, exchanged
from triax.moe.grouped_matmul.api import ragged_dot
from triax.moe.layer import ops, products
from triax.moe.layer.recipes import Recipe
from triax.moe.permutation.api import permute, unpermute
from triax.moe.plans.api import make_plan
from triax.moe.plans.reference import Plan
from triax.moe.quantization.scaled import ScaledArray
from triax.moe.router.api import route
from triax.moe.shared import arguments
from triax.moe.shared.arrays import at_least_float32
from triax.moe.shared.implementation import Implementation
from triax.sharding import explicit
from triax.sharding.splits import Shard, Split

WeightsOn = Literal["output", "input"]

KEPT = "triax_permuted_rows", "triax_glu"
"""What may be kept for the gradient, or made again: names for `jax.checkpoint`."""


class FeedForward(NamedTuple):
    """What `feed_forward` returns.

    Attributes:
      tokens: [tokens, hidden], in the dtype of `x`.
      group_counts: int32 [experts], the pairs routed to each expert, including those dropped, as
        `load_balancing_loss` expects; with `axis_name` of all devices' tokens.
      num_dropped: int32 [], the pairs dropped because their expert was full.
      weights: float [tokens, top_k], the router's.
      experts: int32 [tokens, top_k], those that each token chose.
    """

    tokens: jax.Array
    group_counts: jax.Array
    num_dropped: jax.Array
    weights: jax.Array
    experts: jax.Array


class Operands(NamedTuple):
    """The arrays of the layer; `routing` stands for logits, bias and expert_scale."""

    x: Any
    logits: Any
    bias: Any
    expert_scale: Any
    routing: Any
    w_gate_up: Any
    w_down: Any
    b_gate_up: Any
    b_down: Any


@dataclasses.dataclass(frozen=True)
class Options:
    """The non-array arguments of `feed_forward`; `router` holds keywords of `route`."""

    num_experts: int
    top_k: int
    activation: Activation
    interleaved: bool
    transpose_weights: bool
    weights_on: WeightsOn
    capacity: int | None
    align_size: int
    axis_name: Any
    recipe: Recipe | None
    keep: tuple[str, ...]
    implementation: Implementation | None
    router: dict[str, Any]


def feed_forward(options: Options, operands: Operands) -> FeedForward:
    """The layer."""
    if options.axis_name is not None:
        return _spread(options, operands)
    run = functools.partial(_run, options)
    # What a function closes over may not be cut, and its tokens are then gathered.
    if options.capacity is not None or callable(options.activation):
        return run(*operands)

    def part(shard: Shard, *operands: Any) -> FeedForward:
        out = run(*operands)
        counts, dropped = (shard.sum("t", a) for a in (out.group_counts, out.num_dropped))
        return out._replace(group_counts=counts, num_dropped=dropped)

    # Each device runs the layer on its tokens, and all sum up what they counted.
    by_tokens = Split(("th", "te", "e", "e", "tk"), ("th", "e", "", "tk", "tk"), "t", part)
    return explicit.cut_only(run, by_tokens, *operands)


def _run(options: Options, *operands: Any) -> FeedForward:
    given = Operands(*operands)
    how: dict[str, Any] = {"implementation": options.implementation}
    weights, experts = _route(options, given)
    plan = make_plan(
        experts,
        options.num_experts,
        capacity=options.capacity,
        num_rows=_num_rows(experts.size, options),
        align_size=options.align_size,
        **how,
    )

    def arrived() -> Arrived:
        if options.recipe is None or options.weights_on == "input":
            rows, row_weights, _ = permute(given.x, plan, weights=weights, **how)
            return Arrived(rows, row_weights, plan.group_filled)
        no_columns = jnp.zeros((given.x.shape[0], 0), given.x.dtype)
        row_weights = permute(no_columns, plan, weights=weights, **how).weights
        quantized = products.quantized_tokens(options.recipe, given.x, plan, **how)
        return Arrived(given.x, row_weights, plan.group_filled, quantized, plan)

    if options.recipe is None:
        tokens = unpermute(_experts(options, given, arrived, plan.group_sizes), plan, **how)
    else:
        tokens = _experts(options, given, arrived, plan.group_sizes, plan)
    return FeedForward(tokens, plan.group_counts, plan.num_dropped, weights, experts)


def _spread(options: Options, given: Operands) -> FeedForward:
    """The same inside `shard_map`, where each device holds some of the experts."""
    axis = options.axis_name
    how: dict[str, Any] = {"implementation": options.implementation}
    weights, experts = _route(options, given)
    sent = exchanged(
        given.x,
        weights,
        experts,
        options.num_experts,
        axis,
        capacity=options.capacity,
        align_size=options.align_size,
        **how,
    )

    def arrived() -> Arrived:
        found = by_expert(sent, options.implementation)
        return Arrived(found.rows, found.weights, found.group_counts)

    out = _experts(options, given, arrived, sent.group_sizes)
    tokens = combine(out, sent.plan, weights=None, **how)
    chosen = experts.reshape(-1, 1) == jnp.arange(options.num_experts, dtype=jnp.int32)[None]
    counts = jax.lax.psum(jnp.sum(chosen, axis=0, dtype=jnp.int32), axis)
    return FeedForward(tokens, counts, jax.lax.psum(sent.num_dropped, axis), weights, experts)


def _route(options: Options, given: Operands) -> Any:
    if given.routing is not None:
        return given.routing
    return route(
        given.logits,
        options.top_k,
        bias=given.bias,
        expert_scale=given.expert_scale,
        implementation=options.implementation,
        **options.router,
    )


class Arrived(NamedTuple):
    """The experts' rows, what the router weighs each by, and the rows in 8 bits if they are.

    In each group as many rows as `filled` says hold a token, or all if these are fewer. With
    `source`, a plan, `rows` are the tokens that it sends to rows.
    """

    rows: jax.Array
    weights: Any
    filled: jax.Array
    quantized: ScaledArray | None = None
    source: Plan | None = None


def _experts(
    options: Options,
    given: Operands,
    arrived: Callable[[], Arrived],
    group_sizes: Any,
    target: Plan | None = None,
) -> jax.Array:
    """What the experts make of their rows, times the rows' weights; with `target` of tokens.

    Between the two halves is the first matmul's result, which is kept for the gradient. What else
    the halves need for theirs, but for `Options.keep`, they make again.
    """
    how: dict[str, Any] = {"implementation": options.implementation}
    kind: dict[str, Any] = {"activation": options.activation, "interleaved": options.interleaved}

    def multiply(
        rows: Any, weights: Any, bias: Any, bias_weights: Any = None, **moves: Any
    ) -> jax.Array:
        product: Any = ragged_dot
        if options.recipe is not None:
            product = functools.partial(products.multiply, options.recipe, **moves)
        return product(
            rows,
            weights,
            group_sizes,
            bias=bias,
            bias_weights=None if bias is None else bias_weights,
            transpose_weights=options.transpose_weights,
            **how,
        )

    def first() -> Any:
        rows, row_weights, filled, quantized, source = arrived()
        if options.weights_on == "input":
            rows = _weighted(rows, row_weights)
            row_weights = None
            quantizes = options.recipe is not None and given.b_gate_up is not None
            if callable(options.activation) or quantizes:
                is_token = _hold_tokens(group_sizes, filled, rows.shape[0])
                row_weights = is_token.astype(at_least_float32(rows.dtype))
        weights, biases = given.w_gate_up, given.b_gate_up
        moves = {"quantized": quantized, "source": source}
        if not isinstance(weights, tuple):
            return multiply(rows, weights, biases, **moves), row_weights
        both = zip(weights, biases or (None, None), strict=True)
        return tuple(multiply(rows, w, bias, **moves) for w, bias in both), row_weights

    def second(gate_up: Any, row_weights: Any) -> jax.Array:
        inner = glu(gate_up, row_weights, **kind, **how)
        return multiply(inner, given.w_down, given.b_down, row_weights, target=target)

    if KEPT[0] not in options.keep:
        first = jax.checkpoint(first)
    gate_up, row_weights = first()
    gate, up = gate_up if isinstance(gate_up, tuple) else (gate_up, None)
    closes_over = closes_over_traced(options.activation, options.interleaved, gate, up)
    if KEPT[1] in options.keep:
        return second(gate_up, row_weights)
    if closes_over or isinstance(given.w_down, ScaledArray):
        return jax.checkpoint(second)(gate_up, row_weights)
    if options.recipe is not None:
        return products.glu_multiply(
            options.recipe,
            gate_up,
            row_weights,
            given.w_down,
            group_sizes,
            bias=given.b_down,
            transpose_weights=options.transpose_weights,
            target=target,
            **kind,
            **how,
        )
    return ops.glu_ragged_dot(
        (gate, up, row_weights, given.w_down, given.b_down, group_sizes),
        transposed=options.transpose_weights,
        **kind,
        **how,
    )


def _weighted(rows: jax.Array, row_weights: jax.Array) -> jax.Array:
    wider = at_least_float32(rows.dtype)
    return (rows.astype(wider) * row_weights.astype(wider)[:, None]).astype(rows.dtype)


def _hold_tokens(group_sizes: jax.Array, filled: jax.Array, num_rows: int) -> jax.Array:
    """Which rows hold a token. In the others the activation must be zero: a function need not be
    finite there, and what a bias makes of them has no part in an expert's scales."""
    starts = jnp.cumsum(group_sizes) - group_sizes
    row = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    behind = row - starts[None]
    inside = (behind >= 0) & (behind < jnp.minimum(filled, group_sizes)[None])
    return jnp.any(inside, axis=1)


def _num_rows(num_pairs: int, options: Options) -> int | None:
    """The rows of full experts, if those are fewer than `make_plan` would make by default."""
    if options.capacity is None:
        return None
    align_size = arguments.integer("align_size", options.align_size, 1)
    full = -(-arguments.integer("capacity", options.capacity, 0) // align_size) * align_size
    most = arguments.most_rows(num_pairs, options.num_experts, align_size)
    return min(options.num_experts * full, most)
