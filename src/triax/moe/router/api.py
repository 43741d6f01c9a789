"""`route`: checks its arguments and calls the op."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from triax.errors import ArgumentValueError
from triax.moe.router import ops, reference
from triax.moe.router.configs import MAX_EXPERTS, RouterSpec
from triax.moe.router.reference import Routing
from triax.moe.router.router import Router, spec_of
from triax.moe.shared import arguments
from triax.moe.shared import implementation as implementations
from triax.moe.shared.arguments import Array
from triax.moe.shared.implementation import Implementation
from triax.moe.shared.moved import refuses_moved_keywords
from triax.sharding import explicit


@refuses_moved_keywords
def route(
    logits: Array,
    router: Router,
    *,
    bias: Array | None = None,
    expert_scale: Array | None = None,
    experts: Array | None = None,
    implementation: Implementation | None = None,
) -> Routing:
    """Chooses each token's experts and their weights, best first.

        router = moe.Router(8, normalize=True)
        weights, experts = moe.route(x @ w_router, router)  # [tokens, 8] each
        plan = moe.make_plan(experts, num_experts)

    `Router` says how scores, choices and weights are computed. Experts are chosen by their scores,
    or by ``score + bias``: a bias affects the choice but not the weights. Ties go to the lowest
    expert number, as in `jax.lax.top_k`. Without a bias the logits are compared, so that rounding
    does not make two scores equal.

    Everything is computed in float32. The weights have a gradient to the logits, the same bits in
    every run; the choice has none, and the gradient of `bias` is zero. A NaN is the greatest logit
    (with the sign bit the least, as in `jax.lax.top_k`); weights that depend on a NaN are NaN,
    and other tokens are not affected. A token whose logits are all -inf has weights of zero, and no
    gradient.

    Under `jax.checkpoint` both results carry the name "triax_routing", the weights before they are
    divided by a p-norm or multiplied by `expert_scale`.

    Args:
      logits: float [tokens, experts].
      router: how experts are chosen and weighted.
      bias: float [experts], or None.
      expert_scale: float [experts], what the weights of each expert are multiplied by (Gemma 4).
      experts: integer [tokens, top_k], chosen already (by a hash, say): only weights are computed,
        in plain JAX. An id outside the experts has a weight of zero.
      implementation: None picks by the program's platform: a Triton kernel on CUDA, plain JAX
        elsewhere and for more than 1,024 experts. "triton", "interpret" (the kernel, interpreted on
        the CPU) and "xla" insist.

    Returns:
      `Routing`: weights float32 [tokens, top_k] and experts int32 [tokens, top_k].

    Raises:
      ArgumentTypeError: an argument has the wrong type.
      ArgumentValueError: an argument has the wrong shape, or `router` chooses more experts than
        there are, or its groups do not divide them.
    """
    logits = check_logits(logits)
    num_experts = logits.shape[1]
    spec = spec_of(router, num_experts)
    if bias is not None:
        bias = check_bias("bias", bias, num_experts)
    if experts is None:
        routed = route_by_spec(logits, bias, spec, implementation)
    else:
        implementations.resolve(implementation, logits=logits)
        sizes = {"tokens": logits.shape[0], "top_k": spec.top_k}
        of = "`logits` and `router.top_k`"
        experts = arguments.array(
            "experts", experts, ("tokens", "top_k"), jnp.integer, sizes=sizes, of=of
        )
        routed = _weigh(logits, arguments.as_int32(experts), spec)
    if router.normalize > 1:
        # Of scores that are normalised already, none of which can be too small for a power.
        weights = reference.of_norm_one(routed.weights, router.normalize)
        weights *= jnp.float32(router.scale)
        routed = routed._replace(weights=weights)
    if expert_scale is None:
        return routed
    expert_scale = check_bias("expert_scale", expert_scale, num_experts)
    return routed._replace(weights=_scaled(routed.weights, expert_scale, routed.experts))


def _weigh(logits: jax.Array, experts: jax.Array, spec: RouterSpec) -> Routing:
    """The weights of experts that are given; zero for those that there are not."""
    logits, experts = explicit.gathered(logits), explicit.gathered(experts)
    known = (experts >= 0) & (experts < logits.shape[1])
    # An id outside the experts gets a score of zero, which affects no sum and no gradient.
    rows = jnp.arange(experts.shape[0])[:, None]
    taken = logits.astype(jnp.float32)[rows, jnp.where(known, experts, 0)]
    nothing = 0 if spec.score == "none" else -jnp.inf
    weights = reference.weigh_taken(jnp.where(known, taken, nothing), logits, spec)
    weights = jnp.where(known, weights, 0)
    return Routing(*(checkpoint_name(array, "triax_routing") for array in (weights, experts)))


def _scaled(weights: jax.Array, expert_scale: jax.Array, experts: jax.Array) -> jax.Array:
    """Multiplies weights by their experts' scales, whose gradient is summed in a fixed order."""
    expert_scale = explicit.gathered(expert_scale)
    every = jnp.arange(expert_scale.shape[0], dtype=jnp.int32)[None, None, :]
    of_all = expert_scale.astype(jnp.float32)[None, None, :]
    return weights * jnp.sum(jnp.where(experts[:, :, None] == every, of_all, 0), axis=2)


def route_by_spec(
    logits: jax.Array, bias: jax.Array | None, spec: RouterSpec, implementation: str | None
) -> Routing:
    """`route` with checked arguments, except `implementation`."""
    num_tokens, num_experts = logits.shape
    implementation = implementations.resolve(implementation, logits=logits, bias=bias)
    if num_experts > MAX_EXPERTS:
        if implementation not in (None, "xla"):
            raise ArgumentValueError(
                f"Argument `logits` must have at most {MAX_EXPERTS} experts for the kernel; got "
                f'{num_experts}. Use implementation="xla".'
            )
        implementation = "xla"
    if num_tokens == 0:
        implementation = "xla"
    routed = ops.route(logits, bias, spec=spec, implementation=implementation)
    return Routing(*(checkpoint_name(array, "triax_routing") for array in routed))


def check_logits(logits: Any, batched: bool = False) -> jax.Array:
    """Returns float logits [tokens, experts] with at least one expert.

    If `batched` they may have more leading dimensions.
    """
    axes = *["batch"] * (batched * (getattr(logits, "ndim", 0) - 2)), "tokens", "experts"
    logits = arguments.array("logits", logits, axes, jnp.floating)
    if logits.shape[-1] == 0:
        raise ArgumentValueError(
            f"Argument `logits` must have at least one expert; got shape {logits.shape}."
        )
    return logits


def check_bias(name: str, bias: Any, num_experts: int) -> jax.Array:
    """Returns a float bias [experts]."""
    sizes = {"experts": num_experts}
    return arguments.array(name, bias, ("experts",), jnp.floating, sizes=sizes, of="`logits`")
