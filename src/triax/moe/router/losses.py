"""The router's losses, in plain JAX: a mean over tokens that XLA fuses with the scores."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from triax.moe.router.reference import normalized_scores
from triax.moe.router.router import SCORES, Score, check_logits
from triax.moe.shared import arguments
from triax.moe.shared.arguments import Array
from triax.moe.shared.arrays import at_least_float32
from triax.sharding import explicit


def load_balancing_loss(
    logits: Array, group_counts: Array, *, score: Score = "softmax"
) -> jax.Array:
    """Measures how unevenly experts are used: 1 if all get the same share, more if they do not.

        plan = moe.make_plan(experts, num_experts)
        loss = task_loss + 0.01 * moe.load_balancing_loss(logits, plan.group_counts)

    ``experts * sum over e of share[e] * mean[e]``: the share of all (token, choice) pairs that went
    to expert e, and its mean score over the tokens. A token's scores sum to 1: the softmax, or
    other scores divided by their sum; or they are zeros if all logits are -inf. Only the scores
    have a gradient.

    Equations 4 to 6 of "Switch Transformers" (arXiv:2101.03961), for any number of choices; with
    "sigmoid", equations 17 to 20 of "DeepSeek-V3 Technical Report" (arXiv:2412.19437) for the given
    tokens, without the factor alpha. Mixtral in Hugging Face's `transformers` counts pairs per
    token, so its loss is `top_k` times this one.

    If tokens are spread over devices, the mean of the devices' losses is not the loss of all
    tokens: pass the `jax.lax.psum` of the counts, and average the results with `jax.lax.pmean`.
    The z-loss is `router_z_loss`.

    Args:
      logits: float [..., tokens, experts]; leading dimensions are of tokens, too.
      group_counts: integer [experts], the pairs routed to each expert: `Plan.group_counts`.
      score: as in `route`: "softmax", "sigmoid", "sqrtsoftplus", or "none" for scores that were
        computed before. All but the softmax are divided by a token's sum.

    Returns:
      float32 [], or float64 for float64 logits; 0 without tokens.

    Raises:
      ArgumentTypeError: an argument is not an array, or of the wrong dtype.
      ArgumentValueError: an argument has the wrong shape, or `score` is unknown.
    """
    logits = check_logits(logits, batched=True)
    *tokens, num_experts = logits.shape
    axes, sizes = ("experts",), {"experts": num_experts}
    counts = arguments.array(
        "group_counts", group_counts, axes, jnp.integer, sizes=sizes, of="`logits`"
    )
    arguments.check_choice("score", score, SCORES)
    scores = normalized_scores(_whole_tokens(logits), score)
    counts = explicit.gathered(counts).astype(scores.dtype)
    share = counts / jnp.maximum(jnp.sum(counts), 1)
    total = jnp.sum(scores, axis=tuple(range(len(tokens))))
    return num_experts * jnp.sum(share * total) / max(math.prod(tokens), 1)


def router_z_loss(logits: Array) -> jax.Array:
    """Measures how large the logits are: the mean over tokens of ``logsumexp(logits) ** 2``.

        loss = task_loss + 1e-3 * moe.router_z_loss(logits)

    Equation 5 of "ST-MoE" (arXiv:2202.08906), which uses the coefficient 1e-3. A token whose logits
    are all -inf counts as a token with a logsumexp of zero.

    Args:
      logits: float [..., tokens, experts]; leading dimensions are of tokens, too.

    Returns:
      float32 [], or float64 for float64 logits; 0 without tokens.

    Raises:
      ArgumentTypeError: `logits` is not an array, or of the wrong dtype.
      ArgumentValueError: `logits` has the wrong shape.
    """
    logits = _whole_tokens(check_logits(logits, batched=True))
    # A row of -inf would give an infinite loss with a gradient of NaN.
    padding = jnp.all(logits == -jnp.inf, axis=-1, keepdims=True)
    size = jax.scipy.special.logsumexp(jnp.where(padding, 0, logits), axis=-1)
    size = jnp.where(padding[..., 0], 0, size)
    return jnp.sum(size * size) / max(size.size, 1)


def _whole_tokens(logits: jax.Array) -> jax.Array:
    """Returns logits of float32 or wider, gathered so that each token's are on one device."""
    logits = explicit.gathered(logits, *range(logits.ndim - 1))
    return logits.astype(at_least_float32(logits.dtype))
