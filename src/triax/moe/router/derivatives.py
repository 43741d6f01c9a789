"""The router's derivative, only that of the weights, because the choice has none."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from triax.moe.router import launchers, reference
from triax.moe.router.configs import RouterSpec
from triax.moe.router.reference import Routed
from triax.moe.shared import implementation as implementations
from triax.moe.shared import linear
from triax.moe.shared.sharding import Split


@functools.cache
def route(spec: RouterSpec, implementation: str | None) -> linear.Function:
    """The weights and experts of each token, best first, from logits and bias."""
    run = implementations.choose(
        implementation, launchers.route, reference.route_reference, spec=spec
    )

    def derivative(primals: Any, tangents: Any, routed: Routed) -> Any:
        if tangents[0] is None:
            return Routed(None, None)  # type: ignore[arg-type]
        # Under the result's name, so that a policy that keeps it also avoids choosing again.
        experts = checkpoint_name(routed.experts, "triax_routing")
        residuals = (primals[0], experts)
        moving = {"logits": tangents[0]}
        return Routed(linear.call(along, back, residuals, moving, routed.weights), None)  # type: ignore[arg-type]

    def along(residuals: Any, moving: dict[str, jax.Array]) -> jax.Array:
        logits, experts = residuals
        weigh = lambda logits: reference.weigh_reference(logits, experts, spec)
        return jax.jvp(weigh, [logits], [moving["logits"]])[1]

    def back(residuals: Any, gradient: jax.Array) -> dict[str, jax.Array]:
        logits, experts = residuals
        return {"logits": route_grad(spec, implementation)(logits, experts, gradient)}

    split = Split(("t_", None), ("t_", "t_"))
    return linear.op(run, derivative, split, implementation)


@functools.cache
def route_grad(spec: RouterSpec, implementation: str | None) -> linear.Function:
    """The gradient of the logits, from logits, experts and the gradient of the weights."""
    run = implementations.choose(
        implementation, launchers.route_grad, reference.route_grad_reference, spec=spec
    )
    # Second derivatives are rare: plain JAX on all platforms, differentiable to any order.
    plain = functools.partial(reference.route_grad_reference, spec=spec)
    split = Split(("t_", "t_", "t_"), "t_")
    return linear.replaced(run, plain, split, implementation)
