"""The op of quantized_outer, which has no derivative."""

from __future__ import annotations

import functools
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


@functools.cache
def quantized_outer(left_named: bool, right_named: bool) -> Op:
    """For each group the sum over its rows of left × right, both in 8 bits with a scale for each
    group and column. Of left, right, the sources of their rows, and groups.

    A side whose rows are named by a source has rows of another number, which each device needs.
    """
    return Op(
        "quantized_outer",
        arguments=(
            "tk" if left_named else "rk",
            "un" if right_named else "rn",
            "r",
            "r",
            letters_of_groups,
        ),
        results="gkn",
        cut="rkn",
        derivative=_derivative,
        part=_part,
        kernels=launchers.quantized_outer,
        xla=reference.quantized_outer_reference,
    )
