"""`route`: checks its arguments and calls the op."""

from __future__ import annotations

import jax.numpy as jnp

from triax.moe.router import ops
from triax.moe.router.reference import Routing
from triax.moe.router.router import Router, check_logits, check_of_experts, spec_of
from triax.moe.shared import arguments
from triax.moe.shared import implementation as implementations
from triax.moe.shared.arguments import Array
from triax.moe.shared.implementation import Implementation
from triax.moe.shared.moved import refuses_moved_keywords


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
    bias = check_of_experts("bias", bias, num_experts)
    expert_scale = check_of_experts("expert_scale", expert_scale, num_experts)
    if experts is not None:
        sizes = {"tokens": logits.shape[0], "top_k": spec.top_k}
        of = "`logits` and `router.top_k`"
        experts = arguments.array(
            "experts", experts, ("tokens", "top_k"), jnp.integer, sizes=sizes, of=of
        )
        experts = arguments.as_int32(experts)
    implementations.check(implementation, logits=logits, bias=bias)
    return ops.choose_and_scale(
        *(logits, bias, router, spec),
        expert_scale=expert_scale,
        experts=experts,
        implementation=implementation,
    )
