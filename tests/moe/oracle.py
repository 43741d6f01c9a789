"""MoE routing by its definitions, in NumPy and in words: the judge of every path.

Written from what the ops promise, pair by pair, and not from how they do it. Sums are in
float64. `draw_ids` and `draw_values` give inputs that are hard on them.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import ml_dtypes
import numpy as np

from triax import moe
from triax.testing import assert_close

WILD_IDS = (-(2**31), -1, 2**31 - 1)


def plan(ids, num_experts, num_rows, capacity=None, align_size=1):
    """The fields of a Plan, from ids [tokens, top_k]."""
    num_tokens, top_k = ids.shape
    groups = [[] for _ in range(num_experts)]
    counts = np.zeros(num_experts, np.int32)
    expert_of = np.full((num_tokens, top_k), -1, np.int32)
    for token in range(num_tokens):
        for slot in range(top_k):
            expert = int(ids[token, slot])
            if not 0 <= expert < num_experts:
                continue
            counts[expert] += 1
            expert_of[token, slot] = expert
            if capacity is None or len(groups[expert]) < capacity:
                groups[expert].append((token, slot))
    row_of = np.full((num_tokens, top_k), -1, np.int32)
    sizes, filled = [], []
    start = 0
    for group in groups:
        size = -(-len(group) // align_size) * align_size
        fit = min(max(num_rows - start, 0), size)
        for rank, (token, slot) in enumerate(group):
            if rank < fit:
                row_of[token, slot] = start + rank
        sizes.append(fit)
        filled.append(min(len(group), fit))
        start += size
    return SimpleNamespace(
        row_of=row_of,
        expert_of=expert_of,
        group_sizes=np.array(sizes, np.int32),
        group_counts=counts,
        group_filled=np.array(filled, np.int32),
        num_dropped=np.array(counts.sum() - (row_of >= 0).sum(), np.int32),
    )


def make_plan(ids, num_experts, capacity=None, align_size=1, num_rows=None):
    """What `moe.make_plan` returns, with nothing to compile."""
    if num_rows is None:
        num_rows = (ids.size + num_experts * (align_size - 1)) // align_size * align_size
    fields = plan(ids, num_experts, num_rows, capacity, align_size)
    sizes = {"num_rows": num_rows, "num_experts": num_experts, "align_size": align_size}
    return moe.Plan(**vars(fields), **sizes)


def plan_of_mask(mask, top_k, num_rows, capacity=None, align_size=1):
    """The fields of a Plan, from a mask [tokens, experts]."""
    num_tokens, num_experts = mask.shape
    ids = np.full((num_tokens, top_k), -1, np.int64)
    for token in range(num_tokens):
        experts = np.flatnonzero(mask[token])[:top_k]
        ids[token, : len(experts)] = experts
    expected = plan(ids, num_experts, num_rows, capacity, align_size)
    expected.group_counts = (mask != 0).sum(0).astype(np.int32)
    placed = (expected.row_of >= 0).sum()
    expected.num_dropped = np.array(expected.group_counts.sum() - placed, np.int32)
    return expected


def pairs(row_of):
    """Every (token, slot, row) that there is."""
    for token, slot in np.argwhere(row_of >= 0):
        yield token, slot, row_of[token, slot]


def permute(x, row_of, num_rows):
    """Tokens [tokens, …] copied to their rows, zeros elsewhere."""
    rows = np.zeros((num_rows, *x.shape[1:]), x.dtype)
    for token, _, row in pairs(row_of):
        rows[row] = x[token]
    return rows


def permute_slots(weights, row_of, num_rows):
    """What belongs to a (token, slot) moved to its row, zeros elsewhere."""
    rows = np.zeros(num_rows, weights.dtype)
    for token, slot, row in pairs(row_of):
        rows[row] = weights[token, slot]
    return rows


def gather_slots(row_weights, row_of):
    """What belongs to a row moved back to its (token, slot), zeros elsewhere."""
    weights = np.zeros(row_of.shape, row_weights.dtype)
    for token, slot, row in pairs(row_of):
        weights[token, slot] = row_weights[row]
    return weights


@np.errstate(all="ignore")
def unpermute(rows, row_of, weights=None):
    """Each token's weighted sum, float64."""
    sums = np.zeros((row_of.shape[0], rows.shape[1]))
    for token, slot, row in pairs(row_of):
        weight = 1.0 if weights is None else np.float64(weights[token, slot])
        sums[token] += weight * rows[row].astype(np.float64)
    return sums


@np.errstate(all="ignore")
def unpermute_gradients(rows, row_of, weights, gradient):
    """The gradients of rows and weights, float64."""
    d_rows = np.zeros(rows.shape)
    d_weights = np.zeros(row_of.shape)
    for token, slot, row in pairs(row_of):
        g = gradient[token].astype(np.float64)
        d_rows[row] = np.float64(weights[token, slot]) * g
        d_weights[token, slot] = np.dot(rows[row].astype(np.float64), g)
    return d_rows, d_weights


ROUTINGS = ("any", "distinct", "one", "skewed", "wild", "none")


def draw_ids(rng, num_tokens, top_k, num_experts, routing, dtype=np.int32):
    """Expert ids: any, distinct in a token, all the same, half to one, out of range, unrouted."""
    shape = (num_tokens, top_k)
    ids = rng.integers(0, num_experts, shape)
    if routing == "distinct":
        experts = np.tile(np.arange(max(num_experts, top_k)), (num_tokens, 1))
        ids = rng.permuted(experts, axis=1)[:, :top_k]
    elif routing == "one":
        ids[...] = rng.integers(0, num_experts)
    elif routing == "skewed":
        ids[rng.random(shape) < 0.5] = num_experts // 2
    elif routing == "wild":
        wild = rng.choice([*WILD_IDS, num_experts, num_experts + 1], shape)
        ids = np.where(rng.random(shape) < 0.4, wild, ids)
    elif routing == "none":
        ids[...] = -1
    return ids.astype(dtype)


def draw_values(rng, shape, dtype=np.float32, hostile=False):
    """Ordinary numbers; where hostile, also zeros, NaNs and infinities."""
    values = rng.standard_normal(shape).astype(np.float32)
    if hostile:
        special = np.array([0.0, -0.0, np.nan, np.inf, -np.inf], np.float32)
        where = rng.random(shape) < 0.1
        values[where] = rng.choice(special, int(where.sum()))
    return values.astype(dtype)


def random_bits(rng, shape, dtype):
    """Every bit pattern of a dtype, NaNs with payloads included."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    data = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    return data.view(dtype).reshape(shape)


def assert_rounded_once(actual, expected, *, terms=1, size=0.0, err_msg=""):
    """`assert_close`, and every element is the nearest of its dtype to a sum in float32 or wider.

    That is more than the former sees in small dtypes, such as a sum that was rounded before it was
    scaled. `size` is that of the largest term, where it is more than the largest sum.
    """
    assert_close(actual, expected, terms=terms, err_msg=err_msg)
    got, want = (np.asarray(array).astype(np.float64) for array in (actual, expected))
    finite = np.isfinite(got) & np.isfinite(want)
    got, want = got[finite], want[finite]
    kind = ml_dtypes.finfo(actual.dtype)
    power = np.floor(np.log2(np.maximum(np.abs(want), float(kind.smallest_normal))))
    nearest = float(kind.eps) * 2.0**power / 2
    summed = 2e-6 * math.sqrt(terms) * max(size, np.max(np.abs(want), initial=0))
    worst = np.max(np.abs(got - want) - nearest - summed, initial=0)
    assert worst <= 0, (
        f"{err_msg} {worst:.3g} further away than rounding to {actual.dtype} takes it"
    )
