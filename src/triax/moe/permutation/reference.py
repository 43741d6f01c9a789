"""Permute and unpermute in plain JAX: the path for every platform without Triton.

The results are the kernels' on every input that a plan allows. Rows are gathered by a map
from row to (token, slot), so that tokens are not copied `top_k` times first.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from triax.moe.shared.arrays import take_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routes:
    """The parts of a plan that permute and unpermute use.

    `padded` is whether a group can have pad rows. `num_slots` is None for narrow maps. For a wide
    map it is int32 [tokens]: the number of slots up to the last slot with a row.
    """

    row_of: jax.Array
    num_slots: jax.Array | None
    group_sizes: jax.Array
    group_filled: jax.Array
    num_rows: int = dataclasses.field(metadata={"static": True})
    padded: bool = dataclasses.field(metadata={"static": True})


class Permuted(NamedTuple):
    """The result of `permute` for tokens with weights or scales.

    Attributes:
      rows: [rows, hidden], the tokens grouped by expert.
      weights: [rows], the weight of each row's (token, slot); None if none were given.
      scales: [rows, scales], the scales of each row's token; None if none were given.
    """

    rows: jax.Array
    weights: jax.Array | None
    scales: jax.Array | None


class Gathered(NamedTuple):
    """The inverse of `Permuted`: the sum of each token's rows, and the row weights by slot.

    x is [tokens, hidden], and weights are [tokens, top_k] or None.
    """

    x: jax.Array
    weights: jax.Array | None


def permute_reference(
    x: jax.Array, weights: jax.Array | None, scales: jax.Array | None, routes: Routes
) -> Permuted:
    """Returns each row's token, weight and scales; zeros in the rows without a token."""
    pair = _pair_of_row(routes)
    token = _token_of_pair(pair, routes)
    return Permuted(
        _take(x, token),
        None if weights is None else _take(weights.reshape(-1), pair),
        None if scales is None else _take(scales, token),
    )


def unpermute_reference(
    rows: jax.Array, weights: jax.Array | None, row_weights: jax.Array | None, routes: Routes
) -> Gathered:
    """Returns each token's sum over its rows, multiplied by `weights` [tokens, top_k] if given."""
    wider = sum_dtype(rows, weights)
    row_of = _existing_rows(routes)
    exists = row_of < routes.num_rows

    def add(slot: Any, total: jax.Array) -> jax.Array:
        term = _take(rows, row_of[:, slot]).astype(wider)
        if weights is not None:
            # The weight of a slot without a row may be NaN, and 0 times NaN is NaN.
            weight = jnp.where(exists[:, slot], weights[:, slot].astype(wider), 0)
            term = term * weight[:, None]
        return total + term

    total = jnp.zeros((row_of.shape[0], rows.shape[1]), wider)
    if routes.num_slots is None:
        for slot in range(row_of.shape[1]):
            total = add(slot, total)
    else:
        # The first slot, which every wide map has, is added outside of the loop, so that inside
        # `shard_map` the loop's carry varies over the mesh from the start.
        most = jnp.max(routes.num_slots, initial=0)
        total = jax.lax.fori_loop(1, most, add, add(0, total))
    gathered = None if row_weights is None else _take(row_weights, row_of)
    return Gathered(total.astype(rows.dtype), gathered)


def unpermute_grad_reference(
    rows: jax.Array, weights: jax.Array, gradient: jax.Array, routes: Routes
) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted sum's gradients with respect to rows and weights, in their dtypes."""
    wider = sum_dtype(rows, weights)
    pair = _pair_of_row(routes)
    token = _token_of_pair(pair, routes)
    row_weights = _take(weights.reshape(-1), pair).astype(wider)
    row_gradients = _take(gradient, token).astype(wider)
    d_rows = row_weights[:, None] * row_gradients
    products = jnp.sum(rows.astype(wider) * row_gradients, axis=1, dtype=wider)
    d_weights = _take(products, _existing_rows(routes))
    return d_rows.astype(rows.dtype), d_weights.astype(weights.dtype)


def sum_dtype(rows: jax.Array, weights: jax.Array | None) -> jnp.dtype:
    """Returns the dtype for sums: float32, or float64 or complex if an operand is."""
    dtypes = (array.dtype for array in (rows, weights) if array is not None)
    wider = (d for d in dtypes if d == jnp.float64 or jnp.issubdtype(d, jnp.complexfloating))
    return np.result_type(np.float32, *wider)  # `jnp.result_type` raises in JAX's strict mode


def _existing_rows(routes: Routes) -> jax.Array:
    """Returns `row_of`, with `num_rows` for missing rows, an index that JAX drops or fills."""
    exists = (routes.row_of >= 0) & (routes.row_of < routes.num_rows)
    return jnp.where(exists, routes.row_of, routes.num_rows)


def _pair_of_row(routes: Routes) -> jax.Array:
    """Returns each row's (token, slot) as token * top_k + slot; one past the last for none."""
    row_of = _existing_rows(routes).reshape(-1)
    none = jnp.full(routes.num_rows, row_of.size, jnp.int32)
    return none.at[row_of].set(jnp.arange(row_of.size, dtype=jnp.int32), mode="drop")


def _token_of_pair(pair: jax.Array, routes: Routes) -> jax.Array:
    num_tokens, top_k = routes.row_of.shape
    return pair // top_k if top_k else jnp.full_like(pair, num_tokens)


def _take(array: jax.Array, index: jax.Array) -> jax.Array:
    """Takes rows of an array, bit for bit; zeros where `index` is past the last row."""
    if array.shape[0] == 0:  # JAX refuses to take from nothing
        return jnp.zeros((*index.shape, *array.shape[1:]), array.dtype)
    return take_rows(array, index, mode="fill", fill_value=0)
