"""Draws what the ops read: values, experts, weights, chunks, and the plan they make.

Inputs are dicts of

    x, gradient        [tokens, hidden], tokens and the gradient of tokens
    rows               [tokens * top_k, hidden], rows or the gradient of rows
    weights            float32 [tokens, top_k], each token's sum up to 1
    selected_experts   int32 [tokens, top_k]
    plan               the `triax.moe.Plan` of `selected_experts`
    split_sizes, sorted_indices   int32 [chunks]
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from triax import moe

if TYPE_CHECKING:
    from triax.bench.cases import Case

Inputs = dict[str, Any]


def plan_by_definition(selected_experts: np.ndarray, num_experts: int) -> moe.Plan:
    """The plan of experts that are all in range, by NumPy's stable sort: rows in its order."""
    flat = selected_experts.reshape(-1)
    order = np.argsort(flat, kind="stable")
    row_of = np.empty(flat.size, np.int32)
    row_of[order] = np.arange(flat.size, dtype=np.int32)
    counts = jnp.asarray(np.bincount(flat, minlength=num_experts).astype(np.int32))
    return moe.Plan(
        row_of=jnp.asarray(row_of.reshape(selected_experts.shape)),
        expert_of=jnp.asarray(selected_experts),
        group_sizes=counts,
        group_counts=counts,
        group_filled=counts,
        num_dropped=jnp.zeros((), jnp.int32),
        num_rows=flat.size,
        num_experts=num_experts,
        align_size=1,
    )


def source_rows(split_sizes: Any, sorted_indices: Any) -> np.ndarray:
    """The row that each row of a chunk sort is read from, int32 [tokens], by NumPy."""
    sizes, indices = np.asarray(split_sizes), np.asarray(sorted_indices)
    ends = np.cumsum(sizes)
    parts = [np.arange(ends[index] - sizes[index], ends[index]) for index in indices]
    return np.concatenate(parts).astype(np.int32)


def _draw_experts(case: Case, seed: int) -> np.ndarray:
    rng = np.random.default_rng([seed, case.tokens, case.experts, case.top_k])
    selected = rng.integers(0, case.experts, (case.tokens, case.top_k), dtype=np.int32)
    # Experts of a token are distinct, as routers choose them. Drawing again what is not takes a
    # few rounds; a token that is unlucky in all of them, or asks for too many, names one twice.
    for _ in range(32):
        ordered = np.sort(selected, axis=1)
        again = np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1))
        if not again.size:
            break
        selected[again] = rng.integers(0, case.experts, (again.size, case.top_k), dtype=np.int32)
    if case.routing == "skewed":
        selected[rng.random(selected.shape) < 0.5] = 0
    return selected


def _draw_weights(case: Case, seed: int) -> np.ndarray:
    rng = np.random.default_rng([seed + 1, case.tokens, case.top_k])
    weights = rng.uniform(0.1, 1.0, (case.tokens, case.top_k)).astype(np.float32)
    return weights / weights.sum(axis=1, keepdims=True)


def _draw_chunks(case: Case, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Uneven sizes that sum up to all rows, and an order."""
    rng = np.random.default_rng([seed, case.tokens, case.experts])
    cuts = np.sort(rng.integers(0, case.tokens + 1, case.experts - 1))
    sizes = np.diff(cuts, prepend=0, append=case.tokens)
    return sizes.astype(np.int32), rng.permutation(case.experts).astype(np.int32)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _draw_values(seed: Any, shape: tuple[int, int], dtype: str) -> jax.Array:
    """Numbers in [-2, 2) by a hash of their place: less to compile than `jax.random`."""
    mixed = jnp.full(shape, seed, jnp.uint32)
    for axis in range(2):
        mixed = (mixed ^ jax.lax.broadcasted_iota(jnp.uint32, shape, axis)) * jnp.uint32(2654435761)
        mixed = mixed ^ (mixed >> 15)
    return ((mixed >> 8).astype(jnp.float32) * 2**-22 - 2).astype(dtype)


def _like_tokens(case: Case, seed: int, number: int) -> jax.Array:
    return _draw_values(_mix(seed, number), (case.tokens, case.hidden), case.dtype)


def _mix(seed: int, number: int) -> np.uint32:
    """A seed for one of several arrays."""
    return np.uint32((8 * seed + number + 1) * 0x9E3779B9 % 2**32)


MAKERS: dict[str, Callable[[Case, int], Any]] = {
    "x": lambda case, seed: _like_tokens(case, seed, 0),
    "gradient": lambda case, seed: _like_tokens(case, seed, 1),
    "rows": lambda case, seed: _draw_values(
        _mix(seed, 2), (case.tokens * case.top_k, case.hidden), case.dtype
    ),
    "weights": lambda case, seed: jnp.asarray(_draw_weights(case, seed)),
    "selected_experts": lambda case, seed: jnp.asarray(_draw_experts(case, seed)),
    "plan": lambda case, seed: plan_by_definition(_draw_experts(case, seed), case.experts),
    "split_sizes": lambda case, seed: jnp.asarray(_draw_chunks(case, seed)[0]),
    "sorted_indices": lambda case, seed: jnp.asarray(_draw_chunks(case, seed)[1]),
}
