"""`token_dispatch` and `token_combine`: routing by a map, [tokens, experts]."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from triax.errors import ArgumentValueError
from triax.moe.permutation import ops as moves
from triax.moe.plans.ops import make_plan_from_mask
from triax.moe.plans.reference import Plan
from triax.moe.shared import arguments
from triax.moe.shared import implementation as implementations
from triax.moe.shared.arguments import Array
from triax.moe.shared.implementation import Implementation
from triax.moe.transformer_engine import tables
from triax.sharding import explicit


class TokenDispatch(NamedTuple):
    """The result of `token_dispatch`: a tuple of five, in TransformerEngine's order.

    Attributes:
      output: [rows, hidden], the tokens grouped by expert, zeros in rows without a token.
      permuted_probs: [rows], the prob of each row's (token, expert); None if none were given.
      row_id_map: int32 [tokens, 2 * top_k + 1], for `token_combine`: the row of each slot, not
        counting pad rows; the expert of each slot; and how many slots have a row. The other slots
        hold -1.
      pad_offsets: int32 [experts], the pad rows before each expert's rows; None without padding.
      tokens_per_expert: int32 [experts], the rows of each expert, including its pad rows.
    """

    output: jax.Array
    permuted_probs: jax.Array | None
    row_id_map: jax.Array
    pad_offsets: jax.Array | None
    tokens_per_expert: jax.Array


def token_dispatch(
    inp: Array,
    routing_map: Array,
    num_out_tokens: int,
    probs: Array | None = None,
    align_size: int | None = None,
    *,
    top_k: int | None = None,
    implementation: Implementation | None = None,
) -> TokenDispatch:
    """Copies every token to the rows of its experts.

        out, _, row_id_map, pad_offsets, group_sizes = token_dispatch(x, mask, num_out_tokens)
        y = jax.lax.ragged_dot(out, w, group_sizes)
        x = token_combine(y, row_id_map, probs, pad_offsets)

    Args:
      inp: [tokens, hidden] or [batch, sequence, hidden], any dtype.
      routing_map: bool, integer or float [tokens, experts] or [batch, sequence, experts]; nonzero
        where a token is routed.
      num_out_tokens: the number of rows without padding, at least as many as the map routes.
      probs: float, of the shape of `routing_map`, moved with the tokens; or None.
      align_size: each expert's rows are padded to a multiple of this, and there are
        ``(num_out_tokens + experts * (align_size - 1)) // align_size * align_size`` rows, enough
        for the worst case. None for no padding.
      top_k: the most experts that a token is routed to; further experts are dropped. None for all
        experts, which makes the row map two columns per expert wide.

    Returns:
      `TokenDispatch`: output, permuted_probs, row_id_map, pad_offsets, tokens_per_expert.
    """
    mask = tables.as_mask(routing_map)
    arguments.check_mask("routing_map", mask)
    num_tokens, num_experts = mask.shape
    x = tables.as_table("inp", inp, "hidden", None, num_tokens, "`routing_map`")
    num_rows = arguments.integer("num_out_tokens", num_out_tokens, 0)
    align = 1
    if align_size is not None:
        align = arguments.integer("align_size", align_size, 1)
        num_rows = (num_rows + num_experts * (align - 1)) // align * align
    if probs is not None:
        probs = tables.as_table("probs", probs, "experts", jnp.floating)
        if probs.shape != mask.shape:
            raise ArgumentValueError(
                f"Argument `probs` must have a value for each of the {num_tokens} tokens and "
                f"{num_experts} experts of `routing_map`; got shape {probs.shape}. Scatter the "
                "router's weights to their experts, or use `triax.moe.permute`, which takes "
                "[tokens, top_k]."
            )
    top_k = num_experts if top_k is None else arguments.integer("top_k", top_k, 1)
    arguments.check_pairs((num_tokens, top_k))
    implementations.check(implementation, inp=x, routing_map=mask, probs=probs)
    options: dict[str, Any] = {"implementation": implementation}
    plan = make_plan_from_mask(mask, top_k, num_rows=num_rows, align_size=align, **options)
    weights = None if probs is None else tables.of_slots(probs, plan.expert_of)
    permuted = moves.permute(x, plan, weights, **options)

    pads = plan.group_sizes - plan.group_filled
    pad_offsets = jnp.cumsum(pads, dtype=jnp.int32) - pads
    # Only pairs past the last row are dropped, those of the last experts. Experts ascend from slot
    # to slot, so a token's slots with a row come first.
    exists = plan.row_of >= 0
    row = jnp.where(exists, plan.row_of - pad_offsets[plan.expert_of], -1)
    expert = jnp.where(exists, plan.expert_of, -1)
    count = jnp.sum(exists, axis=1, keepdims=True, dtype=jnp.int32)
    return TokenDispatch(
        output=permuted.rows,
        permuted_probs=permuted.weights,
        row_id_map=jnp.concatenate([row, expert, count], axis=1),
        pad_offsets=None if align_size is None else pad_offsets,
        tokens_per_expert=plan.group_sizes,
    )


def token_combine(
    inp: Array,
    row_id_map: Array,
    merging_probs: Array | None = None,
    pad_offsets: Array | None = None,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Sums every token's rows, multiplied by its probs: the inverse of `token_dispatch`.

    Args:
      inp: float [rows, hidden].
      row_id_map: integer [tokens, 2 * top_k + 1], from `token_dispatch`.
      merging_probs: float [tokens, experts] or [batch, sequence, experts]; None for all one.
      pad_offsets: integer [experts], from `token_dispatch` if it was given an `align_size`.

    Returns:
      [tokens, hidden] in the dtype of `inp`, even if the dispatched array had three dimensions.
    """
    rows = arguments.array("inp", inp, ("rows", "hidden"), jnp.floating)
    axes = ("tokens", "2 * top_k + 1")
    row_id_map = arguments.array("row_id_map", row_id_map, axes, jnp.integer)
    if row_id_map.shape[1] % 2 == 0:
        raise ArgumentValueError(
            "Argument `row_id_map` must have shape [tokens, 2 * top_k + 1]; got "
            f"{row_id_map.shape}. Pass the third result of `token_dispatch`."
        )
    row_id_map = explicit.gathered(row_id_map)
    num_tokens, top_k = row_id_map.shape[0], row_id_map.shape[1] // 2
    row_id_map = arguments.as_int32(row_id_map)
    exists = jnp.arange(top_k, dtype=jnp.int32)[None, :] < row_id_map[:, -1:]
    row = jnp.where(exists, row_id_map[:, :top_k], -1)
    expert = jnp.where(exists, row_id_map[:, top_k:-1], -1)
    if pad_offsets is None:
        # Without alignment no pad rows lie between the experts' rows: all rows are one group.
        filled = jnp.sum(exists, dtype=jnp.int32)[None]
        sizes = filled
    else:
        offsets = arguments.array("pad_offsets", pad_offsets, ("experts",), jnp.integer)
        offsets = arguments.as_int32(explicit.gathered(offsets))
        num_experts = offsets.shape[0]
        filled = jnp.zeros(num_experts, jnp.int32)
        filled = filled.at[tables.or_none(expert, num_experts)].add(1, mode="drop")
        # The last expert's pad rows count as rows past the groups.
        sizes = filled + jnp.diff(offsets, append=offsets[-1:])
        padding = jnp.take(offsets, expert, mode="fill", fill_value=0)
        row = jnp.where(exists, row + padding, -1)
    plan = Plan(
        row_of=row,
        expert_of=expert,
        group_sizes=sizes,
        group_counts=filled,
        group_filled=filled,
        num_dropped=jnp.zeros((), jnp.int32),
        num_rows=rows.shape[0],
        num_experts=sizes.shape[0],
        # `unpermute` only asks whether this is 1, which means that there are no pad rows.
        align_size=1 if pad_offsets is None else 2,
    )
    weights = None
    if merging_probs is not None:
        of = "experts", jnp.floating, num_tokens, "`row_id_map`"
        probs = tables.as_table("merging_probs", merging_probs, *of)
        weights = tables.of_slots(probs, expert)
    implementations.check(implementation, inp=rows, merging_probs=weights)
    return moves.unpermute(rows, plan, weights, implementation=implementation)
