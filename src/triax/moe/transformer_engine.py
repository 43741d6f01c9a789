"""TransformerEngine's MoE permutation by its names, on Triax's plans and moves.

The functions take TransformerEngine's arguments and return its results, in its order, so that

    from triax.moe.transformer_engine import sort_chunks_by_index, token_combine, token_dispatch

stands where ``from transformer_engine.jax.permutation import …`` stood. Two keywords are new and
optional: `top_k` and `implementation`. Without `top_k` a token may go to every expert, and the map
between dispatch and combine is as wide as there are experts, twice over. With it the map is
`top_k` wide, and so is all the work that reads it: pass it wherever the router knows it.

New programs are better served by `triax.moe.make_plan`, `permute` and `unpermute`, which never
read anything as wide as the experts.

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
- What is wrong with an argument is told by an exception that names it, not by an assertion.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from triax.bridge.errors import ArgumentValueError
from triax.moe import arguments
from triax.moe.chunks import api as chunks
from triax.moe.permute import api as moves
from triax.moe.permute.reference import Permuted
from triax.moe.plan.api import Plan, make_plan_from_mask


class Dispatched(NamedTuple):
    """What `token_dispatch` returns: a tuple of five, in TransformerEngine's order.

    Attributes:
      output: [rows, hidden], the tokens grouped by expert, zeros where there is none.
      permuted_probs: [rows], the prob of each row's (token, expert); None if none were given.
      row_id_map: int32 [tokens, 2 * top_k + 1], for `token_combine`: for each slot the row,
        alignment left out of account; for each slot the expert; and how many slots have a row.
        Slots past those hold -1.
      pad_offsets: int32 [experts], the pad rows before each expert's; None without alignment.
      tokens_per_expert: int32 [experts], the rows of each expert, its pad rows included.
    """

    output: jax.Array
    permuted_probs: jax.Array | None
    row_id_map: jax.Array
    pad_offsets: jax.Array | None
    tokens_per_expert: jax.Array


def token_dispatch(
    inp: Any,
    routing_map: Any,
    num_out_tokens: int,
    probs: Any = None,
    align_size: int | None = None,
    *,
    top_k: int | None = None,
    implementation: str | None = None,
) -> Dispatched:
    """Copies every token to the rows of its experts.

        out, _, row_id_map, pad_offsets, group_sizes = token_dispatch(x, mask, num_out_tokens)
        y = jax.lax.ragged_dot(out, w, group_sizes)
        x = token_combine(y, row_id_map, probs, pad_offsets)

    The gradient of a token is the sum of those of its rows; probs get back theirs.

    Args:
      inp: [tokens, hidden] or [batch, sequence, hidden], any dtype.
      routing_map: bool or integer [tokens, experts] or [batch, sequence, experts]; not zero
        where a token is routed.
      num_out_tokens: the rows, before alignment; as many as the map routes, or more.
      probs: float, of the shape of `routing_map`, moved along; or None.
      align_size: each expert's rows are filled up to a multiple of it. The rows then are what
        the worst case needs,
        ``(num_out_tokens + experts * (align_size - 1)) // align_size * align_size``.
        None for no alignment.
      top_k: the most experts that a token is routed to; further ones are dropped. None for all
        experts, which makes the row map as wide.
      implementation: as for `triax.moe.permute`.

    Returns:
      `Dispatched`: output, permuted_probs, row_id_map, pad_offsets, tokens_per_expert.

    Raises:
      ArgumentTypeError: an argument is not of the type told here.
      ArgumentValueError: an argument has the wrong shape or is out of its range.
    """
    x = _as_table("inp", inp, "hidden")
    mask = _as_table("routing_map", routing_map, "experts")
    num_tokens, num_experts = mask.shape
    _check_tokens("inp", x, num_tokens, "routing_map")
    num_rows = arguments.integer("num_out_tokens", num_out_tokens, 0)
    align = 1
    if align_size is not None:
        align = arguments.integer("align_size", align_size, 1)
        num_rows = (num_rows + num_experts * (align - 1)) // align * align
    if probs is not None:
        probs = _as_table("probs", probs, "experts", jnp.floating)
        if probs.shape != mask.shape:
            raise ArgumentValueError(
                f"Argument `probs` must have a value for each of the {num_tokens} tokens and "
                f"{num_experts} experts of `routing_map`; got shape {probs.shape}. Scatter the "
                "router's weights to their experts, or use `triax.moe.permute`, which takes "
                "[tokens, top_k]."
            )
    plan = make_plan_from_mask(
        mask,
        num_experts if top_k is None else arguments.integer("top_k", top_k, 1),
        num_rows=num_rows,
        align_size=align,
        implementation=implementation,
    )
    weights = None if probs is None else _of_slots(probs, plan.expert_of)
    moved = moves.permute(x, plan, weights=weights, implementation=implementation)
    permuted = Permuted(moved, None, None) if weights is None else moved

    pads = plan.group_sizes - plan.group_filled
    pad_offsets = jnp.cumsum(pads, dtype=jnp.int32) - pads
    # Experts ascend from slot to slot, and what is dropped has the last rows: the slots with a
    # row come first.
    exists = plan.row_of >= 0
    row = jnp.where(exists, plan.row_of - pad_offsets[plan.expert_of], -1)
    expert = jnp.where(exists, plan.expert_of, -1)
    count = jnp.sum(exists, axis=1, keepdims=True, dtype=jnp.int32)
    return Dispatched(
        output=permuted.rows,
        permuted_probs=permuted.weights,
        row_id_map=jnp.concatenate([row, expert, count], axis=1),
        pad_offsets=None if align_size is None else pad_offsets,
        tokens_per_expert=plan.group_sizes,
    )


def token_combine(
    inp: Any,
    row_id_map: Any,
    merging_probs: Any = None,
    pad_offsets: Any = None,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Sums up the rows of every token, times its probs: the way back of `token_dispatch`.

    Args:
      inp: float [rows, hidden].
      row_id_map: integer [tokens, 2 * top_k + 1], from `token_dispatch`.
      merging_probs: float [tokens, experts] or [batch, sequence, experts]; None for all one.
      pad_offsets: integer [experts], from `token_dispatch` where it was given an `align_size`.
      implementation: as for `triax.moe.unpermute`.

    Returns:
      [tokens, hidden] in the dtype of `inp`, also where the dispatch was given three dimensions.

    Raises:
      ArgumentTypeError: an argument is not an array, or of the wrong dtype.
      ArgumentValueError: an argument has the wrong shape, or `implementation` is unknown.
    """
    rows = arguments.array("inp", inp, ("rows", "hidden"), jnp.floating)
    axes = ("tokens", "2 * top_k + 1")
    row_id_map = arguments.array("row_id_map", row_id_map, axes, jnp.integer)
    if row_id_map.shape[1] % 2 == 0:
        raise ArgumentValueError(
            "Argument `row_id_map` must have shape [tokens, 2 * top_k + 1]; got "
            f"{row_id_map.shape}. Pass the third result of `token_dispatch`."
        )
    num_tokens, top_k = row_id_map.shape[0], row_id_map.shape[1] // 2
    slot = jnp.arange(top_k, dtype=jnp.int32)
    exists = slot < row_id_map[:, -1:]
    row = jnp.where(exists, row_id_map[:, :top_k], -1).astype(jnp.int32)
    expert = jnp.where(exists, row_id_map[:, top_k:-1], -1).astype(jnp.int32)
    if pad_offsets is None:
        # Without alignment nothing lies between the experts' rows: they are one group.
        filled = jnp.sum(exists, dtype=jnp.int32)[None]
        sizes = filled
    else:
        offsets = arguments.array("pad_offsets", pad_offsets, ("experts",), jnp.integer)
        offsets = offsets.astype(jnp.int32)
        num_experts = offsets.shape[0]
        filled = jnp.zeros(num_experts, jnp.int32)
        filled = filled.at[_or_none(expert, num_experts)].add(1, mode="drop")
        # The last expert's pad rows are, with all that follows, rows past the groups.
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
        # What it was, nobody knows here; that there can be pad rows is all that matters.
        align_size=1 if pad_offsets is None else 2,
    )
    weights = None
    if merging_probs is not None:
        probs = _as_table("merging_probs", merging_probs, "experts", jnp.floating)
        _check_tokens("merging_probs", probs, num_tokens, "row_id_map")
        weights = _of_slots(probs, expert)
    return moves.unpermute(rows, plan, weights, implementation=implementation)


def sort_chunks_by_index(
    inp: Any, split_sizes: Any, sorted_indices: Any, *, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Cuts the rows of `inp` into chunks and puts the chunks into another order.

    `triax.moe.sort_chunks_by_index` does the same, moves probs along, and says what happens
    with sizes and indices that make no sense.

    Args:
      inp: [tokens, hidden] or [batch, sequence, hidden], any dtype.
      split_sizes: integer [chunks].
      sorted_indices: integer [chunks], a permutation of 0 to chunks - 1.
      implementation: as for `triax.moe.sort_chunks_by_index`.

    Returns:
      output: [tokens, hidden] in the dtype of `inp`.
      row_id_map: int32 [tokens], the row of the output that each row of `inp` went to. In a
        compiled program it costs nothing where nobody uses it.

    Raises:
      ArgumentTypeError: an argument is not an array, or of the wrong dtype.
      ArgumentValueError: an argument has the wrong shape, or `implementation` is unknown.
    """
    x = _as_table("inp", inp, "hidden")
    sort = chunks.sort_chunks_by_index
    output = sort(x, split_sizes, sorted_indices, implementation=implementation).rows
    # Where a row went to is what comes back to it when the numbers of the rows are sorted back.
    split_sizes, sorted_indices = jnp.asarray(split_sizes), jnp.asarray(sorted_indices)
    sizes, back = split_sizes[sorted_indices], jnp.argsort(sorted_indices)
    numbers = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
    return output, sort(numbers, sizes, back, implementation=implementation).rows[:, 0]


def _as_table(name: str, value: Any, last: str, kind: Any = None) -> jax.Array:
    """Returns an array of two or three dimensions as one of two, [tokens, `last`]."""
    ndim = getattr(value, "ndim", 2)
    if ndim not in (2, 3):
        raise ArgumentValueError(
            f"Argument `{name}` must have shape [tokens, {last}] or [batch, sequence, {last}]; "
            f"got {value.shape}. Reshape it."
        )
    if ndim == 3:
        value = value.reshape(value.shape[0] * value.shape[1], value.shape[2])
    return arguments.array(name, value, ("tokens", last), kind)


def _check_tokens(name: str, array: jax.Array, num_tokens: int, other: str) -> None:
    if array.shape[0] != num_tokens:
        raise ArgumentValueError(
            f"Argument `{name}` must have the {num_tokens} tokens of `{other}`; got "
            f"{array.shape[0]} tokens. Pass both with the same leading dimensions."
        )


def _or_none(expert: jax.Array, num_experts: int) -> jax.Array:
    """Experts, and one past the last where there is none: JAX counts -1 from the end."""
    return jnp.where(expert < 0, num_experts, expert)


def _of_slots(probs: jax.Array, expert_of: jax.Array) -> jax.Array:
    """The prob [tokens, top_k] of each slot's expert, 0 where the slot has none."""
    index = _or_none(expert_of, probs.shape[1])
    return jnp.take_along_axis(probs, index, axis=1, mode="fill", fill_value=0)
