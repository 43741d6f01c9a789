"""ragged_dot in plain JAX: the path for every platform without Triton.

Not `jax.lax.ragged_dot`, which on a CPU multiplies all rows by the weights of all groups and masks
the products: a NaN in one group's weights then reaches every row. Here, as in the kernels, rows are
cut into tiles of one group each, and a tile is multiplied by the weights of its group alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from triax.compat import jax_private
from triax.moe.grouped_matmul.launchers import Options
from triax.moe.shared.arrays import at_least_float32, running_sum

_MOST_ROWS = 128  # of a tile


def ragged_dot_reference(*operands: Any, transposed: bool, options: Options) -> jax.Array:
    """Each row times the weights of its group, or times them transposed; zeros past the groups."""
    multiply = functools.partial(_ragged_dot, transposed=transposed, options=options)
    # One after the other under vmap: group sizes differ, and so does the number of tiles.
    return jax.custom_batching.sequential_vmap(multiply)(*operands)


def _ragged_dot(
    rows: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    row_scales: jax.Array | None = None,
    group_scales: jax.Array | None = None,
    bias: jax.Array | None = None,
    bias_weights: jax.Array | None = None,
    *,
    transposed: bool,
    options: Options,
) -> jax.Array:
    wider = _sum_dtype(rows.dtype, options.dtype)
    rows, weights = (_widened(array, wider) for array in (rows, weights))
    columns = weights.shape[1 if transposed else 2]
    contract = (((1,), (1 if transposed else 0,)), ((), ()))

    def multiply(tile: _Tile, sums: jax.Array) -> jax.Array:
        matrix = jax.lax.dynamic_index_in_dim(weights, tile.group, keepdims=False)
        product = jax.lax.dot_general(tile.of(rows), matrix, contract, preferred_element_type=wider)
        found = jnp.where(tile.inside, product, tile.of(sums))
        return jax.lax.dynamic_update_slice_in_dim(sums, found, tile.start, axis=0)

    shape = (rows.shape[0], columns)
    sums = _over_tiles(multiply, shape, wider, options, group_sizes, rows, weights)
    sums = sums.astype(_sum_dtype(options.dtype, options.dtype))
    if row_scales is None and group_scales is None and bias is None:
        return sums.astype(options.dtype)
    group = group_of_rows(group_sizes, rows.shape[0])
    if row_scales is not None:
        sums *= row_scales.astype(sums.dtype)[:, None]
    if group_scales is not None:
        sums *= jnp.take(group_scales.astype(sums.dtype), group, mode="clip")[:, None]
    if bias is not None:
        sums += _rows_of(bias, group, bias_weights, sums.dtype)
    # Rows past the groups are zero for all scales.
    sums = jnp.where((group < group_sizes.shape[0])[:, None], sums, 0)
    return sums.astype(options.dtype)


def group_outer_reference(*operands: jax.Array, options: Options) -> jax.Array:
    """For each group the sum over its rows of left × right: [groups, left, right]."""
    multiply = functools.partial(_group_outer, options=options)
    return jax.custom_batching.sequential_vmap(multiply)(*operands)


def _group_outer(
    left: jax.Array, right: jax.Array, group_sizes: jax.Array, *, options: Options
) -> jax.Array:
    wider = _sum_dtype(left.dtype, options.dtype)
    left, right = (_widened(array, wider) for array in (left, right))
    shape = (group_sizes.shape[0], left.shape[1], right.shape[1])

    def add(tile: _Tile, sums: jax.Array) -> jax.Array:
        # Both sides are zero outside of the tile: zero times another group's NaN is NaN.
        x, y = (jnp.where(tile.inside, tile.of(side), 0) for side in (left, right))
        product = jax.lax.dot_general(x, y, (((0,), (0,)), ((), ())), preferred_element_type=wider)
        return sums.at[tile.group].add(product)

    sums = _over_tiles(add, shape, wider, options, group_sizes, left, right)
    return sums.astype(options.dtype)


def spread_bias_reference(
    bias: jax.Array,
    group_sizes: jax.Array,
    weights: jax.Array | None,
    *,
    dtype: Any,
    num_rows: int,
    implementation: Any = None,
) -> jax.Array:
    """For each row its group's bias, times its weight: [rows, columns]; zeros past the groups."""
    wider = _sum_dtype(bias.dtype, dtype)
    group = group_of_rows(group_sizes, num_rows)
    rows = _rows_of(bias, group, weights, wider)
    return jnp.where((group < group_sizes.shape[0])[:, None], rows, 0).astype(dtype)


def group_sum_reference(
    rows: jax.Array, group_sizes: jax.Array, weights: jax.Array | None, *, dtype: Any, num_rows: int
) -> jax.Array:
    """For each group the sum of its rows, times their weights: [groups, columns]."""
    wider = _sum_dtype(rows.dtype, dtype)
    rows = rows.astype(wider)
    if weights is not None:
        rows *= weights.astype(wider)[:, None]
    zeros = jnp.zeros((group_sizes.shape[0], rows.shape[1]), wider)
    group = group_of_rows(group_sizes, num_rows)
    return zeros.at[group].add(rows, mode="drop").astype(dtype)


def bias_products_reference(
    rows: jax.Array,
    group_sizes: jax.Array,
    bias: jax.Array,
    *,
    dtype: Any,
    num_rows: int,
    implementation: Any = None,
) -> jax.Array:
    """For each row its product with its group's bias: [rows]; zeros past the groups."""
    wider = _sum_dtype(rows.dtype, dtype)
    group = group_of_rows(group_sizes, num_rows)
    products = jnp.sum(rows.astype(wider) * _rows_of(bias, group, None, wider), axis=1)
    return jnp.where(group < group_sizes.shape[0], products, 0).astype(dtype)


def _rows_of(bias: jax.Array, group: jax.Array, weights: jax.Array | None, dtype: Any) -> jax.Array:
    rows = jnp.take(bias, group, axis=0, mode="clip").astype(dtype)
    return rows if weights is None else rows * weights.astype(dtype)[:, None]


class _Tile(NamedTuple):
    """A group, and rows from `start` on, of which those `inside` [rows, 1] are the tile's."""

    group: jax.Array
    start: jax.Array
    inside: jax.Array

    def of(self, rows: jax.Array) -> jax.Array:
        """This tile's of all rows."""
        return jax.lax.dynamic_slice_in_dim(rows, self.start, self.inside.shape[0])


def _over_tiles(
    step: Callable[[_Tile, jax.Array], jax.Array],
    shape: tuple[int, ...],
    dtype: Any,
    options: Options,
    group_sizes: jax.Array,
    *rows: jax.Array,
) -> jax.Array:
    """Zeros of a shape, after a step for every tile of every group of `rows`."""
    num_rows = rows[0].shape[0]
    block = min(num_rows, _MOST_ROWS)
    ends = group_ends(group_sizes, num_rows)
    sizes = jnp.diff(ends, prepend=0)
    last_tiles = jnp.cumsum(-(-sizes // block))

    def body(index: jax.Array, sums: jax.Array) -> jax.Array:
        group = _group_of(index[None], last_tiles)[0]
        end, tiles_left = ends[group], last_tiles[group] - index
        first = end - sizes[group] + (-(-sizes[group] // block) - tiles_left) * block
        start = jnp.minimum(first, num_rows - block)
        row = start + jnp.arange(block)[:, None]
        with jax.default_matmul_precision(options.precision):
            return step(_Tile(group, start, (row >= first) & (row < end)), sums)

    zeros = jnp.zeros(shape, dtype)
    zeros, *_ = jax_private.insert_varying_casts([zeros, group_sizes, *rows])
    return jax.lax.fori_loop(0, last_tiles[-1], body, zeros)


def group_ends(group_sizes: jax.Array, num_rows: int) -> jax.Array:
    """Where groups end: negative sizes are empty, and no group ends after the last row."""
    return running_sum(jnp.clip(group_sizes, 0, num_rows), num_rows)


def group_of_rows(group_sizes: jax.Array, num_rows: int) -> jax.Array:
    """The group of each row; their number for rows past the last."""
    return _group_of(jnp.arange(num_rows), group_ends(group_sizes, num_rows))


def _group_of(index: jax.Array, ends: jax.Array) -> jax.Array:
    """Which group each index is in."""
    # Not by `searchsorted`, which JAX 0.10 cannot trace where a part of the mesh axes is manual.
    return jnp.sum(ends[None, :] <= index[:, None], axis=1, dtype=jnp.int32)


def _sum_dtype(operand: Any, result: Any) -> jnp.dtype:
    """What products of operands are summed in."""
    if not jnp.issubdtype(operand, jnp.floating):
        return operand if operand.itemsize >= 4 else jnp.dtype(jnp.int32)
    return at_least_float32(result)


def _widened(array: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Small operands in a type that every platform multiplies, and that holds them all."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array.astype(dtype)
    return array.astype(jnp.bfloat16) if array.dtype.itemsize == 1 else array
