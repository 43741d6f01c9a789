"""A mixture-of-experts feed-forward layer: a router of one matrix, and `moe.feed_forward`.

    params = init_layer(jax.random.key(0), width=64, hidden=128, num_experts=8)
    y, usage = moe_layer(params, x, top_k=2)            # x, y [tokens, width]
    loss = task_loss(y) + 0.01 * usage.balance_loss

A router picks `top_k` experts for each token. `moe.feed_forward` groups the tokens by expert, so
that `moe.ragged_dot` does all experts' matmuls in one call, and sums the experts' results for each
token, multiplied by the router's weights. An expert does no work for tokens not sent to it.

`moe_stack` is several such layers, as in a transformer: normalised, with a residual connection,
scanned over, and with the routed tokens kept for the backward pass.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from triax import moe

Params = dict[str, Any]

# What is kept for the backward pass, by the names that Triax gives: the plan and the tokens in
# expert order. Everything else is computed again.
KEEP_ROUTED = jax.checkpoint_policies.save_only_these_names("triax_plan", "triax_permuted_rows")


class Usage(NamedTuple):
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
    gate_up = draw(up, num_experts, width, 2 * hidden)
    experts = moe.Experts(gate_up, draw(down, num_experts, hidden, width))
    return {"router": draw(router, width, num_experts), "experts": experts}


def moe_layer(
    params: Params,
    x: jax.Array,
    *,
    top_k: int,
    capacity: int | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, Usage]:
    """Sends each token through the `top_k` experts with the best logits.

    Args:
      params: from `init_layer`.
      x: [tokens, width].
      top_k: experts per token.
      capacity: the most tokens an expert takes; the rest of them it leaves out. None for all.
      implementation: which code of Triax runs; None is right.

    Returns:
      [tokens, width] in the dtype of `x`, and the `Usage`.
    """
    logits = router_logits(params["router"], x)
    # A single choice keeps its probability: all the router learns from.
    router = moe.Router(top_k, normalize=top_k > 1)
    how = {"capacity": capacity, "implementation": implementation}
    out = moe.feed_forward(x, logits, params["experts"], router, **how)
    balance_loss = moe.load_balancing_loss(logits, out.group_counts)
    return out.tokens, Usage(balance_loss, out.group_counts)


def router_logits(router: jax.Array, x: jax.Array) -> jax.Array:
    """The router's logits, in float32 or wider, because a softmax needs the precision."""
    wider = jnp.promote_types(x.dtype, jnp.float32)
    return x.astype(wider) @ router.astype(wider)


def moe_stack(
    params: Params, x: jax.Array, *, top_k: int, implementation: str | None = None
) -> tuple[jax.Array, Usage]:
    """Layers one after the other, each ``x + moe_layer(normalise(x))``.

    Args:
      params: those of all layers, stacked: ``jax.vmap(init)(jax.random.split(key, layers))``.
      x: [tokens, width].
      top_k, implementation: as for `moe_layer`.

    Returns:
      [tokens, width], and the `Usage` of each layer: [layers] and [layers, experts].
    """

    @functools.partial(jax.checkpoint, policy=KEEP_ROUTED)
    def step(x: jax.Array, params: Params) -> tuple[jax.Array, Usage]:
        y, usage = moe_layer(params, normalise(x), top_k=top_k, implementation=implementation)
        return x + y, usage

    return jax.lax.scan(step, x, params)


def normalise(x: jax.Array) -> jax.Array:
    """Each token divided by its root mean square."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
