"""The op of route. Only the weights have a derivative; the choice has none."""

from __future__ import annotations

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from triax.moe.router import launchers, reference
from triax.moe.router.reference import Routing
from triax.moe.shared.ops import Call, Op
from triax.sharding import linear


def _derivative(call: Call, primals: Any, tangents: Any, routed: Routing) -> Any:
    if tangents[0] is None:
        return Routing(None, None)  # type: ignore[arg-type]

    def along(residuals: Any, tangents: dict[str, jax.Array]) -> jax.Array:
        logits, experts = residuals
        weigh = lambda logits: reference.weigh_reference(logits, experts, **call.options)
        return jax.jvp(weigh, [logits], [tangents["logits"]])[1]

    def back(residuals: Any, gradient: jax.Array) -> dict[str, jax.Array]:
        return {"logits": call.like(route_grad)(*residuals, gradient)}

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
