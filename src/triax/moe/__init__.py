"""MoE routing: tokens to their experts and back, with gradients, at the speed of memory."""

from triax.moe.chunks.api import Sorted as Sorted
from triax.moe.chunks.api import sort_chunks_by_index as sort_chunks_by_index
from triax.moe.permute.api import permute as permute
from triax.moe.permute.api import unpermute as unpermute
from triax.moe.permute.reference import Permuted as Permuted
from triax.moe.plan.api import Plan as Plan
from triax.moe.plan.api import make_plan as make_plan
from triax.moe.plan.api import make_plan_from_mask as make_plan_from_mask

__all__ = [
    "Permuted",
    "Plan",
    "Sorted",
    "make_plan",
    "make_plan_from_mask",
    "permute",
    "sort_chunks_by_index",
    "unpermute",
]
