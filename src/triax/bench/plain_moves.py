"""MoE routing as users write it in plain JAX, without Triax: what its ops compete with.

`route` is how public training code does it: two sorts, `jnp.take` there and back, an einsum in
float32, and what autodiff makes of them. `route_summed` spends more care on the sum and on the
index arguments. `route_by_sorting` has a sort of rows whose gradient, by hand, is the sort the
other way. `route_by_hand` is the best that is known to us: one sort, all gradients by hand and
fused, and no row is ever scattered.

Experts are int [tokens, top_k], all in range. `order` and `inverse` are int32 [rows], rows =
tokens * top_k: the (token, slot) of each row as token * top_k + slot, and the row of each (token,
slot). Sums are in float32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def take(array: jax.Array, index: jax.Array, *, unique: bool = False) -> jax.Array:
    """Rows of an array by indices in range; where they are `unique` the gradient knows it."""
    # jnp.take's default mode spends a comparison and a select on indices that are out of range.
    return jnp.take(array, index, axis=0, mode="clip", unique_indices=unique)


def sort_pairs(selected_experts: jax.Array) -> jax.Array:
    """The `order` of experts."""
    return jnp.argsort(selected_experts.reshape(-1), stable=True)


def invert(order: jax.Array) -> jax.Array:
    """The inverse of a permutation, by a scatter instead of a second sort."""
    numbers = jnp.arange(order.size, dtype=order.dtype)
    return jnp.zeros_like(order).at[order].set(numbers, unique_indices=True)


def sum_slots(rows: jax.Array, inverse: jax.Array, num_tokens: int) -> jax.Array:
    """The sum of each token's rows, [tokens, hidden]."""
    slots = take(rows, inverse, unique=True).reshape(num_tokens, -1, rows.shape[1])
    return jnp.sum(slots.astype(jnp.float32), axis=1).astype(rows.dtype)


def weigh_slots(rows: jax.Array, inverse: jax.Array, weights: jax.Array) -> jax.Array:
    """The sum of each token's rows times `weights` [tokens, top_k], [tokens, hidden]."""
    slots = take(rows, inverse, unique=True).reshape(*weights.shape, rows.shape[1])
    total = jnp.sum(slots.astype(jnp.float32) * weights[:, :, None], axis=1)
    return total.astype(rows.dtype)


def weigh_slots_grad(
    rows: jax.Array, order: jax.Array, inverse: jax.Array, weights: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The gradients of `weigh_slots` by hand: nothing is scattered."""
    row_gradient = take(gradient, order // weights.shape[1]).astype(jnp.float32)
    row_weights = take(weights.reshape(-1), order, unique=True)
    d_rows = (row_weights[:, None] * row_gradient).astype(rows.dtype)
    slots = take(rows, inverse, unique=True).reshape(*weights.shape, rows.shape[1])
    products = slots.astype(jnp.float32) * gradient.astype(jnp.float32)[:, None, :]
    return d_rows, jnp.sum(products, axis=2).astype(weights.dtype)


@jax.custom_vjp
def permute_by_hand(x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """Each row's token, [rows, hidden]; the gradient is `sum_slots`."""
    return take(x, order // (order.size // x.shape[0]))


def _permute_fwd(x: jax.Array, order: jax.Array, inverse: jax.Array) -> Any:
    return permute_by_hand(x, order, inverse), (inverse, x[:, :0])  # for the number of tokens


def _permute_bwd(residuals: Any, d_rows: jax.Array) -> Any:
    inverse, tokens = residuals
    return sum_slots(d_rows, inverse, tokens.shape[0]), None, None


permute_by_hand.defvjp(_permute_fwd, _permute_bwd)


@jax.custom_vjp
def unpermute_by_hand(
    rows: jax.Array, weights: jax.Array, order: jax.Array, inverse: jax.Array
) -> jax.Array:
    """`weigh_slots` with `weigh_slots_grad` as its gradient."""
    return weigh_slots(rows, inverse, weights)


def _unpermute_fwd(
    rows: jax.Array, weights: jax.Array, order: jax.Array, inverse: jax.Array
) -> Any:
    return unpermute_by_hand(rows, weights, order, inverse), (rows, weights, order, inverse)


def _unpermute_bwd(residuals: Any, gradient: jax.Array) -> Any:
    rows, weights, order, inverse = residuals
    return *weigh_slots_grad(rows, order, inverse, weights, gradient), None, None


unpermute_by_hand.defvjp(_unpermute_fwd, _unpermute_bwd)


def weigh_by_einsum(slots: jax.Array, weights: jax.Array) -> jax.Array:
    """The sum of slots [tokens, top_k, hidden] times weights, [tokens, hidden]."""
    return jnp.einsum("tkh,tk->th", slots.astype(jnp.float32), weights).astype(slots.dtype)


def route(x: jax.Array, selected_experts: jax.Array, weights: jax.Array) -> jax.Array:
    """There and back, left to autodiff, which makes a scatter-add of every take."""
    order = sort_pairs(selected_experts)
    rows = jnp.take(x, order // weights.shape[1], axis=0)
    rows = jax.lax.optimization_barrier(rows)  # where the experts would stand
    slots = jnp.take(rows, jnp.argsort(order), axis=0)
    return weigh_by_einsum(slots.reshape(*weights.shape, -1), weights)


def route_summed(x: jax.Array, selected_experts: jax.Array, weights: jax.Array) -> jax.Array:
    """`route` with a sum that XLA fuses with the take, and takes that know their indices."""
    order = sort_pairs(selected_experts)
    rows = take(x, order // weights.shape[1])
    rows = jax.lax.optimization_barrier(rows)
    return weigh_slots(rows, jnp.argsort(order), weights)


@jax.custom_vjp
def sort_rows(rows: jax.Array, order: jax.Array) -> jax.Array:
    """Rows in another order, a permutation; the gradient is a sort by its inverse."""
    return jnp.take(rows, order, axis=0)


def _sort_rows_fwd(rows: jax.Array, order: jax.Array) -> tuple[jax.Array, jax.Array]:
    return sort_rows(rows, order), order


def _sort_rows_bwd(order: jax.Array, gradient: jax.Array) -> tuple[jax.Array, None]:
    return sort_rows(gradient, jnp.argsort(order)), None


sort_rows.defvjp(_sort_rows_fwd, _sort_rows_bwd)


def route_by_sorting(x: jax.Array, selected_experts: jax.Array, weights: jax.Array) -> jax.Array:
    """There and back by `sort_rows`: tokens are repeated first, so that it is a permutation."""
    order = sort_pairs(selected_experts)
    rows = sort_rows(jnp.repeat(x, weights.shape[1], axis=0), order)
    rows = jax.lax.optimization_barrier(rows)
    slots = sort_rows(rows, jnp.argsort(order))
    return weigh_by_einsum(slots.reshape(*weights.shape, -1), weights)


def route_by_hand(x: jax.Array, selected_experts: jax.Array, weights: jax.Array) -> jax.Array:
    """There and back, with derivatives by hand and one sort."""
    order = sort_pairs(selected_experts)
    inverse = invert(order)
    rows = permute_by_hand(x, order, inverse)
    rows = jax.lax.optimization_barrier(rows)
    return unpermute_by_hand(rows, weights, order, inverse)


def chunk_index(split_sizes: jax.Array, sorted_indices: jax.Array, num_rows: int) -> jax.Array:
    """The row that each row of a chunk sort comes from, int32 [rows]; sizes sum up to them."""
    starts = jnp.cumsum(split_sizes) - split_sizes
    sizes = split_sizes[sorted_indices]
    shifts = starts[sorted_indices] - (jnp.cumsum(sizes) - sizes)
    shift = jnp.repeat(shifts, sizes, total_repeat_length=num_rows)
    return jnp.arange(num_rows, dtype=jnp.int32) + shift


def chunk_index_back(split_sizes: jax.Array, sorted_indices: jax.Array, num_rows: int) -> jax.Array:
    """The row that each row goes to: the inverse of `chunk_index`, int32 [rows]."""
    back = invert(sorted_indices)
    return chunk_index(split_sizes[sorted_indices], back, num_rows)
