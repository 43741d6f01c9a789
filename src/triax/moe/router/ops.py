"""The op of route. Only the weights have a derivative; the choice has none.

`choose` and `choose_and_scale` call it with checked arguments, for the public `route` and for what
is made of it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from triax.errors import ArgumentValueError
from triax.moe.router import launchers, reference
from triax.moe.router.configs import MAX_EXPERTS, RouterSpec
from triax.moe.router.reference import Routing
from triax.moe.router.router import Router
from triax.moe.shared import implementation as implementations
from triax.moe.shared.implementation import Implementation
from triax.moe.shared.ops import Call, Op
from triax.sharding import explicit, linear


def _derivative(call: Call, primals: Any, tangents: Any, routed: Routing) -> Any:
    if tangents[0] is None:
        return Routing(None, None)  # type: ignore[arg-type]

    def along(residuals: Any, tangents: dict[str, jax.Array]) -> jax.Array:
        logits, experts = residuals
        weigh = lambda logits: reference.weigh_reference(logits, experts, **call.options)
        return jax.jvp(weigh, [logits], [tangents["logits"]])[1]

    def back(residuals: Any, gradient: jax.Array) -> dict[str, jax.Array]:
        return {"logits": call.replace(route_grad)(*residuals, gradient)}

    # Named like the result, so that a policy that keeps the result avoids choosing again.
    residuals = primals[0], checkpoint_name(routed.experts, "triax_routing")
    moved = linear.call(along, back, residuals, {"logits": tangents[0]}, routed.weights)
    return Routing(moved, None)  # type: ignore[arg-type]


route = Op(
    "route",
    arguments=("te", "e"),  # logits, bias
    results=("tk", "tk"),
    shardable="t",
    kernels=launchers.route,
    xla=reference.route_reference,
    derivative=_derivative,
)

route_grad = Op(
    "route_grad",
    arguments=("te", "tk", "tk"),  # logits, experts, the gradient of the weights
    results="te",
    shardable="t",
    kernels=launchers.route_grad,
    xla=reference.route_grad_reference,
    derivative="xla",  # second derivatives are rare
)


def choose_and_scale(
    logits: jax.Array,
    bias: jax.Array | None,
    router: Router,
    spec: RouterSpec,
    *,
    expert_scale: jax.Array | None,
    experts: jax.Array | None = None,
    implementation: Implementation | None,
) -> Routing:
    """Chooses experts, or weighs those in `experts`, by a router and its spec for these logits."""
    if experts is None:
        routed = choose(logits, bias, spec, implementation)
    else:
        routed = _weigh(logits, experts, spec)
    if router.normalize > 1:
        # These weights are normalised already, so that their powers do not underflow.
        weights = reference.of_norm_one(routed.weights, router.normalize)
        weights *= jnp.float32(router.scale)
        routed = routed._replace(weights=weights)
    if expert_scale is None:
        return routed
    return routed._replace(weights=_scaled(routed.weights, expert_scale, routed.experts))


def choose(
    logits: jax.Array,
    bias: jax.Array | None,
    spec: RouterSpec,
    implementation: Implementation | None,
) -> Routing:
    """Chooses experts and their weights, before a p-norm and scales of experts.

    Raises:
      ArgumentValueError: kernels were requested, and there are too many experts for them.
    """
    num_tokens, num_experts = logits.shape
    implementation = implementations.fit(implementation, logits, bias)
    if num_experts > MAX_EXPERTS:
        if implementation not in (None, "xla"):
            raise ArgumentValueError(
                f"Argument `logits` must have at most {MAX_EXPERTS} experts for the kernel; got "
                f'{num_experts}. Use implementation="xla".'
            )
        implementation = "xla"
    if num_tokens == 0:
        implementation = "xla"
    routed = route(logits, bias, spec=spec, implementation=implementation)
    return Routing(*(checkpoint_name(array, "triax_routing") for array in routed))


def _weigh(logits: jax.Array, experts: jax.Array, spec: RouterSpec) -> Routing:
    """The weights of experts that are given; zero for those that there are not."""
    # Widened once, so that the gradients of both uses are added before they are rounded.
    logits = explicit.gathered(logits).astype(jnp.float32)
    experts = explicit.gathered(experts)
    known = (experts >= 0) & (experts < logits.shape[1])
    # An id outside the experts gets a score of zero, which affects no sum and no gradient.
    rows = jnp.arange(experts.shape[0])[:, None]
    taken = logits[rows, jnp.where(known, experts, 0)]
    weights = reference.weigh_taken(jnp.where(known, taken, -jnp.inf), logits, spec)
    weights = jnp.where(known, weights, 0)
    return Routing(*(checkpoint_name(array, "triax_routing") for array in (weights, experts)))


def _scaled(weights: jax.Array, expert_scale: jax.Array, experts: jax.Array) -> jax.Array:
    """Multiplies weights by their experts' scales, whose gradient is summed in a fixed order."""
    expert_scale = explicit.gathered(expert_scale)
    every = jnp.arange(expert_scale.shape[0], dtype=jnp.int32)[None, None, :]
    of_all = expert_scale.astype(jnp.float32)[None, None, :]
    return weights * jnp.sum(jnp.where(experts[:, :, None] == every, of_all, 0), axis=2)
