"""The op of quantized_outer, which has no derivative."""

from __future__ import annotations

from typing import Any

import jax

from triax.moe.products import choose
from triax.moe.products import quantized_outer_reference as reference
from triax.moe.products.ops import dims_of_groups, groups_of_shard
from triax.moe.shared.ops import Call, Op, not_differentiable
from triax.sharding.splits import Shard

_derivative = not_differentiable(
    "A gradient of weights from 8-bit operands has no derivative. For second derivatives leave "
    "`recipe` out."
)


def _local(
    call: Call,
    shard: Shard,
    left: Any,
    right: Any,
    left_source: Any,
    right_source: Any,
    groups: Any,
) -> jax.Array:
    """Multiplies a shard of the rows, with its own scales, and sums the shards' products."""
    groups = groups_of_shard(shard, groups, reference.num_rows(left, left_source))
    options = call.options["options"]
    if shard.count("r") == 1:
        return call.run(left, right, left_source, right_source, groups)
    wide = call.replace(options=options.for_partial_sums())
    sums = wide.run(left, right, left_source, right_source, groups)
    return shard.sum("r", sums).astype(options.dtype)


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
