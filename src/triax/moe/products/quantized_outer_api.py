"""`quantized_outer`: the gradient of weights from 8-bit operands, for recipes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from triax.moe.products import quantized_outer_ops as ops
from triax.moe.products.options import FAST_SUMS, Groups, Options
from triax.moe.products.quantized_outer_reference import num_rows
from triax.moe.shared import arguments
from triax.moe.shared import implementation as implementations
from triax.moe.shared.implementation import Implementation


def quantized_outer(
    left: jax.Array,
    right: jax.Array,
    group_sizes: Any,
    *,
    sources: tuple[jax.Array | None, jax.Array | None] = (None, None),
    dtypes: tuple[str, str],
    result_dtype: Any,
    fast_sums: bool,
    implementation: Implementation | None,
) -> jax.Array:
    """Sums left × right over the rows of each group, both rounded to 8 bits.

    The numbers of a group in one column share a scale, computed as in `quantize`. Sums are computed
    as in `ragged_dot` of scaled arrays. If rows are sharded over devices, each part of a group has
    its own scales, and the parts' products are summed.

    Args:
      left: float [rows, left].
      right: float [rows, right].
      group_sizes: integer [groups], as `ragged_dot` takes them.
      sources: for each side None, or int32 [rows]: the row of this side for each of the groups'
        rows; zeros for indices out of range.
      dtypes: the 8-bit dtypes of both sides: float8_e4m3fn or float8_e5m2.
      result_dtype: a float.
      fast_sums: whether products accumulate entirely in tensor cores.
      implementation: as in `ragged_dot`.

    Returns:
      [groups, left, right]; zeros for empty groups.
    """
    count = num_rows(left, sources[0])
    shape = group_sizes.shape[0], left.shape[1], right.shape[1]
    if not (count and len(left) and len(right) and all(shape)):
        empty = jnp.zeros(shape, result_dtype)
        # Inside shard_map the result must vary over the operands' axes.
        return empty + sum(jnp.sum(side[:0]).astype(result_dtype) for side in (left, right))
    options = Options(jnp.dtype(result_dtype), FAST_SUMS if fast_sums else None)
    return ops.quantized_outer(
        left,
        right,
        *sources,
        Groups(arguments.as_int32(arguments.as_jax(group_sizes))),
        options=options,
        dtypes=tuple(map(jnp.dtype, dtypes)),
        implementation=implementations.fit(implementation, left, right, floats=True),
    )
