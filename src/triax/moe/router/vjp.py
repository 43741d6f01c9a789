"""The router's derivative: by the weights alone, for the choice has none."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from triax.moe import implementation as implementations
from triax.moe.router import launchers, reference
from triax.moe.router.configs import RouterSpec
from triax.moe.router.reference import Routed


def _saved(logits: jax.Array, experts: jax.Array, *more: jax.Array) -> tuple[jax.Array, ...]:
    # Residuals that are inputs, JAX does not save but looks up among the inputs; inside `scan`,
    # under a second derivative, it looks in the wrong place. A named value is no input. Experts
    # have the name of the result, so that a policy that keeps it saves choosing again.
    others = [checkpoint_name(array, "triax_residual") for array in (logits, *more)]
    return others[0], checkpoint_name(experts, "triax_routing"), *others[1:]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def route(
    logits: jax.Array, bias: jax.Array | None, spec: RouterSpec, implementation: str | None
) -> Routed:
    """The weights and experts of each token, best first."""
    return implementations.run(
        implementation,
        logits,
        bias,
        kernels=functools.partial(launchers.route, spec=spec),
        xla=functools.partial(reference.route_reference, spec=spec),
    )


def _route_fwd(
    logits: jax.Array, bias: jax.Array | None, spec: RouterSpec, implementation: str | None
) -> tuple[Routed, Any]:
    routed = route(logits, bias, spec, implementation)
    no_bias = None if bias is None else jnp.zeros_like(bias)
    return routed, (*_saved(logits, routed.experts), no_bias)


def _route_bwd(
    spec: RouterSpec, implementation: str | None, residuals: Any, gradient: Routed
) -> tuple[jax.Array, jax.Array | None]:
    logits, experts, no_bias = residuals
    return route_grad(logits, experts, gradient.weights, spec, implementation), no_bias


route.defvjp(_route_fwd, _route_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def route_grad(
    logits: jax.Array,
    experts: jax.Array,
    gradient: jax.Array,
    spec: RouterSpec,
    implementation: str | None,
) -> jax.Array:
    """The gradient of the logits, from that of the weights."""
    return implementations.run(
        implementation,
        logits,
        experts,
        gradient,
        kernels=functools.partial(launchers.route_grad, spec=spec),
        xla=functools.partial(reference.route_grad_reference, spec=spec),
    )


def _route_grad_fwd(
    logits: jax.Array,
    experts: jax.Array,
    gradient: jax.Array,
    spec: RouterSpec,
    implementation: str | None,
) -> tuple[jax.Array, Any]:
    d_logits = route_grad(logits, experts, gradient, spec, implementation)
    return d_logits, _saved(logits, experts, gradient)


def _route_grad_bwd(
    spec: RouterSpec, implementation: str | None, residuals: Any, second: jax.Array
) -> tuple[jax.Array, None, jax.Array]:
    # Second derivatives are rare: plain JAX on all platforms, and as often as anyone likes.
    logits, experts, gradient = residuals

    def first(logits: jax.Array, gradient: jax.Array) -> jax.Array:
        return reference.route_grad_reference(logits, experts, gradient, spec=spec)

    d_logits, d_gradient = jax.vjp(first, logits, gradient)[1](second)
    return d_logits, None, d_gradient


route_grad.defvjp(_route_grad_fwd, _route_grad_bwd)
