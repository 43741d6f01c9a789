"""Checks of TransformerEngine's arguments, which have two or three dimensions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from triax.compat import jax_private
from triax.errors import ArgumentValueError
from triax.moe.shared import arguments
from triax.sharding import explicit


def as_table(
    name: str,
    value: Any,
    last: str,
    dtype_class: Any = None,
    num_tokens: int | None = None,
    of: str = "",
) -> jax.Array:
    """Returns an array of two or three dimensions as [tokens, `last`].

    An array that is sharded over explicit axes of a mesh is gathered, except along a `last` of
    "hidden". There must be `num_tokens`, if given: those of another argument, `of`.
    """
    ndim = getattr(value, "ndim", 2)
    if ndim not in (2, 3):
        raise ArgumentValueError(
            f"Argument `{name}` must have shape [tokens, {last}] or [batch, sequence, {last}]; "
            f"got {value.shape}. Reshape it."
        )
    if jax_private.is_array(value):
        value = explicit.gathered(value, *([ndim - 1] if last == "hidden" else []))
    if ndim == 3:
        value = value.reshape(value.shape[0] * value.shape[1], value.shape[2])
    sizes = {} if num_tokens is None else {"tokens": num_tokens}
    return arguments.array(name, value, ("tokens", last), dtype_class, sizes=sizes, of=of)


def as_mask(routing_map: Any) -> jax.Array:
    """Returns a map of two or three dimensions as [tokens, experts], floats as booleans."""
    mask = as_table("routing_map", routing_map, "experts")
    return mask != 0 if jnp.issubdtype(mask.dtype, jnp.floating) else mask


def or_none(expert: jax.Array, num_experts: int) -> jax.Array:
    """Replaces -1, which JAX would count from the end, by `num_experts`."""
    return jnp.where(expert < 0, num_experts, expert)


def of_slots(probs: jax.Array, expert_of: jax.Array) -> jax.Array:
    """Returns the prob [tokens, top_k] of each slot's expert, 0 for a slot without an expert."""
    index = or_none(expert_of, probs.shape[1])
    return jnp.take_along_axis(probs, index, axis=1, mode="fill", fill_value=0)
