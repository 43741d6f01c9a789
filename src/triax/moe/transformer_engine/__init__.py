"""TransformerEngine's MoE permutation and router by its names, on Triax's plans, moves and router.

The functions take TransformerEngine's arguments and return its results, in its order, so that

    from triax.moe.transformer_engine import sort_chunks_by_index, token_combine, token_dispatch

stands where ``from transformer_engine.jax.permutation import …`` stood. Two keywords are new and
optional: `top_k` and `implementation`. Without `top_k` a token may go to every expert, and the map
between dispatch and combine is as wide as there are experts, twice over. The moves stop where a
token's experts end, but the map has to be written and read: pass `top_k` where the router knows it.

`pure_jax_token_dispatch` and `pure_jax_token_combine` take expert ids in place of a map. Here they
are the same plans and moves, and run the same kernels on CUDA.

`fused_topk_with_score_function`, `fused_moe_aux_loss`, `ScoreFunction` and `RoutingMapFormat` stand
where ``from transformer_engine.jax.router import …`` stood.

New programs are better served by `triax.moe.route`, `make_plan`, `permute` and `unpermute`, which
read nothing as wide as the experts but the logits.

What differs from TransformerEngine, on purpose:

- A probability of zero is a probability: the row is still the token. There it makes the row zero.
- NaNs stay. There the gradient of a padded combine has all NaNs replaced by zeros, also those
  that the backward pass came with.
- Nothing is written past the rows there are. Pairs that do not fit into `num_out_tokens` are
  dropped, get no gradient, and are missing from `tokens_per_expert`, which so can go into
  `jax.lax.ragged_dot`. There they are written past the end of the buffer.
- Rows without a token, in results and in gradients, are exactly zero, not left as they were.
- With a map of three dimensions `tokens_per_expert` is still [experts]. There it is summed over
  the batch only.
- Row maps hold a token's experts in ascending order, and -1 past the last. There the order
  descends and the rest is undefined. `token_combine` reads both.
- The gradient of unrouted probabilities is exactly zero, whatever stands in the rows.
- Of a map of floats, too, everything that is not zero is routed.
- `pure_jax_token_dispatch` rounds the rows down to a multiple of `align_size`, as `token_dispatch`
  does, and `group_sizes` are in the order of the rows also where experts are rolled without
  alignment. An id outside [0, num_experts) is not routed. What it returns as state holds a plan.
- `pure_jax_token_combine` sums in float32 or wider and rounds once.
- `routing_map_to_selected_experts` takes the first `topk` experts of a token, and where there are
  fewer fills up with -1, not routed, and weight zero. There it fills up with other experts.
- Of equal scores the lowest expert is chosen first, as by `jax.lax.top_k`. Scores are computed in
  float32 whatever the logits are, and those for the auxiliary loss come back in it.
- What is wrong with an argument is told by an exception that names it, not by an assertion.
"""

from triax.moe.transformer_engine.chunks import sort_chunks_by_index as sort_chunks_by_index
from triax.moe.transformer_engine.ids import PureJaxPermState as PureJaxPermState
from triax.moe.transformer_engine.ids import pure_jax_token_combine as pure_jax_token_combine
from triax.moe.transformer_engine.ids import pure_jax_token_dispatch as pure_jax_token_dispatch
from triax.moe.transformer_engine.ids import (
    routing_map_to_selected_experts as routing_map_to_selected_experts,
)
from triax.moe.transformer_engine.maps import Dispatched as Dispatched
from triax.moe.transformer_engine.maps import token_combine as token_combine
from triax.moe.transformer_engine.maps import token_dispatch as token_dispatch
from triax.moe.transformer_engine.router import RoutingMapFormat as RoutingMapFormat
from triax.moe.transformer_engine.router import ScoreFunction as ScoreFunction
from triax.moe.transformer_engine.router import fused_moe_aux_loss as fused_moe_aux_loss
from triax.moe.transformer_engine.router import (
    fused_topk_with_score_function as fused_topk_with_score_function,
)

__all__ = [
    "Dispatched",
    "PureJaxPermState",
    "RoutingMapFormat",
    "ScoreFunction",
    "fused_moe_aux_loss",
    "fused_topk_with_score_function",
    "pure_jax_token_combine",
    "pure_jax_token_dispatch",
    "routing_map_to_selected_experts",
    "sort_chunks_by_index",
    "token_combine",
    "token_dispatch",
]
