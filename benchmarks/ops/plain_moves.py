"""The moves of an MoE layer as users write them in plain JAX: what Triax is compared with.

They take tokens, int experts [tokens, top_k] and weights [tokens, top_k], and go there and back.
`order` and `inverse` are int32 [rows], rows = tokens * top_k: the pair (token, slot) of each row,
as token * top_k + slot, and the row of each pair. Sums are in float32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import linear_call


def take(array: jax.Array, index: jax.Array, *, unique: bool = False) -> jax.Array:
    """Rows of an array by indices in range; where they are `unique` the gradient knows it."""
    # jnp.take's default mode spends a comparison and a select on indices that are out of range.
    return jnp.take(array, index, axis=0, mode="clip", unique_indices=unique)


def invert(order: jax.Array) -> jax.Array:
    """The inverse of a permutation, by a scatter instead of a second sort."""
    numbers = jnp.arange(order.size, dtype=order.dtype)
    return jnp.zeros_like(order).at[order].set(numbers, unique_indices=True)


def weigh_slots(rows: jax.Array, inverse: jax.Array, weights: jax.Array) -> jax.Array:
    """The sum of each token's rows times `weights`, [tokens, hidden]."""
    slots = take(rows, inverse, unique=True).reshape(*weights.shape, rows.shape[1])
    total = jnp.sum(slots.astype(jnp.float32) * weights[:, :, None], axis=1)
    return total.astype(rows.dtype)


def _sort_pairs(experts: jax.Array) -> jax.Array:
    return jnp.argsort(experts.reshape(-1), stable=True)


def _weigh_by_einsum(slots: jax.Array, weights: jax.Array) -> jax.Array:
    slots = slots.reshape(*weights.shape, -1)
    return jnp.einsum("tkh,tk->th", slots.astype(jnp.float32), weights).astype(slots.dtype)


def moves(x: jax.Array, experts: jax.Array, weights: jax.Array) -> jax.Array:
    """As public training code does it: autodiff makes a scatter-add of every take."""
    order = _sort_pairs(experts)
    rows = jnp.take(x, order // weights.shape[1], axis=0)
    rows = jax.lax.optimization_barrier(rows)  # where the experts would stand
    return _weigh_by_einsum(jnp.take(rows, jnp.argsort(order), axis=0), weights)


def moves_summed(x: jax.Array, experts: jax.Array, weights: jax.Array) -> jax.Array:
    """`moves` with a sum that XLA fuses with the take, and takes that know their indices."""
    order = _sort_pairs(experts)
    rows = jax.lax.optimization_barrier(take(x, order // weights.shape[1]))
    return weigh_slots(rows, jnp.argsort(order), weights)


def _sort_rows(rows: jax.Array, order: jax.Array) -> jax.Array:
    """Rows in another order, a permutation; the gradient is a sort by its inverse."""
    there = lambda order, rows: jnp.take(rows, order, axis=0)
    back = lambda order, gradient: jnp.take(gradient, jnp.argsort(order), axis=0)
    return linear_call(there, back, order, rows)


def moves_by_sorting(x: jax.Array, experts: jax.Array, weights: jax.Array) -> jax.Array:
    """By a sort of rows whose gradient is the sort back: tokens are repeated first."""
    order = _sort_pairs(experts)
    rows = _sort_rows(jnp.repeat(x, weights.shape[1], axis=0), order)
    rows = jax.lax.optimization_barrier(rows)
    return _weigh_by_einsum(_sort_rows(rows, jnp.argsort(order)), weights)


def _permute(x: jax.Array, order: jax.Array, inverse: jax.Array, top_k: int) -> jax.Array:
    """The rows; the gradient is a sum of each token's, and nothing is scattered."""
    ones = jnp.ones((x.shape[0], top_k))
    there = lambda index, x: take(x, index[0] // top_k)
    back = lambda index, d_rows: weigh_slots(d_rows, index[1], ones)
    return linear_call(there, back, (order, inverse), x)


@jax.custom_vjp
def _unpermute(
    rows: jax.Array, weights: jax.Array, order: jax.Array, inverse: jax.Array
) -> jax.Array:
    return weigh_slots(rows, inverse, weights)


def _unpermute_bwd(residuals: Any, gradient: jax.Array) -> Any:
    rows, weights, order, inverse = residuals
    row_gradient = take(gradient, order // weights.shape[1]).astype(jnp.float32)
    row_weights = take(weights.reshape(-1), order, unique=True)
    d_rows = (row_weights[:, None] * row_gradient).astype(rows.dtype)
    _, pull = jax.vjp(lambda weights: weigh_slots(rows, inverse, weights), weights)
    return d_rows, *pull(gradient), None, None


_unpermute.defvjp(lambda *operands: (_unpermute(*operands), operands), _unpermute_bwd)


def moves_by_hand(x: jax.Array, experts: jax.Array, weights: jax.Array) -> jax.Array:
    """The best known to us: one sort, all gradients by hand and fused, and no row scattered."""
    order = _sort_pairs(experts)
    inverse = invert(order)
    rows = jax.lax.optimization_barrier(_permute(x, order, inverse, weights.shape[1]))
    return _unpermute(rows, weights, order, inverse)


def chunk_index(split_sizes: jax.Array, sorted_indices: jax.Array, num_rows: int) -> jax.Array:
    """The row that each row of a chunk sort comes from, int32 [rows]; sizes sum up to them."""
    starts = jnp.cumsum(split_sizes) - split_sizes
    sizes = split_sizes[sorted_indices]
    shifts = starts[sorted_indices] - (jnp.cumsum(sizes) - sizes)
    shift = jnp.repeat(shifts, sizes, total_repeat_length=num_rows)
    return jnp.arange(num_rows, dtype=jnp.int32) + shift
