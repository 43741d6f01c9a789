"""Runs the layer's ops in turn, on one device or with its experts spread over several.

Without a capacity no token depends on another, so each device can take its own tokens through the
layer. XLA cannot infer this op by op, because rows are sorted globally. On a mesh with explicit
axes, types show how tokens are sharded while the layer is traced.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from triax import messages
from triax.moe.activations.functions import closes_over_arrays
from triax.moe.activations.ops import activate
from triax.moe.activations.options import resolve
from triax.moe.expert_parallel.arrivals import Dispatched, by_expert, combined, exchanged
from triax.moe.layer import ops
from triax.moe.layer.experts import Experts, matrices
from triax.moe.layer.products import Products
from triax.moe.permutation.ops import permute
from triax.moe.plans.ops import make_plan
from triax.moe.plans.reference import Plan
from triax.moe.quantization.scaled import ScaledArray
from triax.moe.router.reference import Routing
from triax.moe.shared.ops import Op
from triax.sharding import explicit
from triax.sharding.splits import Shard, Split

KEPT = "triax_permuted_rows", "triax_glu"
"""The results that are recomputed unless they are kept: names for `jax.checkpoint`."""


class FeedForward(NamedTuple):
    """The result of `feed_forward`.

    Attributes:
      tokens: [tokens, hidden], in the dtype of `x`.
      group_counts: int32 [experts], the pairs routed to each expert, dropped pairs included, as
        `load_balancing_loss` expects; with `axis_name` summed over its devices.
      num_dropped: int32 [], how many of the pairs in `group_counts` a `capacity` dropped.
      routing: the weights and experts of each token, as `route` returns them.
    """

    tokens: jax.Array
    group_counts: jax.Array
    num_dropped: jax.Array
    routing: Routing


class LayerOptions(NamedTuple):
    """The static arguments of `feed_forward`, checked; `products` holds the others."""

    capacity: int | None
    axis_name: Any
    products: Products
    keep: tuple[str, ...]


def feed_forward(options: LayerOptions, x: Any, routing: Routing, experts: Experts) -> FeedForward:
    """Runs the layer on routed tokens."""
    if options.axis_name is not None:
        return _spread(options, x, routing, experts)
    run, operands = functools.partial(_run, options), (x, routing, experts)
    mesh = explicit.explicit_mesh(operands)
    if mesh is not None:
        _warn_of_gathering(experts)
    # A capacity couples tokens, and a function may close over arrays, which cannot be sharded.
    if mesh is None or options.capacity is not None or callable(experts.activation):
        return run(*operands)

    def part(shard: Shard, *operands: Any) -> FeedForward:
        out = run(*operands)  # which drops nothing without a capacity
        return out._replace(group_counts=shard.sum("t", out.group_counts))

    # Each device runs the layer on its tokens, and counts are summed over devices.
    by_tokens = Split(("th", "tk"), ("th", "e", "", "tk"), "t", part)
    return explicit.shard_only(mesh, run, by_tokens, *operands)


def _warn_of_gathering(experts: Experts) -> None:
    """Warns that explicit axes shard the experts, which each device gathers in every call."""
    for path, array in jax.tree_util.tree_leaves_with_path(experts):
        sharding = explicit.sharding_of(array)
        axes = sharding.spec[0] if sharding is not None and sharding.spec else None
        if axes:
            warnings.warn(
                "feed_forward gathers all experts on each device, in every call: explicit axes "
                f"shard them, `experts{jax.tree_util.keystr(path)}` ({messages.short(array)}) over "
                f"{axes!r}. To send tokens to the experts instead, call it inside `jax.shard_map` "
                f"with `axis_name={axes!r}`. To gather without this warning, pass "
                "`jax.sharding.reshard(experts, P())`.",
                UserWarning,
                stacklevel=5,
            )
            return


def _run(options: LayerOptions, x: Any, routing: Routing, experts: Experts) -> FeedForward:
    path: dict[str, Any] = {"implementation": options.products.implementation}
    num_rows, num_experts = routing.experts.size, experts.w_down.shape[0]
    if options.capacity is not None:
        num_rows = min(num_rows, num_experts * options.capacity)
    sizes: dict[str, Any] = {"capacity": options.capacity, "num_rows": num_rows}
    plan = make_plan(routing.experts, num_experts, **sizes, **path)
    tokens = _experts(options, experts, (x, plan, routing.weights), plan.group_sizes, plan)
    return FeedForward(tokens, plan.group_counts, plan.num_dropped, routing)


def _spread(options: LayerOptions, x: Any, routing: Routing, experts: Experts) -> FeedForward:
    """Runs the layer inside `shard_map`, where each device holds some of the experts."""
    axis = options.axis_name
    path: dict[str, Any] = {"implementation": options.products.implementation}
    num_experts = experts.w_down.shape[0] * jax.lax.axis_size(axis)
    operands = x, routing.weights, routing.experts
    sent = exchanged(*operands, num_experts, axis, capacity=options.capacity, **path)
    out = _experts(options, experts, sent, sent.group_sizes)
    tokens = combined(out, sent.plan, None, **path)
    chosen = routing.experts[..., None] == jnp.arange(num_experts, dtype=jnp.int32)[None, None]
    counts = jax.lax.psum(jnp.sum(chosen, axis=(0, 1), dtype=jnp.int32), axis)
    return FeedForward(tokens, counts, sent.num_dropped, routing)


class Arrived(NamedTuple):
    """What the experts get: rows, and the router's weight of each row.

    `quantized` are the same rows in 8 bits, if the recipe has made them already. With the plan
    `source`, `rows` are tokens, still to be permuted by it.
    """

    rows: jax.Array
    weights: Any
    quantized: ScaledArray | None = None
    source: Plan | None = None


def _arrived(options: LayerOptions, source: Any) -> Arrived:
    """Permutes what other devices have sent, or tokens by a plan, with the router's weights."""
    path: dict[str, Any] = {"implementation": options.products.implementation}
    if isinstance(source, Dispatched):
        received = by_expert(source, **path)
        return Arrived(received.rows, received.weights)
    x, plan, weights = source
    products = options.products
    if products.recipe is None:
        rows, row_weights, _ = permute(x, plan, weights, **path)
        return Arrived(rows, row_weights)
    no_columns = jnp.zeros((x.shape[0], 0), x.dtype)
    row_weights = permute(no_columns, plan, weights, **path).weights
    quantized = None
    if products.recipe.forward is not None:  # before they are moved: fewer are copied
        tokens = products.quantized(products.recipe.forward, jax.lax.stop_gradient(x))
        quantized = products.moved(tokens, plan)
    return Arrived(x, row_weights, quantized, plan)


def _experts(options: LayerOptions, experts: Experts, *operands: Any) -> jax.Array:
    """Does what `_run_experts` does, and keeps the first matmul's result for derivatives alone."""
    # A function may close over arrays, which an op must not.
    run: Any = _differentiable if callable(experts.activation) else _experts_op
    path: dict[str, Any] = {"implementation": options.products.implementation}
    out: jax.Array = run(experts, *operands, options=options, **path)
    return out


def _run_experts(
    experts: Experts,
    source: Dispatched | tuple[jax.Array, Plan, jax.Array],
    group_sizes: Any,
    target: Plan | None = None,
    *,
    options: LayerOptions,
    implementation: Any,
    keep_product: bool,
) -> jax.Array:
    """Returns the experts' weighted outputs; with the plan `target`, summed to tokens.

    The backward pass reads the first matmul's result, which is kept, and the results named in
    `LayerOptions.keep`. It computes all else again. Without `keep_product` there is none: a kernel
    that applies the activation stores nothing else.
    """
    activation = resolve(experts.activation, experts.interleaved)
    *firsts, last = matrices(experts)
    products = options.products

    def first() -> Any:
        rows, row_weights, quantized, plan = _arrived(options, source)
        if not (KEPT[1] in options.keep or isinstance(last.weights, ScaledArray)):
            operands = rows, firsts, group_sizes, row_weights, activation
            both = ops.multiply_glu(products, *operands, keep_product)
            if both is not None:
                return both[0], None, row_weights, both[1]
        moves = None, quantized, plan
        made = [ops.multiply(products, rows, m, group_sizes, *moves) for m in firsts]
        return *(*made, None)[:2], row_weights, None

    def second(gate: Any, up: Any, row_weights: Any) -> jax.Array:
        inner = activate(gate, up, row_weights, activation, implementation=implementation)
        return ops.multiply(products, inner, last, group_sizes, row_weights, target=target)

    if KEPT[0] not in options.keep:
        first = jax.checkpoint(first)
    gate, up, row_weights, inner = first()
    if KEPT[1] in options.keep:
        return second(gate, up, row_weights)
    if gate is None:
        return ops.multiply(products, inner, last, group_sizes, row_weights, target=target)
    if isinstance(last.weights, ScaledArray) or closes_over_arrays(activation, gate, up):
        return jax.checkpoint(second)(gate, up, row_weights)
    operands = gate, up, row_weights, last, group_sizes, activation, target, inner
    return ops.glu_multiply(products, *operands)


_differentiable = functools.partial(_run_experts, keep_product=True)
_experts_op = Op(
    "experts",
    xla=functools.partial(_run_experts, keep_product=False),
    differentiated=_differentiable,
    inline=True,
)
