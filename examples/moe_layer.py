"""A mixture-of-experts feed-forward layer in plain JAX, with Triax moving the tokens.

    params = init_layer(jax.random.key(0), width=64, hidden=128, num_experts=8)
    y, routing = moe_layer(params, x, top_k=2)            # x, y [tokens, width]
    loss = task_loss(y) + 0.01 * routing.balance_loss

A router picks `top_k` experts for each token. `make_plan` gives every (token, choice) a row,
`permute` copies the tokens to their rows, grouped by expert, so that each expert's matmul is one
piece of `jax.lax.ragged_dot`, and `unpermute` sums up what the experts made of each token, times
the router's weights. Nothing is computed for an expert that a token did not go to.

`moe_stack` is several such layers, as a transformer has them: normalised, with a residual
connection, scanned over, and with the routed tokens kept for the backward pass.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from triax import moe

Params = dict[str, jax.Array]

# What the backward pass finds ready: the plan and the tokens in expert order. All the rest it
# computes again. Triax gives these names to what it makes.
KEEP_ROUTED = jax.checkpoint_policies.save_only_these_names("triax_plan", "triax_permuted_rows")


class Routing(NamedTuple):
    """How a layer used its experts.

    Attributes:
      balance_loss: [], 1 where all experts get their even share, and more the less they do.
      load: int32 [experts], the (token, choice) pairs that each expert got.
    """

    balance_loss: jax.Array
    load: jax.Array


def init_layer(
    key: jax.Array, width: int, hidden: int, num_experts: int, dtype: Any = jnp.float32
) -> Params:
    """The parameters of one layer; for `moe_stack`, vmap it over keys."""
    router, up, down = jax.random.split(key, 3)
    draw = lambda key, *shape: jax.random.normal(key, shape, dtype) * shape[-2] ** -0.5
    return {
        "router": draw(router, width, num_experts),
        "up": draw(up, num_experts, width, hidden),
        "down": draw(down, num_experts, hidden, width),
    }


def moe_layer(
    params: Params,
    x: jax.Array,
    *,
    top_k: int,
    capacity: int | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, Routing]:
    """Sends each token through the `top_k` experts that its router likes best.

    Args:
      params: from `init_layer`.
      x: [tokens, width].
      top_k: experts per token.
      capacity: the most tokens an expert takes; the rest of them it leaves out. None for all.
      implementation: how Triax moves the tokens; None is right.

    Returns:
      [tokens, width] in the dtype of `x`, and the `Routing`.
    """
    num_experts = params["router"].shape[1]
    probs = router_probs(params["router"], x)
    weights, selected = jax.lax.top_k(probs, top_k)
    if top_k > 1:  # A single choice keeps its probability: it is all the router learns from.
        weights = weights / jnp.sum(weights, axis=1, keepdims=True)

    plan = moe.make_plan(selected, num_experts, capacity=capacity, implementation=implementation)
    rows = moe.permute(x, plan, implementation=implementation)
    rows = jax.nn.silu(jax.lax.ragged_dot(rows, params["up"], plan.group_sizes))
    rows = jax.lax.ragged_dot(rows, params["down"], plan.group_sizes)
    y = moe.unpermute(rows, plan, weights, implementation=implementation)
    return y, Routing(balance_loss(probs, plan.group_counts), plan.group_counts)


def router_probs(router: jax.Array, x: jax.Array) -> jax.Array:
    """The softmax over experts, [tokens, experts], in float32 or wider: it is easily upset."""
    wider = jnp.promote_types(x.dtype, jnp.float32)
    return jax.nn.softmax(x.astype(wider) @ router.astype(wider), axis=-1)


def balance_loss(probs: jax.Array, load: jax.Array) -> jax.Array:
    """The load-balancing loss: experts · Σ over experts of (share of pairs · mean probability).

    Equations 4 to 6 of Fedus, Zoph and Shazeer, "Switch Transformers" (arXiv:2101.03961), for any
    number of choices per token. Only the probabilities have a gradient; the share is a count.
    """
    share = load / jnp.maximum(jnp.sum(load), 1)
    return probs.shape[1] * jnp.sum(share.astype(probs.dtype) * jnp.mean(probs, axis=0))


def moe_stack(
    params: Params, x: jax.Array, *, top_k: int, implementation: str | None = None
) -> tuple[jax.Array, Routing]:
    """Layers one after the other, each ``x + moe_layer(normalise(x))``.

    Args:
      params: those of all layers, stacked: ``jax.vmap(init)(jax.random.split(key, layers))``.
      x: [tokens, width].
      top_k, implementation: as for `moe_layer`.

    Returns:
      [tokens, width], and the `Routing` of each layer: [layers] and [layers, experts].
    """

    @functools.partial(jax.checkpoint, policy=KEEP_ROUTED)
    def step(x: jax.Array, params: Params) -> tuple[jax.Array, Routing]:
        y, routing = moe_layer(params, normalise(x), top_k=top_k, implementation=implementation)
        return x + y, routing

    return jax.lax.scan(step, x, params)


def normalise(x: jax.Array) -> jax.Array:
    """Each token divided by its root mean square."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
