"""`feed_forward`: checks its arguments and runs the layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from triax import messages
from triax.compat import jax_private
from triax.errors import ArgumentTypeError
from triax.moe.layer import parts, recipes
from triax.moe.layer.experts import NOT_8_BITS, Experts, check_hidden, checked
from triax.moe.layer.parts import FeedForward, LayerOptions
from triax.moe.layer.products import Products
from triax.moe.layer.recipes import Recipe, Scaling
from triax.moe.router.ops import choose_and_scale
from triax.moe.router.reference import Routing
from triax.moe.router.router import Router, check_logits, check_of_experts, spec_of
from triax.moe.shared import arguments
from triax.moe.shared import implementation as implementations
from triax.moe.shared.arguments import Array, AxisName
from triax.moe.shared.implementation import Implementation
from triax.moe.shared.moved import refuses_moved_keywords
from triax.sharding import explicit


@refuses_moved_keywords
def feed_forward(
    x: Array,
    logits_or_routing: Array | Routing,
    experts: Experts,
    router: Router | None = None,
    *,
    bias: Array | None = None,
    expert_scale: Array | None = None,
    capacity: int | None = None,
    axis_name: AxisName | None = None,
    recipe: Recipe | Scaling | None = None,
    keep: Sequence[str] = (),
    implementation: Implementation | None = None,
) -> FeedForward:
    """Runs each token through its best experts, and sums their outputs.

        logits, router = x @ w_router, moe.Router(8, normalize=True)
        experts = moe.Experts(w_gate_up, w_down)
        out = moe.feed_forward(x, logits, experts, router)
        out.tokens  # [tokens, hidden]
        loss = task_loss + 0.01 * moe.load_balancing_loss(logits, out.group_counts)

    ``tokens[t] = sum over k of weights[t, k] * ffn[experts[t, k]](x[t])``, with the weights and
    experts that `route` returns and the ``ffn`` of `Experts`. This calls `route`, `make_plan`,
    `permute`, `ragged_dot`, `glu`, `ragged_dot` and `unpermute` in turn. If you need anything else
    in between, call them yourself.

    Routing is in float32. Matmuls sum in float32, add the bias, and round their results to the
    dtype of `x`. The activation and its product with the router's weight are computed in float32
    and rounded once, and so is the sum over a token's experts. Each gradient has the dtype of its
    argument.

    The backward pass keeps the arguments, the routing and the first matmul's result, and with
    `axis_name` the received tokens too. It recomputes permuted rows and activations. All of these
    carry their ops' names for `jax.checkpoint`.

    Args:
      x: float [tokens, hidden], 16 bits or more. It may have more leading dimensions; routing and
        results then have them too, and so may the logits.
      logits_or_routing: the router's logits, float [tokens, experts], usually from a matmul in
        float32; or a `Routing`, from `route` or your own, which takes no `router`, `bias` or
        `expert_scale`.
      experts: the weights, in the dtype of `x`, their biases and activation.
      router: how logits choose and weigh experts.
      bias, expert_scale: floats [experts], as in `route`.
      capacity: at least 1: the most pairs of token and expert that an expert takes, first come
        first served; None for no limit. A dropped pair adds nothing to its token. A capacity also
        bounds rows. Inside `jax.shard_map` it counts the tokens of one device, and with `axis_name`
        it is the capacity of `dispatch`: the most tokens that one device sends to another.
        docs/expert-parallel.md has a table of both under "Sizes".
      axis_name: for calls inside `jax.shard_map`: the mesh axis, or axes, over which the arrays of
        `experts` are sharded. Tokens go to their experts and back by `dispatch` and `combine`;
        logits, `bias` and `expert_scale` cover all experts.
      recipe: which products have 8-bit operands, for training: a `Recipe`; or "rows" or "blocks",
        `Recipe("rows", "rows")` and `Recipe("blocks", "blocks")`. Such a layer has gradients, but
        no forward mode and no second derivatives. `Experts.quantized` quantizes weights only once.
      keep: results to keep for the backward pass too: "triax_permuted_rows", "triax_glu" or both.
        With a recipe it keeps tokens instead of rows.
      implementation: None picks by the program's platform: Triton kernels on CUDA, plain JAX
        elsewhere. "triton", "interpret" (the kernels, interpreted on the CPU) and "xla" insist.

    Returns:
      `FeedForward`: the tokens, group_counts, num_dropped and the routing.

    Raises:
      ArgumentTypeError: an argument has the wrong type.
      ArgumentValueError: an argument has the wrong shape or is out of range.
    """
    lead: tuple[int, ...] = ()
    choice = logits_or_routing
    if getattr(x, "ndim", 0) > 2 and jax_private.is_array(x):
        lead = x.shape[:-1]
        if {getattr(array, "shape", ())[:-1] for array in jax.tree.leaves(choice)} == {lead}:
            choice = jax.tree.map(_flat, choice)
        x = _flat(x)
    x = arguments.array("x", x, ("tokens", "hidden"), jnp.floating, wide=NOT_8_BITS)
    messages.check_sizes_known("x", x.shape)
    num_tokens, hidden = x.shape
    if recipe is not None:
        recipe = recipes.resolve(recipe, x)
    experts = checked(experts, x, recipe)
    num_devices = 1
    if axis_name is not None:
        axis_name, num_devices = arguments.mesh_axis(axis_name, "feed_forward")
    if capacity is not None:
        capacity = arguments.integer("capacity", capacity, 1)
    floats = {"x": x}
    if isinstance(choice, Routing):
        of_logits = {"router": router, "bias": bias, "expert_scale": expert_scale}
        routing = _checked_routing(choice, num_tokens, of_logits)
        floats["routing.weights"] = routing.weights
    elif not jax_private.is_array(choice):
        wrap = "Wrap your own choice: `moe.Routing(weights, experts)`."
        raise ArgumentTypeError(
            "Argument `logits_or_routing` must be an array of logits, or a Routing; got "
            f"{messages.shown(choice)}. {messages.remedy('logits', choice, wrap)}"
        )
    elif router is None:
        raise ArgumentTypeError(
            "Argument `router` is missing: it says how logits choose experts. Pass a "
            "`moe.Router(top_k)`."
        )
    else:
        logits = check_logits(choice)
        num_experts = experts.w_down.shape[0]
        of_all = num_experts * num_devices
        beside, remedy = "the tokens of `x` and `experts`", ""
        if axis_name is not None:
            beside += (
                f", which has {num_experts} on each of {num_devices} devices (each gets its own "
                "experts' weights, and the logits of all experts)"
            )
        if logits.shape[1] != of_all and logits.shape[1] % max(num_experts, 1) == 0:
            remedy = " If each device has a part of the experts, pass `axis_name`."
            if axis_name is not None:
                remedy = (
                    f" If the logits are right, shard `experts` over {axis_name!r}, or let "
                    "`axis_name` name just the axes that shard them."
                )
        arguments.check_shape("logits", logits.shape, (num_tokens, of_all), beside, remedy)
        spec = spec_of(router, of_all)
        bias = check_of_experts("bias", bias, of_all)
        expert_scale = check_of_experts("expert_scale", expert_scale, of_all)
        implementations.check(implementation, logits=logits, bias=bias)
        how: dict[str, Any] = {"expert_scale": expert_scale, "implementation": implementation}
        routing = choose_and_scale(logits, bias, router, spec, **how)
    check_hidden(experts, hidden)
    arguments.check_pairs(routing.experts.shape)
    for name in ("b_gate_up", "b_down"):
        for path, array in jax.tree_util.tree_leaves_with_path(getattr(experts, name)):
            floats[f"experts.{name}{jax.tree_util.keystr(path)}"] = array
    implementations.check(implementation, floats=True, **floats)
    products = Products(recipe, experts.transposed, implementation)
    options = LayerOptions(capacity, axis_name, products, _check_keep(keep))
    out = parts.feed_forward(options, x, routing, experts)
    if not lead:
        return out
    back = [jnp.reshape(array, (*lead, array.shape[-1])) for array in (out.tokens, *out.routing)]
    return out._replace(tokens=back[0], routing=Routing(*back[1:]))


def _flat(array: Any) -> jax.Array:
    # JAX reshapes an array only if explicit axes shard no dimension but the first or the last.
    array = explicit.gathered(arguments.as_jax(array), 0, array.ndim - 1)
    return jnp.reshape(array, (math.prod(array.shape[:-1]), array.shape[-1]))


def _check_keep(keep: Any) -> tuple[str, ...]:
    """Checks the names in `keep`, and returns them in the order of `KEPT`."""
    if isinstance(keep, str) or not isinstance(keep, Sequence):
        known = " and ".join(f'"{name}"' for name in parts.KEPT)
        raise ArgumentTypeError(
            f"Argument `keep` must be a sequence of {known}; got {messages.short(keep)}."
        )
    for name in keep:
        arguments.check_choice("keep", name, parts.KEPT)
    return tuple(name for name in parts.KEPT if name in keep)


def _checked_routing(routing: Routing, num_tokens: int, of_logits: dict[str, Any]) -> Routing:
    """Returns the routing as JAX arrays; raises if an argument for logits is given too."""
    unused = [name for name, value in of_logits.items() if value is not None]
    if unused:
        raise ArgumentTypeError(
            f"Arguments for logits, `{'`, `'.join(unused)}`, are given with a Routing. Pass "
            "them to `route`."
        )
    axes = "tokens", "top_k"
    of: dict[str, Any] = {"sizes": {"tokens": num_tokens}, "of": "`x`", "wide": "Cast it."}
    weights = arguments.array("routing.weights", routing.weights, axes, jnp.floating, **of)
    of = {"sizes": dict(zip(axes, weights.shape, strict=True)), "of": "`routing.weights`"}
    experts = arguments.array("routing.experts", routing.experts, axes, jnp.integer, **of)
    return Routing(weights, arguments.as_int32(experts))
