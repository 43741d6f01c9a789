"""TransformerEngine's router under its names: dense probabilities and masks, made of `route`."""

from __future__ import annotations

import enum
from typing import Any

import jax
import jax.numpy as jnp

from triax.errors import ArgumentValueError
from triax.messages import short
from triax.moe.router import ops, router
from triax.moe.router.configs import RouterSpec
from triax.moe.router.reference import normalized_scores
from triax.moe.shared import arguments
from triax.moe.shared import implementation as implementations
from triax.moe.shared.arguments import Array
from triax.moe.shared.arrays import at_least_float32
from triax.moe.shared.implementation import Implementation
from triax.sharding import explicit


class ScoreFunction(enum.IntEnum):
    """The function that turns logits into scores."""

    SIGMOID = 0
    SOFTMAX = 1
    SQRTSOFTPLUS = 2


class RoutingMapFormat(enum.IntEnum):
    """A routing map's type: BYTEMAP, bool [tokens, experts]; BITMAP_U8, eight experts per byte."""

    BYTEMAP = 0
    BITMAP_U8 = 1


def fused_topk_with_score_function(
    logits: Array,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int = -1,
    group_topk: int = -1,
    scaling_factor: float = 1.0,
    score_function: str | ScoreFunction = ScoreFunction.SOFTMAX,
    expert_bias: Array | None = None,
    compute_aux_scores: bool = False,
    routing_map_format: str | int | RoutingMapFormat = RoutingMapFormat.BYTEMAP,
    *,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Chooses each token's experts: their probabilities, zeros elsewhere, and a mask.

        probs, routing_map = fused_topk_with_score_function(logits, topk=8)

    `triax.moe.route` returns the choice as [tokens, top_k], which `make_plan` and `unpermute` take.
    Softmax weights sum to `scaling_factor` unless `use_pre_softmax`; other weights do if `topk` is
    more than 1.

    With groups, each token chooses from its `group_topk` best groups. A group's score is the sum of
    its ``topk // group_topk`` best scores, or best logits if the softmax comes after the choice.

    Args:
      logits: float [tokens, experts].
      topk: experts per token.
      use_pre_softmax: whether the softmax is over all experts, or only over the chosen ones.
      num_groups, group_topk: how many groups there are, and how many a token chooses from; no
        groups unless both are positive.
      scaling_factor: the factor of all probabilities.
      score_function: "softmax", "sigmoid", "sqrtsoftplus", or a `ScoreFunction`.
      expert_bias: float [experts], affects only the choice; with "sigmoid" or "sqrtsoftplus".
      compute_aux_scores: whether to return the inputs of the auxiliary loss instead: the float32
        scores of all experts, which sum to 1 for each token, and the mask of the `topk` best.
      routing_map_format: "bytemap", "bitmap_u8", or a `RoutingMapFormat`.

    Returns:
      probs: [tokens, experts] in the dtype of `logits`.
      routing_map: bool [tokens, experts], or uint8 [tokens, ceil(experts / 8)] with the first
        expert in the lowest bit.
    """
    logits = explicit.gathered(router.check_logits(logits))
    num_experts = logits.shape[1]
    implementations.check(implementation, logits=logits)
    function = _as_enum("score_function", score_function, ScoreFunction)
    map_format = _as_enum("routing_map_format", routing_map_format, RoutingMapFormat)
    score = function.name.lower()
    if compute_aux_scores:
        topk = router.check_top_k("topk", topk, num_experts)
        experts = ops.choose(logits, None, RouterSpec(topk), implementation).experts
        scores = normalized_scores(logits.astype(jnp.float32), score)
        return scores, _routing_map(experts, num_experts, map_format)
    if expert_bias is not None:
        if function is ScoreFunction.SOFTMAX:
            raise ArgumentValueError(
                "Argument `expert_bias` needs score_function='sigmoid' or 'sqrtsoftplus'; got "
                f"{score!r}. `triax.moe.route` takes a bias with every score function."
            )
        expert_bias = router.check_of_experts("expert_bias", expert_bias, num_experts)
    grouped = num_groups > 0 and group_topk > 0
    if grouped:
        num_groups, group_topk = router.check_groups(
            num_groups, group_topk, num_experts, names=("num_groups", "group_topk")
        )
    else:
        num_groups = group_topk = 1
    most = num_experts // num_groups * group_topk
    topk = router.check_top_k("topk", topk, most, grouped=num_groups > 1)
    group_best = topk // group_topk
    if num_groups > 1 and not group_best:
        raise ArgumentValueError(
            f"Argument `topk` must be at least `group_topk`, {group_topk}, because a group's score "
            f"is the sum of its topk // group_topk best scores; got {topk}."
        )
    softmax = function is ScoreFunction.SOFTMAX
    spec = RouterSpec(
        top_k=topk,
        score=score,
        normalize=not use_pre_softmax if softmax else topk > 1,
        scale=router.check_scale("scaling_factor", scaling_factor),
        num_groups=num_groups,
        top_groups=group_topk,
        group_best=group_best,
        group_by_logits=softmax and not use_pre_softmax,
    )
    weights, experts = ops.choose(logits, expert_bias, spec, implementation)
    token = jnp.arange(logits.shape[0])[:, None]
    probs = (
        jnp.zeros_like(logits)
        .at[token, experts]
        .set(weights.astype(logits.dtype), unique_indices=True)
    )
    return probs, _routing_map(experts, num_experts, map_format)


def fused_moe_aux_loss(
    probs: Array, tokens_per_expert: Array, topk: int, coeff: float
) -> jax.Array:
    """Computes the load-balancing loss from scores and the number of tokens of each expert.

    ``experts * coeff / (topk * tokens**2) * sum(sum(probs, axis=0) * tokens_per_expert)``: `coeff`
    times `triax.moe.load_balancing_loss`.

    Args:
      probs: float [tokens, experts], from `compute_aux_scores`.
      tokens_per_expert: integer [experts].
      topk: experts per token.
      coeff: the factor of the loss.

    Returns:
      [] in the dtype of `probs`; 0 without tokens.
    """
    probs = arguments.array("probs", probs, ("tokens", "experts"), jnp.floating)
    num_tokens, num_experts = probs.shape
    sizes: dict[str, Any] = {"sizes": {"experts": num_experts}, "of": "`probs`"}
    name, dtype_class = "tokens_per_expert", jnp.integer
    counts = arguments.array(name, tokens_per_expert, ("experts",), dtype_class, **sizes)
    probs, counts = explicit.gathered(probs, 0), explicit.gathered(counts)
    topk = arguments.integer("topk", topk, 1)
    coeff = router.check_scale("coeff", coeff)
    wider = at_least_float32(probs.dtype)
    mean = jnp.sum(probs, axis=0, dtype=wider) / max(num_tokens, 1)
    share = counts.astype(wider) / max(num_tokens * topk, 1)
    return (num_experts * coeff * jnp.sum(mean * share)).astype(probs.dtype)


def _routing_map(experts: jax.Array, num_experts: int, map_format: RoutingMapFormat) -> jax.Array:
    token = jnp.arange(experts.shape[0])[:, None]
    mask = jnp.zeros((experts.shape[0], num_experts), jnp.bool_).at[token, experts].set(True)
    if map_format is RoutingMapFormat.BITMAP_U8:
        return jnp.packbits(mask, axis=1, bitorder="little")
    return mask


def _as_enum(name: str, value: Any, enum_: type[Any]) -> Any:
    """Returns a member of `enum_` from the member itself, its name in any case, or its number."""
    try:
        return enum_[value.upper()] if isinstance(value, str) else enum_(value)
    except (KeyError, ValueError):
        names = ", ".join(repr(member.name.lower()) for member in enum_)
        raise ArgumentValueError(
            f"Argument `{name}` must be one of {names}, or a {enum_.__name__}; got {short(value)}."
        ) from None
