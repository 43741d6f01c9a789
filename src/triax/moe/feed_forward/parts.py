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
    precision: str | None
    router: tuple[tuple[str, Any], ...]


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


def feed_forward(options: Options, *operands: Any) -> FeedForward:
    """The layer, of x, logits, w_gate_up, w_down and bias."""
    run: linear.Function = functools.partial(_run, options)
    if options.capacity is not None:
        return run(*operands)
    if sharding.explicit_mesh(operands) is not None:
        return sharding.cut_only(run, _BY_TOKENS, *operands)
    # With padding the rows are no multiple of the tokens.
    if options.align_size == 1 and options.implementation != "interpret" and sharding.may_be_cut():
        with contextlib.suppress(TypeError):  # `route` will say which of its keywords is no number
            run = _as_one_op(*options[:-1], **dict(options.router))
    return run(*operands)


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
    return *by_token, *(d if d is None else shard.sum("t", d) for d in (d_gate_up, d_down))


_BY_TOKENS = Split(("t_", "t_"), ("t_", None, None), _sum_counts)
_KEPT = lambda kept: ["t" + "_" * (leaf.ndim - 1) for leaf in jax.tree.leaves(kept)]
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


@functools.lru_cache(maxsize=None, typed=True)  # 3.0 is no 3
def _as_one_op(*first: Any, **router: Any) -> linear.Function:
    """The layer as an op, whose gradient is an op as well."""
    options = Options._make((*first, (*router.items(),)))

    def run(*operands: Any) -> tuple[Any, ...]:
        results, kept = _run_and_keep(options, *operands)
        by_token = [a.reshape(*kept.weights.shape, *a.shape[1:]) for a in kept[2:]]
        return *results, Kept(*kept[:2], *by_token)

    def derivative(primals: Any, tangents: Any, results: Any) -> tuple[Any, ...]:
        tokens, *_, kept = results
        no_tangents = jax.tree.map(lambda _: None, kept)
        # The bias, the last, chooses experts and does not weigh them.
        moving = dict(zip(_MOVING, tangents[:-1], strict=True))
        names = tuple(name for name, tangent in moving.items() if tangent is not None)
        if not names:
            return None, None, None, no_tangents
        kept = _needed(Kept(*map(checkpoint_name, kept, _NAMES)), names)
        back = functools.partial(transpose, names)
        moved = linear.call(along, back, (primals, kept), moving, tokens)
        return moved, None, None, no_tangents

    def along(residuals: Any, moving: dict[str, jax.Array]) -> jax.Array:
        primals, _ = residuals
        fixed = dict(zip((*_MOVING, "bias"), primals, strict=True))
        layer = lambda moved: _run(options, *(fixed | moved).values()).tokens
        return jax.jvp(layer, [{name: fixed[name] for name in moving}], [moving])[1]

    def transpose(names: Any, residuals: Any, gradient: jax.Array) -> dict[str, jax.Array]:
        primals, kept = residuals
        return dict(zip(_MOVING, gradients(names)(*primals, kept, gradient), strict=True))

    @functools.cache
    def gradients(names: tuple[str, ...]) -> linear.Function:
        run = functools.partial(_gradients, options, names)
        plain = functools.partial(_plain_gradients, options, names)
        return linear.replaced(run, plain, _BACKWARD, options.implementation)

    layer = linear.op(run, derivative, _FORWARD, options.implementation)
    return lambda *operands: FeedForward(*layer(*operands)[:-1])


_MOVING = ("x", "logits", "w_gate_up", "w_down")


def _needed(kept: Kept, names: tuple[str, ...]) -> Kept:
    """What the gradients of some of `_MOVING` need; None for the rest."""
    before_down = names != ("w_down",)
    needed = {
        "rows": "w_gate_up" in names,
        "row_weights": before_down,
        "gate_up": before_down,
        "activated": "w_down" in names,
    }
    unneeded: dict[str, Any] = {name: None for name, needs in needed.items() if not needs}
    return kept._replace(**unneeded)


def _plain_gradients(options: Options, names: tuple[str, ...], *operands: Any) -> tuple[Any, ...]:
    """The same by JAX, for gradients of the gradients."""
    *moving, bias, _, gradient = operands
    layer = lambda *moving: _run(options, *moving, bias).tokens
    found = jax.vjp(layer, *moving)[1](gradient)
    return tuple(d if name in names else None for name, d in zip(_MOVING, found, strict=True))


def _gradients(
    options: Options,
    names: tuple[str, ...],
    x: Any,
    logits: Any,
    w_gate_up: Any,
    w_down: Any,
    bias: Any,
    kept: Kept,
    gradient: Any,
) -> tuple[Any, ...]:
    """Those named of x, logits, w_gate_up and w_down, op by op; None for the others."""
    plan = _plan(options, kept.experts, logits.shape[1])
    pairs = kept.weights.size
    rows, row_weights, gate_up, activated = (
        a if a is None else a.reshape(pairs, *a.shape[2:]) for a in kept[2:]
    )
    d_x = d_logits = d_w_gate_up = d_w_down = None

    def through_product(rows: Any, dtype: Any, weights: Any, gradient: Any) -> tuple[Any, Any]:
        """The gradients of rows, and of the weights if the rows were kept."""
        if rows is not None:
            d_rows, d_weights = jax.vjp(
                lambda rows, weights: _multiply(options, plan, rows, weights), rows, weights
            )[1](gradient)
            return d_rows, d_weights
        like = jnp.zeros((pairs, weights.shape[1]), dtype)
        pull = jax.vjp(lambda rows: _multiply(options, plan, rows, weights), like)[1]
        return pull(gradient)[0], None

    inner, outer = jnp.result_type(x, w_gate_up), jnp.result_type(x, w_gate_up, w_down)
    d_out = permute(gradient.astype(outer), plan, implementation=options.implementation)
    d_activated, d_w_down = through_product(activated, inner, w_down, d_out)
    if gate_up is not None:
        activate = functools.partial(_activate, options)
        d_gate_up, d_row_weights = jax.vjp(activate, gate_up, row_weights)[1](d_activated)
        d_rows, d_w_gate_up = through_product(rows, x.dtype, w_gate_up, d_gate_up)
        move = lambda x, weights: permute(
            x, plan, weights=weights, implementation=options.implementation
        )[:2]
        d_x, d_weights = jax.vjp(move, x, kept.weights)[1]((d_rows, d_row_weights))
        if "logits" in names:
            weigh = lambda logits: _route(options, logits, bias).weights
            (d_logits,) = jax.vjp(weigh, logits)[1](d_weights)
    return d_x if "x" in names else None, d_logits, d_w_gate_up, d_w_down
