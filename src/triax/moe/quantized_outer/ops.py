"""The op of quantized_outer, which has no derivative."""

from __future__ import annotations

from typing import Any, NoReturn

import jax

from triax.errors import DifferentiationError
from triax.moe.grouped_matmul.ops import groups_of_part, letters_of_groups
from triax.moe.quantized_outer import launchers, reference
from triax.moe.shared.ops import Call, Op
from triax.sharding.splits import Shard


def _derivative(*_: Any) -> NoReturn:
    raise DifferentiationError(
        "A gradient of weights in 8 bits has no derivative: quantize has no derivative. For second "
        "derivatives leave `recipe.weight_gradient` None."
    )


def _part(
    call: Call,
    shard: Shard,
    left: Any,
    right: Any,
    left_source: Any,
    right_source: Any,
    groups: Any,
) -> jax.Array:
    """Each part of the rows has scales of its own, and the parts' products are summed."""
    groups = groups_of_part(shard, groups, reference.num_rows(left, left_source))
    options = call.options["options"]
    if shard.count("r") == 1:
        return call.run(left, right, left_source, right_source, groups)
    wide = call.like(options=options.for_partial_sums())
    sums = wide.run(left, right, left_source, right_source, groups)
    return shard.sum("r", sums).astype(options.dtype)


def _letters(left: Any, right: Any, left_source: Any, right_source: Any, *_: Any, **__: Any) -> Any:
    """A side whose rows are named by a source has rows of another number, which each device
    needs."""
    of_left = "tk" if left_source is not None else "rk"
    of_right = "un" if right_source is not None else "rn"
    return (of_left, of_right, "r", "r", letters_of_groups), "gkn", "rkn"


# For each group the sum over its rows of left × right, both in 8 bits with a scale for each group
# and column. Of left, right, the sources of their rows, and groups.
quantized_outer = Op(
    "quantized_outer",
    letters=_letters,
    derivative=_derivative,
    part=_part,
    kernels=launchers.quantized_outer,
    xla=reference.quantized_outer_reference,
)
