"""MoE layers with gradients: routing, moving tokens to experts and back, grouped matmuls."""

from triax.moe.activations.api import glu as glu
from triax.moe.activations.reference import Swiglu as Swiglu
from triax.moe.checkpoint import Checkpoint as Checkpoint
from triax.moe.checkpoint import linear_from_checkpoint as linear_from_checkpoint
from triax.moe.chunk_sort.api import sort_chunks_by_index as sort_chunks_by_index
from triax.moe.chunk_sort.reference import Sorted as Sorted
from triax.moe.expert_parallel.api import combine as combine
from triax.moe.expert_parallel.api import dispatch as dispatch
from triax.moe.expert_parallel.arrivals import Dispatched as Dispatched
from triax.moe.expert_parallel.arrivals import DispatchPlan as DispatchPlan
from triax.moe.layer.api import feed_forward as feed_forward
from triax.moe.layer.experts import Experts as Experts
from triax.moe.layer.parts import FeedForward as FeedForward
from triax.moe.layer.recipes import Recipe as Recipe
from triax.moe.permutation.api import permute as permute
from triax.moe.permutation.api import unpermute as unpermute
from triax.moe.permutation.reference import Permuted as Permuted
from triax.moe.plans.api import make_plan as make_plan
from triax.moe.plans.api import make_plan_from_mask as make_plan_from_mask
from triax.moe.plans.reference import Plan as Plan
from triax.moe.products.api import ragged_dot as ragged_dot
from triax.moe.quantization.api import quantize as quantize
from triax.moe.quantization.checkpoints import from_8_bits as from_8_bits
from triax.moe.quantization.checkpoints import from_awq as from_awq
from triax.moe.quantization.checkpoints import from_compressed_tensors as from_compressed_tensors
from triax.moe.quantization.checkpoints import from_gptq as from_gptq
from triax.moe.quantization.checkpoints import from_mxfp4 as from_mxfp4
from triax.moe.quantization.checkpoints import from_nvfp4 as from_nvfp4
from triax.moe.quantization.scaled import ScaledArray as ScaledArray
from triax.moe.router.api import route as route
from triax.moe.router.losses import load_balancing_loss as load_balancing_loss
from triax.moe.router.losses import router_z_loss as router_z_loss
from triax.moe.router.reference import Routing as Routing
from triax.moe.router.router import Router as Router

__all__ = [
    "Checkpoint",
    "DispatchPlan",
    "Dispatched",
    "Experts",
    "FeedForward",
    "Permuted",
    "Plan",
    "Recipe",
    "Router",
    "Routing",
    "ScaledArray",
    "Sorted",
    "Swiglu",
    "combine",
    "dispatch",
    "feed_forward",
    "from_8_bits",
    "from_awq",
    "from_compressed_tensors",
    "from_gptq",
    "from_mxfp4",
    "from_nvfp4",
    "glu",
    "linear_from_checkpoint",
    "load_balancing_loss",
    "make_plan",
    "make_plan_from_mask",
    "permute",
    "quantize",
    "ragged_dot",
    "route",
    "router_z_loss",
    "sort_chunks_by_index",
    "unpermute",
]


def __dir__() -> list[str]:
    """The public names, and not the packages that they come from."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
