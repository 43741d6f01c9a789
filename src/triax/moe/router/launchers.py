"""Launches the router's kernels: result types, grids and configs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from triax.binding.launch import KernelImplementation
from triax.moe.router.configs import RouteConfig, RouterSpec, place_bits
from triax.moe.router.reference import Routing
from triax.moe.shared.launching import launch

# Kernels are imported where they are launched: importing triax.moe needs no Triton.

_KEY_BITS = 31


def route(
    logits: jax.Array,
    bias: jax.Array | None,
    *,
    spec: RouterSpec,
    implementation: KernelImplementation | None,
) -> Routing:
    """Returns the weights and experts of each token, best first."""
    from triax.moe.router.kernels import _route_kernel

    num_tokens, num_experts = logits.shape
    bits = place_bits(num_experts, spec.num_groups)
    # The order of a 16-bit float widened to float32 ends in zeros, which leave room for the place.
    order_bits = {"bfloat16": 16, "float16": 19}.get(logits.dtype.name, 32)
    exact = bias is None and order_bits + bits <= _KEY_BITS
    by_score = bias is not None or spec.num_groups > 1
    config = RouteConfig.for_choice(num_experts, spec.top_k, spec.num_groups, exact, by_score)
    shape = (num_tokens, spec.top_k)
    weights, experts = launch(
        _route_kernel,
        logits,
        bias,
        num_tokens,
        spec.scale,
        out_type=(jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.int32)),
        # Programs take whole rows, because they choose from all experts.
        grid=-(-num_tokens // config.block_tokens),
        config=(spec, config),
        implementation=implementation,
        NUM_EXPERTS=num_experts,
        EXACT=exact,
        BITS=bits,
    )
    return Routing(weights, experts)


def route_grad(
    logits: jax.Array,
    experts: jax.Array,
    gradient: jax.Array,
    *,
    spec: RouterSpec,
    implementation: KernelImplementation | None,
) -> jax.Array:
    """Returns the gradient of the logits from the weights' gradient, float32 [tokens, top_k]."""
    from triax.moe.router.kernels import _route_grad_kernel

    num_tokens, num_experts = logits.shape
    reads_rows = spec.score == "softmax" and not spec.normalize
    config = RouteConfig.for_gradient(num_experts, spec.top_k, reads_rows)
    d_logits: jax.Array = launch(
        _route_grad_kernel,
        logits,
        experts,
        gradient,
        num_tokens,
        spec.scale,
        out_type=jax.ShapeDtypeStruct(logits.shape, logits.dtype),
        # Programs take whole rows, because they overwrite the chosen experts after the whole row.
        grid=-(-num_tokens // config.block_tokens),
        config=(spec, config),
        implementation=implementation,
        NUM_EXPERTS=num_experts,
        BLOCK=config.block_groups * config.block_size,
    )
    return d_logits
