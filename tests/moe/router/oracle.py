"""The router in NumPy, float64, token by token: what every path is compared with."""

from __future__ import annotations

import numpy as np


def order_of(values):
    """What sorts a row as `jax.lax.top_k` does: the bits of float32 as integers of their order."""
    bits = np.asarray(values, np.float32).view(np.int32).astype(np.int64)
    return np.where(bits < 0, np.int64(-(2**31)) - 1 - bits, bits)


def scores_of(logits, score):
    if score == "none":
        return logits
    if score == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    if score == "sqrtsoftplus":
        return np.sqrt(np.logaddexp(0, logits))
    parts = np.exp(logits - logits.max(1, keepdims=True))
    return parts / parts.sum(1, keepdims=True)


def best(order, count):
    """The first `count` of a row, greatest first, the lowest index among equals."""
    return np.lexsort((np.arange(len(order)), -order))[:count]


def choose(logits, top_k, score, bias=None, num_groups=1, top_groups=1, group_best=2):
    """Experts [tokens, top_k], and what they were chosen by [tokens, experts]."""
    logits = np.asarray(logits, np.float32)
    by = scores_of(logits.astype(np.float64), score) + (0 if bias is None else np.float64(bias))
    experts = []
    for token, row in enumerate(logits):
        order = order_of(row if bias is None else by[token])
        if num_groups > 1:
            groups = by[token].reshape(num_groups, -1)
            sums = np.sort(groups, 1)[:, -group_best:].sum(1)
            kept = np.zeros(num_groups, bool)
            kept[best(order_of(sums), top_groups)] = True
            order = np.where(np.repeat(kept, groups.shape[1]), order, -(2**40))
        experts.append(best(order, top_k))
    return np.array(experts).reshape(-1, top_k), by


def weigh(logits, experts, score, normalize, scale):
    """Weights [tokens, top_k], float64."""
    scores = scores_of(np.asarray(logits, np.float64), score)
    weights = np.take_along_axis(scores, experts, 1)
    if normalize:  # True, or the p of a norm
        weights = weights / weights.max(1, keepdims=True)
        weights = weights / (weights**normalize).sum(1, keepdims=True) ** (1 / normalize)
    return weights * scale


def gradient(logits, experts, d_weights, score, normalize, scale):
    """The gradient of the logits: the Jacobian of scores and normalisation, multiplied out."""
    logits, g = np.asarray(logits, np.float64), np.asarray(d_weights, np.float64) * scale
    scores = scores_of(logits, score)
    taken = np.take_along_axis(scores, experts, 1)
    if normalize:
        most = taken.max(1, keepdims=True)
        taken, g = taken / most, g / most
        total = (taken**normalize).sum(1, keepdims=True)
        slope = taken ** (normalize - 1.0) / total
        g = (g - slope * (g * taken).sum(1, keepdims=True)) / total ** (1 / normalize)
    d_scores = np.zeros_like(scores)
    np.put_along_axis(d_scores, experts, g, 1)
    slopes = {
        "none": 1,
        "sigmoid": scores * (1 - scores),
        "sqrtsoftplus": 1 / (1 + np.exp(-logits)) / (2 * scores),
    }
    if score in slopes:
        return d_scores * slopes[score]
    return scores * (d_scores - (d_scores * scores).sum(1, keepdims=True))
