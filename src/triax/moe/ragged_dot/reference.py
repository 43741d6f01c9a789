"""ragged_dot in plain JAX: the path for every platform without Triton."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from triax.moe.ragged_dot.launchers import Options

_OUTER = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


def ragged_dot_reference(*operands: Any, transposed: bool, options: Options) -> jax.Array:
    """Each row times the weights of its group, or times them transposed; zeros past the groups."""
    multiply = functools.partial(_ragged_dot, transposed=transposed, options=options)
    # One after the other under vmap: JAX's ragged_dot does not batch group sizes.
    return jax.custom_batching.sequential_vmap(multiply)(*operands)


def _ragged_dot(
    rows: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    row_scales: jax.Array | None = None,
    group_scales: jax.Array | None = None,
    *,
    transposed: bool,
    options: Options,
) -> jax.Array:
    wider = _sum_dtype(options.dtype)
    sizes, end = clipped(group_sizes, rows.shape[0])
    if transposed:
        weights = jnp.swapaxes(weights, 1, 2)
    with jax.default_matmul_precision(options.precision):
        sums = jax.lax.ragged_dot(
            _widened(rows), _widened(weights), sizes, preferred_element_type=wider
        )
    row = jnp.arange(rows.shape[0])
    if row_scales is not None:
        sums *= row_scales.astype(wider)[:, None]
    if group_scales is not None:
        group = jnp.searchsorted(jnp.cumsum(sizes), row, side="right")
        sums *= jnp.take(group_scales.astype(wider), group, mode="clip")[:, None]
    return jnp.where((row < end)[:, None], sums, 0).astype(options.dtype)


def group_outer_reference(*operands: jax.Array, options: Options) -> jax.Array:
    """For each group the sum over its rows of left × right: [groups, left, right]."""
    multiply = functools.partial(_group_outer, options=options)
    return jax.custom_batching.sequential_vmap(multiply)(*operands)


def _group_outer(
    left: jax.Array, right: jax.Array, group_sizes: jax.Array, *, options: Options
) -> jax.Array:
    sizes, end = clipped(group_sizes, left.shape[0])
    inside = (jnp.arange(left.shape[0]) < end)[:, None]
    with jax.default_matmul_precision(options.precision):
        sums = jax.lax.ragged_dot_general(
            jnp.where(inside, _widened(left), 0),
            jnp.where(inside, _widened(right), 0),
            sizes,
            _OUTER,
            preferred_element_type=_sum_dtype(options.dtype),
        )
    return sums.astype(options.dtype)


def clipped(group_sizes: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Sizes that are not negative and end at the last row, and where they end."""
    sizes = jnp.clip(group_sizes, 0, num_rows)

    def add(a: jax.Array, b: jax.Array) -> jax.Array:
        total = a.astype(jnp.uint32) + b.astype(jnp.uint32)  # no sum of two wraps around
        return jnp.minimum(total, num_rows).astype(jnp.int32)

    ends = jax.lax.associative_scan(add, sizes)
    return jnp.diff(ends, prepend=0), ends[-1]


def _sum_dtype(dtype: jnp.dtype) -> jnp.dtype:
    if not jnp.issubdtype(dtype, jnp.floating):
        return dtype
    if dtype.itemsize == 1:  # JAX does not promote 8-bit floats
        return jnp.dtype(jnp.float32)
    return jnp.promote_types(dtype, jnp.float32)


def _widened(array: jax.Array) -> jax.Array:
    """8-bit floats as bfloat16, which holds them all: not every platform multiplies them."""
    small = jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize == 1
    return array.astype(jnp.bfloat16) if small else array
