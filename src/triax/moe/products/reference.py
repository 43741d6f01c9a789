"""ragged_dot in plain JAX: the path for every platform without Triton.

Not `jax.lax.ragged_dot`, which on a CPU multiplies all rows by the weights of all groups and masks
the products: a NaN in one group's weights then reaches every row. Here, as in the kernels, rows are
cut into tiles of one group each, and a tile is multiplied by the weights of its group alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from triax.compat import jax_private
from triax.moe.activations.reference import glu_reference
from triax.moe.products.operands import Parts, parts
from triax.moe.products.options import Groups, Options
from triax.moe.quantization.reference import quantize_groups_reference
from triax.moe.quantization.scaled import ScaledArray, widened
from triax.moe.shared.arrays import at_least_float32, running_sum, take_rows

_MOST_ROWS = 128  # rows of a tile


def ragged_dot_reference(*operands: Any, transposed: bool, options: Options) -> jax.Array:
    """Multiplies each row by its group's weights, maybe transposed; zeros outside groups."""
    multiply = functools.partial(_ragged_dot, transposed=transposed, options=options)
    # Sequential under vmap, because group sizes, and so the numbers of tiles, differ.
    return jax.custom_batching.sequential_vmap(multiply)(*operands)


def ragged_dot_glu_reference(
    rows: jax.Array,
    weights: jax.Array,
    groups: Groups,
    bias: Any,
    row_weights: Any,
    *,
    spec: Any,
    keep_product: bool,
    **options: Any,
) -> tuple[jax.Array | None, jax.Array]:
    """Returns gate and up as `ragged_dot_reference` does, or None, and the result of `glu`."""
    gate_up = ragged_dot_reference(rows, weights, groups, bias, **options)
    return gate_up if keep_product else None, glu_reference(gate_up, None, row_weights, spec=spec)


def _ragged_dot(
    rows: Any,
    weights: Any,
    groups: Groups,
    bias: jax.Array | None = None,
    bias_weights: jax.Array | None = None,
    *,
    transposed: bool,
    options: Options,
) -> jax.Array:
    wider = _sum_dtype(rows.dtype, options.dtype)
    weights = weights.untile() if isinstance(weights, ScaledArray) else weights
    x, w = map(parts, (rows, weights))
    if w.packed:
        w = Parts(widened(weights, rows.dtype))
    elif x.deep or w.deep:  # blocks of the depth are scaled before the product, as floats
        wider = at_least_float32(options.dtype)
        x, w = (
            Parts(widened(of, wider))
            if part.deep
            else part._replace(values=part.values.astype(wider))
            for of, part in ((rows, x), (weights, w))
        )
        options = dataclasses.replace(options, precision="highest")
    elif w.values.dtype.itemsize < x.values.dtype.itemsize:
        w = w._replace(values=w.values.astype(rows.dtype))
    left, right = (_widened(of.values, wider) for of in (x, w))
    columns = right.shape[1 if transposed else 2]
    contract = (((1,), (1 if transposed else 0,)), ((), ()))

    def multiply(tile: _Tile, sums: jax.Array) -> jax.Array:
        matrix = jax.lax.dynamic_index_in_dim(right, tile.group, keepdims=False)
        product = jax.lax.dot_general(tile.of(left), matrix, contract, preferred_element_type=wider)
        merged = jnp.where(tile.inside, product, tile.of(sums))
        return jax.lax.dynamic_update_slice_in_dim(sums, merged, tile.start, axis=0)

    shape = (left.shape[0], columns)
    sums = _over_tiles(multiply, shape, wider, options, groups, left, right)
    sums = sums.astype(_sum_dtype(options.dtype, options.dtype))
    if x.scales is None and w.scales is None and bias is None:
        return sums.astype(options.dtype)
    group = group_of_rows(groups, left.shape[0])
    if x.scales is not None:
        sums *= x.scales.astype(sums.dtype)[:, None]
    if w.scales is not None:
        scales = w.scales.reshape(groups.sizes.shape[0], -1).astype(sums.dtype)
        sums *= jnp.take(scales, group, axis=0, mode="clip")
    if bias is not None:
        sums += _rows_of(bias, group, bias_weights, sums.dtype)
    # Rows outside of the groups are zero, even if scales are not finite.
    sums = jnp.where((group < groups.sizes.shape[0])[:, None], sums, 0)
    return sums.astype(options.dtype)


def group_outer_reference(*operands: Any, options: Options) -> jax.Array:
    """Sums left × right over the rows of each group: [groups, left, right]."""
    multiply = functools.partial(_group_outer, options=options)
    return jax.custom_batching.sequential_vmap(multiply)(*operands)


def _group_outer(
    left: jax.Array, right: jax.Array, groups: Groups, *, options: Options
) -> jax.Array:
    wider = _sum_dtype(left.dtype, options.dtype)
    left, right = (_widened(array, wider) for array in (left, right))
    shape = (groups.sizes.shape[0], left.shape[1], right.shape[1])

    def add(tile: _Tile, sums: jax.Array) -> jax.Array:
        # Both operands are zero outside of the tile: zero times another group's NaN is NaN.
        x, y = (jnp.where(tile.inside, tile.of(side), 0) for side in (left, right))
        product = jax.lax.dot_general(x, y, (((0,), (0,)), ((), ())), preferred_element_type=wider)
        return sums.at[tile.group].add(product)

    sums = _over_tiles(add, shape, wider, options, groups, left, right)
    return sums.astype(options.dtype)


def quantized_outer_reference(
    left: jax.Array,
    right: jax.Array,
    left_source: jax.Array | None,
    right_source: jax.Array | None,
    groups: Groups,
    *,
    options: Options,
    dtypes: tuple[np.dtype, np.dtype],
) -> jax.Array:
    """Sums left × right over the rows of each group, both in 8 bits."""
    left, right = _taken(left, left_source), _taken(right, right_source)
    num_groups = groups.sizes.shape[0]
    group = group_of_rows(groups, left.shape[0])
    (x, x_scales), (y, y_scales) = (
        quantize_groups_reference(side, group, num_groups=num_groups, dtype=dtype)
        for side, dtype in zip((left, right), dtypes, strict=True)
    )
    wide: Any = Options(jnp.dtype(jnp.float32), None)
    sums = group_outer_reference(x, y, groups, options=wide)
    return (sums * x_scales[:, :, None] * y_scales[:, None, :]).astype(options.dtype)


def _taken(side: jax.Array, source: jax.Array | None) -> jax.Array:
    """Returns a side's rows, or the rows that `source` names; a row out of range is zero."""
    if source is None:
        return side
    known = (source >= 0) & (source < side.shape[0])
    rows = take_rows(side, source, mode="clip")
    return jnp.where(known[:, None], rows, jnp.zeros((), side.dtype))


def spread_bias_reference(
    bias: jax.Array,
    groups: Groups,
    weights: jax.Array | None,
    *,
    dtype: Any,
    num_rows: int,
    implementation: Any = None,
) -> jax.Array:
    """Returns each row's bias times the row's weight: [rows, columns]; zeros outside groups."""
    wider = _sum_dtype(bias.dtype, dtype)
    group = group_of_rows(groups, num_rows)
    rows = _rows_of(bias, group, weights, wider)
    return jnp.where((group < groups.sizes.shape[0])[:, None], rows, 0).astype(dtype)


def group_sum_reference(
    rows: jax.Array, groups: Groups, weights: jax.Array | None, *, dtype: Any, num_rows: int
) -> jax.Array:
    """Sums the rows of each group, times their weights: [groups, columns]."""
    wider = _sum_dtype(rows.dtype, dtype)
    rows = rows.astype(wider)
    if weights is not None:
        rows *= weights.astype(wider)[:, None]
    zeros = jnp.zeros((groups.sizes.shape[0], rows.shape[1]), wider)
    group = group_of_rows(groups, num_rows)
    return zeros.at[group].add(rows, mode="drop").astype(dtype)


def bias_products_reference(
    rows: jax.Array,
    groups: Groups,
    bias: jax.Array,
    *,
    dtype: Any,
    num_rows: int,
    implementation: Any = None,
) -> jax.Array:
    """Returns each row's dot product with its group's bias: [rows]; zeros outside groups."""
    wider = _sum_dtype(rows.dtype, dtype)
    group = group_of_rows(groups, num_rows)
    products = jnp.sum(rows.astype(wider) * _rows_of(bias, group, None, wider), axis=1)
    return jnp.where(group < groups.sizes.shape[0], products, 0).astype(dtype)


def bias_gradients_reference(
    rows: jax.Array,
    groups: Groups,
    weights: jax.Array,
    bias: jax.Array,
    *,
    dtypes: tuple[Any, Any],
    num_rows: int,
) -> tuple[jax.Array, jax.Array]:
    """Returns the results of `group_sum_reference` and `bias_products_reference`."""
    options = {"num_rows": num_rows}
    return (
        group_sum_reference(rows, groups, weights, dtype=dtypes[0], **options),
        bias_products_reference(rows, groups, bias, dtype=dtypes[1], **options),
    )


def _rows_of(bias: jax.Array, group: jax.Array, weights: jax.Array | None, dtype: Any) -> jax.Array:
    rows = jnp.take(bias, group, axis=0, mode="clip").astype(dtype)
    return rows if weights is None else rows * weights.astype(dtype)[:, None]


class _Tile(NamedTuple):
    """A tile of one group: the rows from `start` on where `inside` [rows, 1] is True."""

    group: jax.Array
    start: jax.Array
    inside: jax.Array

    def of(self, rows: jax.Array) -> jax.Array:
        """Returns the slice of `rows` from `start` on."""
        return jax.lax.dynamic_slice_in_dim(rows, self.start, self.inside.shape[0])


def _over_tiles(
    step: Callable[[_Tile, jax.Array], jax.Array],
    shape: tuple[int, ...],
    dtype: Any,
    options: Options,
    groups: Groups,
    *rows: jax.Array,
) -> jax.Array:
    """Applies `step` to zeros of a shape, for every tile of every group of `rows`."""
    num_rows = rows[0].shape[0]
    block = min(num_rows, _MOST_ROWS)
    ends = group_ends(groups, num_rows)
    sizes = jnp.diff(ends, prepend=first_row(groups, num_rows))
    last_tiles = jnp.cumsum(-(-sizes // block))

    def body(index: jax.Array, sums: jax.Array) -> jax.Array:
        group = _group_of(index[None], last_tiles)[0]
        end, tiles_left = ends[group], last_tiles[group] - index
        first = end - sizes[group] + (-(-sizes[group] // block) - tiles_left) * block
        start = jnp.minimum(first, num_rows - block)
        row = start + jnp.arange(block, dtype=jnp.int32)[:, None]
        # Plain JAX multiplies 8-bit floats in bfloat16 or float32: it has no fast sums.
        with jax.default_matmul_precision(None if options.fast_sums else options.precision):
            return step(_Tile(group, start, (row >= first) & (row < end)), sums)

    zeros = jnp.zeros(shape, dtype)
    zeros, *_ = jax_private.insert_varying_casts([zeros, *jax.tree.leaves(groups), *rows])
    return jax.lax.fori_loop(0, last_tiles[-1], body, zeros)


def first_row(groups: Groups, num_rows: int) -> jax.Array | int:
    """Returns the first row of the first group."""
    return 0 if groups.first_row is None else jnp.clip(groups.first_row, 0, num_rows)


def group_ends(groups: Groups, num_rows: int) -> jax.Array:
    """Returns where groups end, at most `num_rows`; groups of negative size are empty."""
    sizes = jnp.clip(groups.sizes, 0, num_rows)
    if groups.first_row is None:
        return running_sum(sizes, num_rows)
    first = jnp.asarray(first_row(groups, num_rows), sizes.dtype)
    return running_sum(jnp.concatenate([first[None], sizes]), num_rows)[1:]


def group_of_rows(groups: Groups, num_rows: int) -> jax.Array:
    """Returns the group of each row; for rows outside of all groups, the number of groups."""
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    group = _group_of(rows, group_ends(groups, num_rows))
    if groups.first_row is None:
        return group
    return jnp.where(rows < first_row(groups, num_rows), groups.sizes.shape[0], group)


def _group_of(index: jax.Array, ends: jax.Array) -> jax.Array:
    """Returns the group that each index falls into."""
    # JAX 0.10 cannot trace `searchsorted` where a part of the mesh axes is manual.
    return jnp.sum(ends[None, :] <= index[:, None], axis=1, dtype=jnp.int32)


def _sum_dtype(operand: Any, result: Any) -> jnp.dtype:
    """Returns the dtype in which products are accumulated."""
    if not jnp.issubdtype(operand, jnp.floating):
        return operand if operand.itemsize >= 4 else jnp.dtype(jnp.int32)
    return at_least_float32(result)


def _widened(array: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Casts integers to `dtype`, and 8-bit floats to bfloat16, which every platform multiplies."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array.astype(dtype)
    return array.astype(jnp.bfloat16) if array.dtype.itemsize == 1 else array
