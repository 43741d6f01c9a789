"""The ops of plans: integers, which have no derivative."""

from __future__ import annotations

from triax.moe.plans import launchers, reference
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
