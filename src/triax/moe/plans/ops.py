"""The ops of plans: integers, which have no derivative.

`make_plan` and `make_plan_from_mask` call them with checked arguments, for the public functions of
these names and for what is made of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from triax.moe.plans import launchers, reference
from triax.moe.plans.configs import MAX_SORTED_EXPERTS
from triax.moe.plans.reference import Plan
from triax.moe.shared import arguments
from triax.moe.shared import implementation as implementations
from triax.moe.shared.arrays import is_nonzero
from triax.moe.shared.implementation import Implementation
from triax.moe.shared.ops import Op

_PLAN = ("tk", "tk", "e", "e", "e", "")

# Plans the rows of expert ids [tokens, top_k].
place_pairs = Op(
    "place_pairs",
    arguments=("tk",),
    results=lambda plan: list(_PLAN),
    kernels=launchers.place_pairs,
    xla=reference.place_pairs_reference,
)

# Plans the rows of a mask [tokens, experts] whose every expert is kept.
place_mask = Op(
    "place_mask",
    arguments=("te",),
    results=lambda plan: list(_PLAN),
    kernels=launchers.place_mask,
    xla=reference.place_mask_reference,
)

select_experts = Op(
    "select_experts",
    arguments=("te",),
    results="tk",
    kernels=launchers.select_experts,
    xla=reference.select_experts_reference,
)


def make_plan(
    selected: jax.Array, num_experts: int, *, implementation: Implementation | None, **sizes: Any
) -> Plan:
    """Plans the rows of int32 expert ids [tokens, top_k]; `sizes` are those of `_sizes`."""
    sizes = _sizes(selected.size, num_experts, **sizes)
    return _named(_place(selected, num_experts, sizes, implementation))


def make_plan_from_mask(
    mask: jax.Array, top_k: int, *, implementation: Implementation | None, **sizes: Any
) -> Plan:
    """Plans the rows of the first `top_k` experts in each token's mask [tokens, experts]."""
    num_tokens, num_experts = mask.shape
    sizes = _sizes(num_tokens * top_k, num_experts, **sizes)
    if top_k >= num_experts and num_experts > MAX_SORTED_EXPERTS:
        chosen = implementations.fit(implementation, mask) if num_tokens else "xla"
        return _named(place_mask(mask, top_k=top_k, **sizes, implementation=chosen))
    selected = first_experts(mask, top_k, implementation)
    plan = _place(selected, num_experts, sizes, implementation)
    counts = jnp.sum(is_nonzero(mask), axis=0, dtype=jnp.int32)
    num_dropped = plan.num_dropped + jnp.sum(counts - plan.group_counts, dtype=jnp.int32)
    return _named(dataclasses.replace(plan, group_counts=counts, num_dropped=num_dropped))


def first_experts(mask: jax.Array, top_k: int, implementation: Implementation | None) -> jax.Array:
    """Returns the first `top_k` experts in each token's mask, int32 [tokens, top_k], then -1."""
    chosen = implementations.fit(implementation, mask) if mask.shape[0] * top_k else "xla"
    selected: jax.Array = select_experts(mask, top_k=top_k, implementation=chosen)
    return selected


def _sizes(
    num_pairs: int,
    num_experts: int,
    capacity: int | None = None,
    num_rows: int | None = None,
    align_size: int = 1,
) -> dict[str, int]:
    """Returns the sizes of a plan, with the defaults for None."""
    if num_rows is None:
        num_rows = (num_pairs + num_experts * (align_size - 1)) // align_size * align_size
        num_rows = arguments.integer("num_rows", num_rows, 0)
    capacity = num_pairs if capacity is None else min(capacity, num_pairs)
    return {"num_rows": num_rows, "capacity": capacity, "align_size": align_size}


def _place(
    selected: jax.Array,
    num_experts: int,
    sizes: dict[str, int],
    implementation: Implementation | None,
) -> Plan:
    chosen = implementations.fit(implementation) if selected.size else "xla"
    plan: Plan = place_pairs(selected, num_experts=num_experts, **sizes, implementation=chosen)
    return plan


def _named(plan: Plan) -> Plan:
    return jax.tree.map(lambda array: checkpoint_name(array, "triax_plan"), plan)
