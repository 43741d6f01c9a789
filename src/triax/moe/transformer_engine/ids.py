"""TransformerEngine's functions for routing by expert ids, and for turning a map into ids."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from triax import messages
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe.permutation import ops as moves
from triax.moe.plans.ops import first_experts, make_plan
from triax.moe.plans.reference import Plan
from triax.moe.shared import arguments
from triax.moe.shared import implementation as implementations
from triax.moe.shared.arguments import Array
from triax.moe.shared.implementation import Implementation
from triax.moe.transformer_engine import tables


class PureJaxPermState(NamedTuple):
    """The state that `pure_jax_token_dispatch` makes for `pure_jax_token_combine`.

    Attributes:
      plan: the row of each (token, slot).
    """

    plan: Plan


def routing_map_to_selected_experts(
    sparse_probs: Array,
    routing_map: Array,
    topk: int,
    *,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Turns a router's map and probs into expert ids and weights, for `pure_jax_token_dispatch`.

    Args:
      sparse_probs: float, of the shape of `routing_map`.
      routing_map: bool, integer or float [tokens, experts] or [batch, sequence, experts]; nonzero
        where a token is routed.
      topk: the most experts that a token is routed to.

    Returns:
      selected_experts: int32 [..., topk], a token's experts in ascending order, then -1.
      weights: [..., topk] in the dtype of `sparse_probs`, these experts' probs, then zeros.
    """
    mask = tables.as_mask(routing_map)
    probs = tables.as_table("sparse_probs", sparse_probs, "experts", jnp.floating)
    if probs.shape != mask.shape:
        raise ArgumentValueError(
            f"Argument `sparse_probs` must have the shape of `routing_map`, {routing_map.shape}; "
            f"got {sparse_probs.shape}."
        )
    topk = arguments.integer("topk", topk, 1)
    implementations.check(implementation, routing_map=mask)
    selected = first_experts(mask, topk, implementation)
    weights = tables.of_slots(probs, selected)
    shape = (*routing_map.shape[:-1], topk)
    return selected.reshape(shape), weights.reshape(shape)


def pure_jax_token_dispatch(
    inputs: Array,
    selected_experts: Array,
    num_experts: int,
    num_experts_per_tok: int,
    align_size: int = 0,
    roll_to_expert_id: int | None = None,
    *,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, PureJaxPermState, jax.Array]:
    """Copies every token to the rows of the experts given by `selected_experts`.

        rows, state, group_sizes = pure_jax_token_dispatch(x, ids, num_experts, top_k)
        y = jax.lax.ragged_dot(rows, w, group_sizes)
        x = pure_jax_token_combine(y, state, weights, top_k, batch, sequence)

    Args:
      inputs: [tokens, hidden] or [batch, sequence, hidden], any dtype.
      selected_experts: integer [tokens, num_experts_per_tok] or [batch, sequence, …].
      num_experts: all experts.
      num_experts_per_tok: the last dimension of `selected_experts`.
      align_size: each expert's rows are padded to a multiple of this; 0 for no padding.
      roll_to_expert_id: the expert whose rows come first, then rows of later experts, then rows of
        earlier ones. None for the order of the ids.

    Returns:
      sorted_inputs: [rows, hidden], the tokens grouped by expert, zeros in rows without a token.
      perm_state: for `pure_jax_token_combine`.
      group_sizes: int32 [num_experts], the rows of each group, pad rows included.
    """
    name = "num_experts_per_tok"
    ids = tables.as_table("selected_experts", selected_experts, name, jnp.integer)
    x = tables.as_table("inputs", inputs, "hidden", None, ids.shape[0], "`selected_experts`")
    num_experts = arguments.integer("num_experts", num_experts, 1)
    _check_slots("selected_experts", ids.shape, num_experts_per_tok)
    align_size = arguments.integer("align_size", align_size, 0)
    messages.check_sizes_known("selected_experts", ids.shape)
    arguments.check_pairs(ids.shape)
    implementations.check(implementation, inputs=x)
    ids = arguments.as_int32(ids)
    if roll_to_expert_id is not None:
        first = arguments.integer("roll_to_expert_id", roll_to_expert_id, 0) % num_experts
        known = (ids >= 0) & (ids < num_experts)
        ids = jnp.where(known, (ids - first) % num_experts, -1)
    options: dict[str, Any] = {"implementation": implementation}
    plan = make_plan(ids, num_experts, align_size=max(1, align_size), **options)
    return moves.permute(x, plan, **options).rows, PureJaxPermState(plan), plan.group_sizes


def pure_jax_token_combine(
    expert_outputs: Array,
    perm_state: PureJaxPermState,
    routing_weights: Array,
    num_experts_per_tok: int,
    batch_size: int,
    sequence_length: int,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Sums every token's rows, multiplied by its weights.

    Args:
      expert_outputs: float [rows, hidden].
      perm_state: from `pure_jax_token_dispatch`.
      routing_weights: float [tokens, num_experts_per_tok] or [batch, sequence, …].
      num_experts_per_tok: the last dimension of `routing_weights`.
      batch_size, sequence_length: the first two dimensions of the result.

    Returns:
      [batch_size, sequence_length, hidden] in the dtype of `expert_outputs`.
    """
    if not isinstance(perm_state, PureJaxPermState):
        raise ArgumentTypeError(
            "Argument `perm_state` must be the second result of `pure_jax_token_dispatch`; got "
            f"{messages.shown(perm_state)}."
        )
    name = "num_experts_per_tok"
    weights = tables.as_table("routing_weights", routing_weights, name, jnp.floating)
    _check_slots("routing_weights", weights.shape, num_experts_per_tok)
    plan = perm_state.plan
    of_plan: dict[str, Any] = {"sizes": {"rows": plan.num_rows}, "of": "`perm_state`"}
    axes = "rows", "hidden"
    rows = arguments.array("expert_outputs", expert_outputs, axes, jnp.floating, **of_plan)
    arguments.check_shape("routing_weights", weights.shape, plan.row_of.shape, "`perm_state`")
    implementations.check(implementation, expert_outputs=rows, routing_weights=weights)
    shape = (
        arguments.integer("batch_size", batch_size, 0),
        arguments.integer("sequence_length", sequence_length, 0),
    )
    if shape[0] * shape[1] != weights.shape[0]:
        raise ArgumentValueError(
            f"Arguments `batch_size` and `sequence_length` must make the {weights.shape[0]} tokens "
            f"of `routing_weights`; got {shape[0]} and {shape[1]}."
        )
    tokens = moves.unpermute(rows, plan, weights, implementation=implementation)
    return tokens.reshape(*shape, rows.shape[1])


def _check_slots(name: str, shape: tuple[int, ...], num_experts_per_tok: Any) -> None:
    if shape[-1] != arguments.integer("num_experts_per_tok", num_experts_per_tok, 0):
        raise ArgumentValueError(
            f"Argument `num_experts_per_tok` must be the last dimension of `{name}`, {shape[-1]}; "
            f"got {num_experts_per_tok}."
        )
