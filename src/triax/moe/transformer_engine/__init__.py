"""TransformerEngine's MoE functions, under its names, made of Triax's ops.

The functions take TransformerEngine's arguments and return its results, in its order, so in

    from transformer_engine.jax.dense import grouped_dense
    from transformer_engine.jax.permutation import sort_chunks_by_index, token_dispatch
    from transformer_engine.jax.router import fused_topk_with_score_function

replace `transformer_engine.jax.dense`, `.permutation` and `.router` by
`triax.moe.transformer_engine`. New programs should use `triax.moe.route`, `make_plan`, `permute`,
`ragged_dot` and `unpermute`: apart from the logits, these read no array with a column per expert.

Two keywords are new and optional. `top_k` is the most experts that a token is routed to. Without it
a token may go to every expert, so the map between dispatch and combine has two columns per expert.
Unused entries cost no move, but they are written and read. `implementation` means the same as in
Triax's ops.

All functions raise `ArgumentTypeError` for an argument of the wrong type or dtype, and
`ArgumentValueError` for a wrong shape or a value out of range.

These differences from TransformerEngine are intended:

- A row with a probability of zero still holds the token. In TransformerEngine it becomes zero.
- NaNs stay NaNs. In TransformerEngine the gradient of a padded combine replaces all NaNs by zeros,
  even NaNs that come from the backward pass.
- Nothing is written out of bounds. Pairs that do not fit into `num_out_tokens` are dropped, get no
  gradient, and are not counted in `tokens_per_expert`, which can therefore go into
  `jax.lax.ragged_dot`. TransformerEngine writes them past the end of the buffer.
- Rows without a token are exactly zero, in results and in gradients. In TransformerEngine they are
  undefined.
- `tokens_per_expert` is always [experts]. TransformerEngine sums a three-dimensional map over the
  batch only.
- Row maps hold a token's experts in ascending order, then -1. In TransformerEngine the order
  descends and the rest is undefined. `token_combine` reads both.
- The gradient of unrouted probabilities is exactly zero, whatever the rows contain.
- In a float map every nonzero entry is routed.
- `pure_jax_token_dispatch` rounds the number of rows down to a multiple of `align_size`, as
  `token_dispatch` does. `group_sizes` are always in the order of the rows. An id outside [0,
  num_experts) is not routed. The state it returns holds a plan.
- `pure_jax_token_combine` sums in float32 or wider and rounds once.
- `routing_map_to_selected_experts` takes the first `topk` experts of a token. A token with fewer
  experts gets ids of -1 with weight zero, which are not routed. TransformerEngine puts other
  experts there.
- `grouped_dense` takes the arguments after `bias` by name only, honours `precision`, and also takes
  a kernel that is contracted over its last dimension. Rows past the groups are zero. Quantizers,
  `kernel_fsdp_info` and `kernel_amax` are refused.
- Of equal scores the lowest expert is chosen first, as in `jax.lax.top_k`. Scores are always
  computed in float32, and scores for the auxiliary loss are returned in float32.
"""

from triax.moe.transformer_engine.all_to_all import (
    compute_ragged_all_to_all_params as compute_ragged_all_to_all_params,
)
from triax.moe.transformer_engine.all_to_all import (
    compute_reverse_ragged_all_to_all_params as compute_reverse_ragged_all_to_all_params,
)
from triax.moe.transformer_engine.all_to_all import (
    local_permute_after_a2a as local_permute_after_a2a,
)
from triax.moe.transformer_engine.all_to_all import (
    local_unpermute_before_a2a as local_unpermute_before_a2a,
)
from triax.moe.transformer_engine.chunks import sort_chunks_by_index as sort_chunks_by_index
from triax.moe.transformer_engine.dense import grouped_dense as grouped_dense
from triax.moe.transformer_engine.ids import PureJaxPermState as PureJaxPermState
from triax.moe.transformer_engine.ids import pure_jax_token_combine as pure_jax_token_combine
from triax.moe.transformer_engine.ids import pure_jax_token_dispatch as pure_jax_token_dispatch
from triax.moe.transformer_engine.ids import (
    routing_map_to_selected_experts as routing_map_to_selected_experts,
)
from triax.moe.transformer_engine.maps import TokenDispatch as TokenDispatch
from triax.moe.transformer_engine.maps import token_combine as token_combine
from triax.moe.transformer_engine.maps import token_dispatch as token_dispatch
from triax.moe.transformer_engine.router import RoutingMapFormat as RoutingMapFormat
from triax.moe.transformer_engine.router import ScoreFunction as ScoreFunction
from triax.moe.transformer_engine.router import fused_moe_aux_loss as fused_moe_aux_loss
from triax.moe.transformer_engine.router import (
    fused_topk_with_score_function as fused_topk_with_score_function,
)

__all__ = [
    "PureJaxPermState",
    "RoutingMapFormat",
    "ScoreFunction",
    "TokenDispatch",
    "compute_ragged_all_to_all_params",
    "compute_reverse_ragged_all_to_all_params",
    "fused_moe_aux_loss",
    "fused_topk_with_score_function",
    "grouped_dense",
    "local_permute_after_a2a",
    "local_unpermute_before_a2a",
    "pure_jax_token_combine",
    "pure_jax_token_dispatch",
    "routing_map_to_selected_experts",
    "sort_chunks_by_index",
    "token_combine",
    "token_dispatch",
]
