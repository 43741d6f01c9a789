"""The op of quantized_outer, which has no derivative: the gradient of weights, for recipes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from triax.moe.products import choose, reference
from triax.moe.products.ops import dims_of_groups, groups_of_shard
from triax.moe.products.options import FAST_SUMS, Groups, Options
from triax.moe.shared import implementation as implementations
from triax.moe.shared.implementation import Implementation
from triax.moe.shared.ops import Call, Op, not_differentiable
from triax.sharding.splits import Shard

_derivative = not_differentiable(
    "A gradient of weights from 8-bit operands has no derivative. For second derivatives leave "
    "`recipe` out."
)


def _local(call: Call, shard: Shard, *operands: Any) -> jax.Array:
    """Multiplies a shard of the rows, with its own scales, and sums the shards' products."""
    left, _, left_source, _, groups = operands
    groups = groups_of_shard(shard, groups, len(left if left_source is None else left_source))
    options = call.options["options"]
    if shard.count("r") == 1:
        return call.run(*operands[:4], groups)
    wide = call.replace(options=options.for_partial_sums())
    return shard.sum("r", wide.run(*operands[:4], groups)).astype(options.dtype)


def _dims(left: Any, right: Any, left_source: Any, right_source: Any, *_: Any, **__: Any) -> Any:
    """Gives the rows of a side with a source their own letter: every device needs all of them."""
    of_left = "tk" if left_source is not None else "rk"
    of_right = "un" if right_source is not None else "rn"
    return (of_left, of_right, "r", "r", dims_of_groups), "gkn", "rkn"


# Sums left × right over the rows of each group, both in 8 bits with a scale for each group and
# column. Operands: left, right, the sources of their rows, groups.
quantized_outer = Op(
    "quantized_outer",
    dims=_dims,
    derivative=_derivative,
    local=_local,
    kernels=choose.quantized_outer,
    xla=reference.quantized_outer_reference,
)


def outer_in_8_bits(
    left: jax.Array,
    right: jax.Array,
    group_sizes: jax.Array,
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
      group_sizes: int32 [groups].
      sources: for each side None, or int32 [rows]: the row of this side for each of the groups'
        rows; zeros for indices out of range.
      dtypes: the 8-bit dtypes of both sides: float8_e4m3fn or float8_e5m2.
      result_dtype: a float.
      fast_sums: whether products accumulate entirely in tensor cores.
      implementation: as in `ragged_dot`.

    Returns:
      [groups, left, right]; zeros for empty groups.
    """
    count = len(left if sources[0] is None else sources[0])
    shape = group_sizes.shape[0], left.shape[1], right.shape[1]
    if not (count and len(left) and len(right) and all(shape)):
        empty = jnp.zeros(shape, result_dtype)
        # Inside shard_map the result must vary over the operands' axes.
        return empty + sum(jnp.sum(side[:0]).astype(result_dtype) for side in (left, right))
    options = Options(np.dtype(result_dtype), FAST_SUMS if fast_sums else None)
    return quantized_outer(
        left,
        right,
        *sources,
        Groups(group_sizes),
        options=options,
        dtypes=tuple(map(np.dtype, dtypes)),
        implementation=implementations.fit(implementation, left, right, floats=True),
    )
