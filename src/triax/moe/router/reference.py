"""The router in plain JAX: the path for every platform without Triton.

It chooses as the kernels do if the scores are the same. Scores computed for a bias or for groups
may differ in their last bit, and so may the choice between two scores that are this close.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from triax.moe.router.configs import RouterSpec

_FLAT = -17  # below it softplus is exp in float32


class Routing(NamedTuple):
    """Each token's experts and their weights: what `route` returns, and `feed_forward` takes.

    Attributes:
      weights: float [tokens, top_k], what each chosen expert's output is multiplied by. Those of
        `route` are float32.
      experts: integer [tokens, top_k], the chosen experts. Those of `route` are int32, best first
        and never one twice. A layer takes ids out of range as "not routed".
    """

    weights: jax.Array
    experts: jax.Array


def route_reference(logits: jax.Array, bias: jax.Array | None, *, spec: RouterSpec) -> Routing:
    """The weights and experts of each token, best first."""
    experts = choose_reference(logits, bias, spec)
    return Routing(weigh_reference(logits, experts, spec), experts)


def choose_reference(logits: jax.Array, bias: jax.Array | None, spec: RouterSpec) -> jax.Array:
    """Returns the experts of each token, int32 [tokens, top_k], best first."""
    logits = logits.astype(jnp.float32)
    by_score = choice = logits
    if bias is not None or not spec.group_by_logits:
        by_score = _choosable(_SCORES[spec.score](logits, logits))
    if bias is not None:
        by_score = choice = _choosable(by_score + bias.astype(jnp.float32)[None, :])
    if spec.num_groups > 1:
        # Integers of the same order let excluded experts rank below all others, even -inf.
        kept = _kept_groups(by_score, spec)
        choice = jnp.where(kept, _order(choice), jnp.iinfo(jnp.int32).min)
    return jax.lax.top_k(choice, spec.top_k)[1].astype(jnp.int32)


def weigh_reference(logits: jax.Array, experts: jax.Array, spec: RouterSpec) -> jax.Array:
    """Returns the float32 weights [tokens, top_k] of experts; differentiable in the logits."""
    logits = logits.astype(jnp.float32)
    return weigh_taken(jnp.take_along_axis(logits, experts, axis=1), logits, spec)


def weigh_taken(taken: jax.Array, logits: jax.Array, spec: RouterSpec) -> jax.Array:
    """Returns the float32 weights of the chosen logits `taken` among all `logits`."""
    logits = logits.astype(jnp.float32)
    if spec.normalize:
        weights = normalized_scores(taken, spec.score)
    else:
        weights = _SCORES[spec.score](taken, logits)
    return weights * jnp.float32(spec.scale)


def normalized_scores(logits: jax.Array, score: str) -> jax.Array:
    """Returns scores divided by each token's sum: the softmax of the scores' logarithms."""
    if score == "none":
        logits = _given(logits)
        total = jnp.sum(logits, axis=-1, keepdims=True)
        return logits / jnp.where(total == 0, 1, total)
    logs = _LOGARITHMS[score](logits)
    return _shares(logs, logs)


def of_norm_one(weights: jax.Array, order: float) -> jax.Array:
    """Divides nonnegative weights by each token's p-norm; zeros where all weights are zero."""
    # The greatest weight is divided out first, so that powers are of numbers from 0 to 1.
    most = jax.lax.stop_gradient(jnp.max(weights, axis=1, keepdims=True))
    weights = weights / jnp.where(most == 0, 1, most)
    nothing = weights == 0  # the power may have an infinite second derivative there
    powers = jnp.where(nothing, 0, jnp.where(nothing, 1, weights) ** order)
    total = jnp.sum(powers, axis=1, keepdims=True)
    return weights / jnp.where(most == 0, 1, total) ** (1 / order)


def _sigmoid(logits: jax.Array) -> jax.Array:
    """Computes the sigmoid with a right gradient near 1, where `jax.nn.sigmoid` has zero."""
    above = logits >= 0
    small = jnp.exp(jnp.where(above, -logits, logits))
    return jnp.where(above, 1, small) / (1 + small)


def _log_sqrtsoftplus(logits: jax.Array) -> jax.Array:
    """Returns log(sqrt(log(1 + exp(logits)))), which far below zero is half the logit."""
    flat = logits < _FLAT
    return jnp.where(flat, logits, jnp.log(jax.nn.softplus(jnp.where(flat, 0, logits)))) / 2


def _given(scores: jax.Array) -> jax.Array:
    """Returns logits as the scores, with zeros for padding, which is -inf."""
    return jnp.where(scores == -jnp.inf, 0, scores)


def _shares(part: jax.Array, whole: jax.Array) -> jax.Array:
    """Returns exp(part) divided by each token's sum of exp(whole); zeros if `whole` is all -inf."""
    most = jax.lax.stop_gradient(jnp.max(whole, axis=-1, keepdims=True))
    most = jnp.where(most == -jnp.inf, 0, most)
    total = jnp.sum(jnp.exp(whole - most), axis=-1, keepdims=True)
    return jnp.exp(part - most) / jnp.where(total == 0, 1, total)


# By score: functions of the chosen logits and of all logits that return scores; and functions that
# return the scores' logarithms, give or take a number that is the same for all of a token's logits.
_SCORES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "softmax": _shares,
    "sigmoid": lambda logits, _: _sigmoid(logits),
    "sqrtsoftplus": lambda logits, _: jnp.exp(_log_sqrtsoftplus(logits)),
    "none": lambda logits, _: _given(logits),
}
_LOGARITHMS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "softmax": lambda logits: logits,
    "sigmoid": jax.nn.log_sigmoid,
    "sqrtsoftplus": _log_sqrtsoftplus,
}


def route_grad_reference(
    logits: jax.Array, experts: jax.Array, gradient: jax.Array, *, spec: RouterSpec
) -> jax.Array:
    """Returns the gradient of the logits from the weights' gradient."""
    (d_logits,) = jax.vjp(lambda logits: weigh_reference(logits, experts, spec), logits)[1](
        gradient
    )
    return d_logits


def _kept_groups(scores: jax.Array, spec: RouterSpec) -> jax.Array:
    """Whether each expert is in a group that may be chosen from, [tokens, experts]."""
    num_tokens, num_experts = scores.shape
    group_size = num_experts // spec.num_groups
    grouped = scores.reshape(num_tokens, spec.num_groups, group_size)
    group_scores = jnp.sum(jax.lax.top_k(grouped, spec.group_best)[0], axis=2)
    groups = jax.lax.top_k(_choosable(group_scores), spec.top_groups)[1]
    every = jnp.arange(spec.num_groups, dtype=jnp.int32)[None, None, :]
    kept = jnp.any(groups[:, :, None] == every, axis=1)
    return jnp.repeat(kept, group_size, axis=1)


def _order(values: jax.Array) -> jax.Array:
    """Maps float32 to int32 that compare as in `jax.lax.top_k`, all above the smallest int32."""
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    order = jnp.where(bits < 0, bits ^ jnp.iinfo(jnp.int32).max, bits)
    return jnp.maximum(order, jnp.iinfo(jnp.int32).min + 1)


def _choosable(values: jax.Array) -> jax.Array:
    """Makes all NaNs in computed scores positive, so that they rank as the greatest."""
    return jnp.where(jnp.isnan(values), jnp.nan, values)
