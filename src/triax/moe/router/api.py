"""`route`: checks its arguments and calls the op."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from triax import messages
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe.router import ops, reference
from triax.moe.router.configs import MAX_EXPERTS, RouterSpec
from triax.moe.router.reference import Routed
from triax.moe.shared import arguments
from triax.moe.shared import implementation as implementations
from triax.moe.shared.arguments import Array
from triax.moe.shared.implementation import Implementation
from triax.sharding import explicit

Score = Literal["softmax", "sigmoid", "sqrtsoftplus", "none"]
GroupScore = Literal["top2", "max"]
SCORES: tuple[Score, ...] = get_args(Score)

_LARGEST_NORM = 1e30  # whose inverse float32 holds, too


def route(
    logits: Array,
    top_k: int,
    *,
    score: Score = "softmax",
    bias: Array | None = None,
    num_groups: int | None = None,
    top_groups: int | None = None,
    group_score: GroupScore = "top2",
    normalize: bool | float = False,
    scale: float = 1.0,
    expert_scale: Array | None = None,
    experts: Array | None = None,
    implementation: Implementation | None = None,
) -> Routed:
    """Chooses each token's experts and their weights, best first.

        weights, experts = moe.route(x @ w_router, top_k=8, normalize=True)  # [tokens, 8] each
        plan = moe.make_plan(experts, num_experts)

    A token's scores are the softmax of its logits, or each logit's sigmoid or ``sqrt(softplus)``,
    or the logits themselves ("none"). It goes to the `top_k` experts with the best scores, or with
    the best ``score + bias``: a bias affects the choice but not the weights. Ties go to the lowest
    expert number, as in `jax.lax.top_k`. Without a bias the logits are compared, so that rounding
    does not make two scores equal.

    The weight of a chosen expert is its score times `scale`; with `normalize` the scores are first
    divided by the sum over the chosen. The softmax of only the chosen logits (top-k first, then
    softmax) equals the normalised softmax of all: ``normalize=True`` gives both. With a number p
    scores are divided by their p-norm instead, ``sum(score**p)**(1/p)`` over the chosen (DBRX; its
    default of 1 is the sum).

    With groups, the experts are split into `num_groups` equal groups, and a token chooses only from
    its `top_groups` best. A group's score is the sum of its two best scores, or the best, bias
    included.

    Everything is computed in float32. The weights have a gradient to the logits, the same bits in
    every run; the choice has none, and the gradient of `bias` is zero. A NaN is the greatest logit
    (with the sign bit the least, as in `jax.lax.top_k`); weights that depend on a NaN are NaN,
    and other tokens are not affected. A token whose logits are all -inf has weights of zero, and no
    gradient.

    Under `jax.checkpoint` both results carry the name "triax_routing", the weights before they are
    divided by a p-norm or multiplied by `expert_scale`.

    Args:
      logits: float [tokens, experts].
      top_k: experts per token, from 1 to all.
      score: "softmax", "sigmoid", "sqrtsoftplus" (DeepSeek-V4) or "none", for scores that have been
        computed already.
      bias: float [experts], or None.
      num_groups, top_groups: both or neither. Groups must have at least two experts each, and
        `top_groups` of them at least `top_k` together.
      group_score: "top2" (DeepSeek-V3), or "max" (DeepSeek-V2).
      normalize: whether a token's weights sum to `scale`. They do however small the scores are:
        the weights are the softmax of the scores' logarithms. Or the p of a p-norm, a Python number
        of at least 1, if the weights' p-norm is to be `scale`; 1 is True.
      scale: a Python number that the weights are multiplied by.
      expert_scale: float [experts], a factor for the weights of each expert (Gemma 4).
      experts: integer [tokens, top_k], chosen already (by a hash, say): only weights are computed,
        in plain JAX. An id outside the experts has a weight of zero.
      implementation: None picks by the program's platform: a Triton kernel on CUDA, plain JAX
        elsewhere and for more than 1,024 experts. "triton", "interpret" (the kernel, interpreted on
        the CPU) and "xla" insist.

    Returns:
      `Routed`: weights float32 [tokens, top_k] and experts int32 [tokens, top_k].

    Raises:
      ArgumentTypeError: an argument has the wrong type.
      ArgumentValueError: an argument has the wrong shape or is out of range.
    """
    logits = check_logits(logits)
    num_experts = logits.shape[1]
    arguments.check_choice("score", score, SCORES)
    order = _norm_order(normalize, score)
    scale = check_scale("scale", scale)
    num_groups, top_groups = check_groups(num_experts, num_groups, top_groups)
    arguments.check_choice("group_score", group_score, get_args(GroupScore))
    spec = RouterSpec(
        top_k=check_top_k("top_k", top_k, num_experts // num_groups * top_groups, num_groups > 1),
        score=score,
        normalize=order > 0,
        scale=scale if order <= 1 else 1.0,
        num_groups=num_groups,
        top_groups=top_groups,
        group_best=1 if group_score == "max" else 2,
    )
    if bias is not None:
        bias = check_bias("bias", bias, num_experts)
    if experts is None:
        routed = route_by_spec(logits, bias, spec, implementation)
    else:
        implementations.resolve(implementation, logits=logits)
        experts = arguments.array("experts", experts, ("tokens", "top_k"), jnp.integer)
        if experts.shape != (logits.shape[0], spec.top_k):
            raise ArgumentValueError(
                f"Argument `experts` must have shape {(logits.shape[0], spec.top_k)}, [tokens, "
                f"top_k]; got {experts.shape}."
            )
        routed = _weigh(logits, arguments.as_int32(experts), spec)
    if order > 1:
        # Of scores that are normalised already, none of which can be too small for a power.
        weights = reference.of_norm_one(routed.weights, order) * jnp.float32(scale)
        routed = routed._replace(weights=weights)
    if expert_scale is None:
        return routed
    expert_scale = check_bias("expert_scale", expert_scale, num_experts)
    return routed._replace(weights=_scaled(routed.weights, expert_scale, routed.experts))


def _norm_order(normalize: Any, score: Score) -> float:
    """Returns the p of the norm that scores are divided by; 1 is their sum, 0 means no norm."""
    if isinstance(normalize, (bool, np.bool_)):
        return float(normalize)
    if not isinstance(normalize, (int, float, np.integer, np.floating)):
        raise ArgumentTypeError(
            "Argument `normalize` must be a bool, or a Python number, the p of a norm; got "
            f"{messages.shown(normalize)}."
        )
    if not 1 <= normalize <= _LARGEST_NORM:
        raise ArgumentValueError(
            "Argument `normalize` must be a bool, or a finite p of at least 1 (the 1-norm of "
            f"scores is their sum); got {normalize!r}."
        )
    if normalize > 1 and score == "none":
        raise ArgumentValueError(
            f'Argument `normalize` must be a bool with score "none"; got {normalize!r}. Divide the '
            "weights by their norm yourself."
        )
    return float(normalize)


def _weigh(logits: jax.Array, experts: jax.Array, spec: RouterSpec) -> Routed:
    """Computes the weights of given experts; zero for ids outside the experts."""
    logits, experts = explicit.gathered(logits), explicit.gathered(experts)
    known = (experts >= 0) & (experts < logits.shape[1])
    # An id outside the experts gets a score of zero, which affects no sum and no gradient.
    rows = jnp.arange(experts.shape[0])[:, None]
    taken = logits.astype(jnp.float32)[rows, jnp.where(known, experts, 0)]
    nothing = 0 if spec.score == "none" else -jnp.inf
    weights = reference.weigh_taken(jnp.where(known, taken, nothing), logits, spec)
    weights = jnp.where(known, weights, 0)
    return Routed(*(checkpoint_name(array, "triax_routing") for array in (weights, experts)))


def _scaled(weights: jax.Array, expert_scale: jax.Array, experts: jax.Array) -> jax.Array:
    """Multiplies weights by their experts' scales, whose gradient is summed in a fixed order."""
    expert_scale = explicit.gathered(expert_scale)
    every = jnp.arange(expert_scale.shape[0], dtype=jnp.int32)[None, None, :]
    of_all = expert_scale.astype(jnp.float32)[None, None, :]
    return weights * jnp.sum(jnp.where(experts[:, :, None] == every, of_all, 0), axis=2)


def route_by_spec(
    logits: jax.Array, bias: jax.Array | None, spec: RouterSpec, implementation: str | None
) -> Routed:
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
    return Routed(*(checkpoint_name(array, "triax_routing") for array in routed))


def check_logits(logits: Any) -> jax.Array:
    """Returns float logits [tokens, experts] with at least one expert."""
    logits = arguments.array("logits", logits, ("tokens", "experts"), jnp.floating)
    if logits.shape[1] == 0:
        raise ArgumentValueError(
            f"Argument `logits` must have at least one expert; got shape {logits.shape}."
        )
    return logits


def check_bias(name: str, bias: Any, num_experts: int) -> jax.Array:
    """Returns a float bias [experts]."""
    bias = arguments.array(name, bias, ("experts",), jnp.floating)
    arguments.check_length(name, bias, num_experts, "value", "experts of `logits`")
    return bias


def check_groups(
    num_experts: int,
    num_groups: int | None,
    top_groups: int | None,
    names: tuple[str, str] = ("num_groups", "top_groups"),
) -> tuple[int, int]:
    """Returns how many groups there are and how many are chosen from; 1, 1 means no groups."""
    if (num_groups is None) != (top_groups is None):
        given, missing = names[:: 1 if top_groups is None else -1]
        raise ArgumentValueError(
            f"Argument `{given}` is given and `{missing}` is not. Give both, or neither to choose "
            "from all experts."
        )
    if num_groups is None:
        return 1, 1
    num_groups = arguments.integer(names[0], num_groups, 1)
    top_groups = arguments.integer(names[1], top_groups, 1)
    if num_experts % num_groups:
        raise ArgumentValueError(
            f"Argument `{names[0]}` must divide the {num_experts} experts of `logits` into equal "
            f"groups; got {num_groups}."
        )
    if top_groups > num_groups:
        raise ArgumentValueError(
            f"Argument `{names[1]}` must be at most `{names[0]}`, {num_groups}; got {top_groups}."
        )
    if top_groups == num_groups:  # all groups: no limit
        return 1, 1
    if num_experts // num_groups < 2:
        raise ArgumentValueError(
            f"Argument `{names[0]}` must leave each group at least two of the {num_experts} "
            f"experts of `logits`, whose scores make the group's; got {num_groups}."
        )
    return num_groups, top_groups


def check_top_k(name: str, top_k: Any, most: int, grouped: bool = False) -> int:
    """Returns a number of choices from 1 to `most`."""
    top_k = arguments.integer(name, top_k, 1)
    if top_k > most:
        there_are = f"{most} experts of the chosen groups" if grouped else f"{most} experts"
        raise ArgumentValueError(
            f"Argument `{name}` must be at most the {there_are} of `logits`; got {top_k}."
        )
    return top_k


def check_scale(name: str, scale: Any) -> float:
    """Returns a finite Python number."""
    number = isinstance(scale, (int, float, np.integer, np.floating))
    if not number or isinstance(scale, (bool, np.bool_)):
        raise ArgumentTypeError(
            f"Argument `{name}` must be a Python number; got "
            f"{messages.shown(scale)}. Multiply the weights by an array yourself."
        )
    if not math.isfinite(scale):
        raise ArgumentValueError(f"Argument `{name}` must be finite; got {scale!r}.")
    return float(scale)
