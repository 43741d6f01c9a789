"""`make_plan` and `make_plan_from_mask`: check their arguments and make the plan."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from triax import messages
from triax.errors import ArgumentValueError
from triax.moe.plans import ops
from triax.moe.plans.reference import Plan
from triax.moe.shared import arguments
from triax.moe.shared import implementation as implementations
from triax.moe.shared.arguments import Array
from triax.moe.shared.implementation import Implementation


def make_plan(
    selected_experts: Array,
    num_experts: int,
    *,
    capacity: int | None = None,
    num_rows: int | None = None,
    align_size: int = 1,
    implementation: Implementation | None = None,
) -> Plan:
    """Gives every (token, slot) its row, sorted by expert.

        plan = moe.make_plan(jnp.array([[1, 0], [2, 1]]), num_experts=3)
        plan.row_of       # [[1, 0], [3, 2]]
        plan.group_sizes  # [1, 2, 1]

    The sort is stable: equal inputs give equal plans in every run, on every path.

    An id outside [0, num_experts) means "not routed": it gets no row and is not counted. A token
    that names an expert twice gets two rows. An expert keeps its first `capacity` pairs. Groups
    follow one another, each padded to a multiple of `align_size`, and pairs that do not fit in
    `num_rows` are dropped. `capacity` limits each expert, so that overflow does not starve the last
    experts; `num_rows` is the backstop.

    Args:
      selected_experts: integer [tokens, top_k].
      num_experts: at least 1.
      capacity: at least 1: the most pairs an expert keeps; None for no limit.
      num_rows: a multiple of `align_size`; by default enough for the worst case,
        ``(tokens * top_k + num_experts * (align_size - 1)) // align_size * align_size``.
      align_size: each group's size is a multiple of this: 8, 16 or 128 for most matmuls.
      implementation: None picks by the program's platform: Triton kernels on CUDA, plain JAX
        elsewhere. "triton", "interpret" (the kernels, interpreted on the CPU) and "xla" insist.

    Returns:
      The `Plan`, for `permute` and `unpermute`.

    Raises:
      ArgumentTypeError: an argument has the wrong type.
      ArgumentValueError: `selected_experts` has the wrong shape or more than 2**31 - 1 pairs,
        a size is out of its range, or `implementation` is unknown.
    """
    remedy = "Pass the second result of `moe.route`; a mask goes to `make_plan_from_mask`."
    selected = arguments.array(
        "selected_experts", selected_experts, ("tokens", "top_k"), jnp.integer, remedy
    )
    messages.check_sizes_known("selected_experts", selected.shape)
    num_experts = arguments.integer("num_experts", num_experts, 1)
    sizes = _check_sizes(selected.shape, capacity, num_rows, align_size)
    implementations.check(implementation)
    selected = arguments.as_int32(selected)
    return ops.make_plan(selected, num_experts, **sizes, implementation=implementation)


def make_plan_from_mask(
    routing_map: Array,
    top_k: int,
    *,
    capacity: int | None = None,
    num_rows: int | None = None,
    align_size: int = 1,
    implementation: Implementation | None = None,
) -> Plan:
    """Gives every token its rows from a routing mask, sorted by expert.

        plan = moe.make_plan_from_mask(jnp.array([[1, 1, 0], [0, 1, 1]]), top_k=2)
        plan.row_of     # [[0, 1], [2, 3]]
        plan.expert_of  # [[0, 1], [1, 2]]

    A token's slots are its experts in ascending order. It keeps the first `top_k`; further experts
    are dropped, and counted in `group_counts` and `num_dropped`. Unused slots are not routed. A
    mask has a column per expert: if you have expert ids, `make_plan` reads far less.

    Args:
      routing_map: bool or integer [tokens, experts]; nonzero where a token is routed.
      top_k: the number of slots, and so the most experts a token keeps.
      capacity, num_rows, align_size, implementation: as for `make_plan`.

    Returns:
      The `Plan`, for `permute` and `unpermute`.

    Raises:
      ArgumentTypeError: an argument has the wrong type.
      ArgumentValueError: an argument has the wrong shape or is out of its range.
    """
    mask = arguments.array("routing_map", routing_map, ("tokens", "experts"))
    arguments.check_mask("routing_map", mask)
    top_k = arguments.integer("top_k", top_k, 0)
    implementations.check(implementation, routing_map=mask)
    sizes = _check_sizes((mask.shape[0], top_k), capacity, num_rows, align_size)
    return ops.make_plan_from_mask(mask, top_k, **sizes, implementation=implementation)


def _check_sizes(
    shape: tuple[int, ...], capacity: Any, num_rows: Any, align_size: Any
) -> dict[str, Any]:
    """Checks and returns the sizes of a plan for pairs [tokens, top_k]."""
    arguments.check_pairs(shape)
    align_size = arguments.integer("align_size", align_size, 1)
    if capacity is not None:
        capacity = arguments.integer("capacity", capacity, 1)
    if num_rows is not None:
        num_rows = arguments.integer("num_rows", num_rows, 0)
        if num_rows % align_size:
            raise ArgumentValueError(
                f"Argument `num_rows` must be a multiple of `align_size`, {align_size}; got "
                f"{num_rows}. Use {-(-num_rows // align_size) * align_size}."
            )
    return {"capacity": capacity, "num_rows": num_rows, "align_size": align_size}
