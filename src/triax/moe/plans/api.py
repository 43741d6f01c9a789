"""`make_plan` and `make_plan_from_mask`: check their arguments and make the plan."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from triax import messages
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe.plans import ops
from triax.moe.plans.configs import MAX_SORTED_EXPERTS
from triax.moe.plans.reference import Plan
from triax.moe.shared import arguments
from triax.moe.shared import implementation as implementations
from triax.moe.shared.arguments import Array
from triax.moe.shared.arrays import is_nonzero
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
      capacity: the most pairs an expert keeps; None for no limit.
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
    selected = arguments.as_int32(selected)
    sizes = _sizes(selected.shape, num_experts, capacity, num_rows, align_size)
    implementation = implementations.resolve(implementation)
    return _named(_place_pairs(selected, num_experts, sizes, implementation))


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
    if mask.dtype != jnp.bool_ and not jnp.issubdtype(mask.dtype, jnp.integer):
        raise ArgumentTypeError(
            f"Argument `routing_map` must have a boolean or integer dtype; got {mask.dtype}. Use "
            "`routing_map != 0`."
        )
    messages.check_sizes_known("routing_map", mask.shape)
    if mask.shape[1] == 0:
        raise ArgumentValueError(
            f"Argument `routing_map` must have at least one expert; got shape {mask.shape}."
        )
    top_k = arguments.integer("top_k", top_k, 0)
    implementation = implementations.resolve(implementation, routing_map=mask)
    num_tokens, num_experts = mask.shape
    sizes = _sizes((num_tokens, top_k), num_experts, capacity, num_rows, align_size)
    if top_k >= num_experts and num_experts > MAX_SORTED_EXPERTS:
        chosen = implementation if num_tokens else "xla"
        return _named(ops.place_mask(mask, top_k=top_k, **sizes, implementation=chosen))
    selected = select_experts(mask, top_k, implementation)
    plan = _place_pairs(selected, num_experts, sizes, implementation)
    counts = jnp.sum(is_nonzero(mask), axis=0, dtype=jnp.int32)
    num_dropped = plan.num_dropped + jnp.sum(counts - plan.group_counts, dtype=jnp.int32)
    return _named(dataclasses.replace(plan, group_counts=counts, num_dropped=num_dropped))


def select_experts(mask: jax.Array, top_k: int, implementation: str | None) -> jax.Array:
    """Returns the first `top_k` experts in each token's mask, int32 [tokens, top_k], then -1."""
    chosen = implementation if mask.shape[0] * top_k else "xla"
    selected: jax.Array = ops.select_experts(mask, top_k=top_k, implementation=chosen)
    return selected


def _sizes(
    shape: tuple[int, ...], num_experts: int, capacity: Any, num_rows: Any, align_size: Any
) -> dict[str, Any]:
    """Checks and returns the sizes of a plan for pairs [tokens, top_k]."""
    num_pairs = math.prod(shape)
    if num_pairs > arguments.MAX_ROWS:
        raise ArgumentValueError(
            f"There must be at most 2**31 - 1 pairs of token and slot; got shape {shape}. "
            "Route the tokens in parts."
        )
    align_size = arguments.integer("align_size", align_size, 1)
    if capacity is not None:
        capacity = arguments.integer("capacity", capacity, 0)
    if num_rows is None:
        num_rows = (num_pairs + num_experts * (align_size - 1)) // align_size * align_size
    num_rows = arguments.integer("num_rows", num_rows, 0)
    if num_rows % align_size:
        raise ArgumentValueError(
            f"Argument `num_rows` must be a multiple of `align_size`, {align_size}; got "
            f"{num_rows}. Use {-(-num_rows // align_size) * align_size}."
        )
    return {
        "num_rows": num_rows,
        "capacity": num_pairs if capacity is None else min(capacity, num_pairs),
        "align_size": align_size,
    }


def _place_pairs(
    selected: jax.Array, num_experts: int, sizes: dict[str, Any], implementation: str | None
) -> Plan:
    chosen = implementation if selected.size else "xla"
    plan: Plan = ops.place_pairs(selected, num_experts=num_experts, **sizes, implementation=chosen)
    return plan


def _named(plan: Plan) -> Plan:
    return jax.tree.map(lambda array: checkpoint_name(array, "triax_plan"), plan)
