"""The layer's ops in turn, and how they are cut over devices as one.

Without a capacity no token depends on another, so each device can route its own tokens. Op by op
that cannot be seen: the rows of all tokens are sorted by expert. On a mesh with explicit axes the
types say how tokens are cut when the layer is traced. Otherwise XLA decides after that; then the
layer is one op, and its gradient another, between which each device's rows stay in its own order.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from triax.moe.glu.api import glu
from triax.moe.glu.reference import Activation
from triax.moe.permutation.api import permute, unpermute
from triax.moe.plans.api import make_plan
from triax.moe.plans.reference import Plan
from triax.moe.ragged_dot.api import ragged_dot
from triax.moe.router.api import route
from triax.moe.router.reference import Routed
from triax.moe.shared import arguments, linear, sharding
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
    """The arguments of `feed_forward` that are no arrays; `router` holds keywords of `route`.

    `precision` is JAX's default for matmuls where the layer is called, which need not be where its
    gradient is traced.
    """

    top_k: int
    activation: Activation
    capacity: int | None
    align_size: int
    implementation: Implementation | None
    router: tuple[tuple[str, Any], ...]
    precision: str | None


class Kept(NamedTuple):
    """What the gradient needs: the routing, and what the ops between permute and unpermute take.

    As one op the layer has its rows as [tokens, top_k, …]. They are cut like tokens, and each
    device's are in its own order.
    """

    experts: jax.Array
    weights: jax.Array
    rows: jax.Array
    row_weights: Any
    gate_up: jax.Array
    activated: jax.Array


def feed_forward(options: Options) -> linear.Function:
    """The layer, of x, logits, w_gate_up, w_down and bias."""
    run = functools.partial(_run, options)
    if options.capacity is not None:
        return run
    if sharding.is_explicit():
        return functools.partial(sharding.cut_only, run, _BY_TOKENS)
    # With padding the rows are no multiple of the tokens.
    if options.align_size == 1 and options.implementation != "interpret" and sharding.may_be_cut():
        with contextlib.suppress(TypeError):  # `route` will say which of its keywords is no number
            return _as_one_op(options)
    return run


def _run(options: Options, *operands: Any) -> FeedForward:
    return _run_and_keep(options, *operands)[0]


def _run_and_keep(
    options: Options, x: Any, logits: Any, w_gate_up: Any, w_down: Any, bias: Any
) -> tuple[FeedForward, Kept]:
    weights, experts = _route(options, logits, bias)
    plan = _plan(options, experts, logits.shape[1])
    rows, row_weights, _ = permute(x, plan, weights=weights, implementation=options.implementation)
    gate_up = _multiply(options, plan, rows, w_gate_up)
    activated = _activate(options, gate_up, row_weights)
    out = _multiply(options, plan, activated, w_down)
    tokens = unpermute(out, plan, implementation=options.implementation)
    results = FeedForward(tokens.astype(x.dtype), plan.group_counts, plan.num_dropped)
    return results, Kept(experts, weights, rows, row_weights, gate_up, activated)


def _route(options: Options, logits: Any, bias: Any) -> Routed:
    router = {**dict(options.router), "bias": bias, "implementation": options.implementation}
    return route(logits, options.top_k, **router)


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
    with jax.default_matmul_precision(options.precision):
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


# --- cut by tokens -----------------------------------------------------------------------------


def _sum_counts(function: linear.Function, shard: Shard, *operands: Any) -> tuple[Any, ...]:
    tokens, group_counts, num_dropped, *kept = function(*operands)
    return tokens, shard.sum("t", group_counts), shard.sum("t", num_dropped), *kept


def _sum_gradients(function: linear.Function, shard: Shard, *operands: Any) -> tuple[Any, ...]:
    *by_token, d_gate_up, d_down = function(*operands)
    return *by_token, shard.sum("t", d_gate_up), shard.sum("t", d_down)


_BY_TOKENS = Split(("t_", "t_"), ("t_", None, None), _sum_counts)
_KEPT = lambda _: ["t_", "t_", "t__", "t_", "t__", "t__"]
_FORWARD = Split(("t_", "t_"), ("t_", None, None, _KEPT), _sum_counts)
_BACKWARD = Split(
    ("t_", "t_", None, None, None, _KEPT, "t_"), ("t_", "t_", None, None), _sum_gradients
)
_NAMES = (
    "triax_routing",
    "triax_routing",
    "triax_permuted_rows",
    "triax_permuted_weights",
    "triax_ragged_dot",
    "triax_glu",
)


@functools.cache
def _as_one_op(options: Options) -> linear.Function:
    """The layer as an op, whose gradient is an op as well."""

    def run(*operands: Any) -> tuple[Any, ...]:
        results, kept = _run_and_keep(options, *operands)
        by_token = [a.reshape(*kept.weights.shape, *a.shape[1:]) for a in kept[2:]]
        return *results, Kept(*kept[:2], *by_token)

    def derivative(primals: Any, tangents: Any, results: Any) -> tuple[Any, ...]:
        tokens, *_, kept = results
        kept = Kept(*map(checkpoint_name, kept, _NAMES))
        moving = dict(zip((*_MOVING, "bias"), tangents, strict=True))
        del moving["bias"]  # it chooses experts, and does not weigh them
        moved = None
        if any(tangent is not None for tangent in moving.values()):
            moved = linear.call(along, back, (primals, kept), moving, tokens)
        return moved, None, None, jax.tree.map(lambda _: None, kept)

    def along(residuals: Any, moving: dict[str, jax.Array]) -> jax.Array:
        primals, _ = residuals
        fixed = dict(zip((*_MOVING, "bias"), primals, strict=True))
        layer = lambda moved: _run(options, *(fixed | moved).values()).tokens
        return jax.jvp(layer, [{name: fixed[name] for name in moving}], [moving])[1]

    def back(residuals: Any, gradient: jax.Array) -> dict[str, jax.Array]:
        primals, kept = residuals
        return dict(zip(_MOVING, gradients(*primals, kept, gradient), strict=True))

    def plain_gradients(*operands: Any) -> tuple[jax.Array, ...]:
        *moving, bias, _, gradient = operands
        layer = lambda *moving: _run(options, *moving, bias).tokens
        return tuple(jax.vjp(layer, *moving)[1](gradient))

    run_gradients = functools.partial(_gradients, options)
    gradients = linear.replaced(run_gradients, plain_gradients, _BACKWARD, options.implementation)
    layer = linear.op(run, derivative, _FORWARD, options.implementation)
    return lambda *operands: FeedForward(*layer(*operands)[:-1])


_MOVING = ("x", "logits", "w_gate_up", "w_down")


def _gradients(
    options: Options,
    x: Any,
    logits: Any,
    w_gate_up: Any,
    w_down: Any,
    bias: Any,
    kept: Kept,
    gradient: Any,
) -> tuple[jax.Array, ...]:
    """Those of x, logits, w_gate_up and w_down, op by op; what XLA finds unused it leaves out."""
    pairs = kept.weights.size
    rows, row_weights, gate_up, activated = (a.reshape(pairs, *a.shape[2:]) for a in kept[2:])
    plan = _plan(options, kept.experts, logits.shape[1])
    multiply = functools.partial(_multiply, options, plan)
    activate = functools.partial(_activate, options)
    move = lambda x, weights: permute(
        x, plan, weights=weights, implementation=options.implementation
    )[:2]
    weigh = lambda logits: _route(options, logits, bias).weights

    gradient = gradient.astype(jnp.result_type(activated, w_down))
    d_out = permute(gradient, plan, implementation=options.implementation)
    d_activated, d_down = jax.vjp(multiply, activated, w_down)[1](d_out)
    d_gate_up, d_row_weights = jax.vjp(activate, gate_up, row_weights)[1](d_activated)
    d_rows, d_gate_up = jax.vjp(multiply, rows, w_gate_up)[1](d_gate_up)
    d_x, d_weights = jax.vjp(move, x, kept.weights)[1]((d_rows, d_row_weights))
    (d_logits,) = jax.vjp(weigh, logits)[1](d_weights)
    return d_x, d_logits, d_gate_up, d_down
