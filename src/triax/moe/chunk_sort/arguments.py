"""Checks the arguments of the chunk sort, under a public function's names."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from triax import messages
from triax.errors import ArgumentValueError
from triax.moe.shared import arguments
from triax.moe.shared import implementation as implementations
from triax.moe.shared.implementation import Implementation


def checked(
    x: Any,
    split_sizes: Any,
    sorted_indices: Any,
    probs: Any = None,
    *,
    implementation: Implementation | None,
    name: str = "x",
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Returns the arguments of `sort_chunks_by_index`, checked; `name` is the caller's for `x`."""
    x = arguments.array(name, x, ("tokens", "hidden"))
    split_sizes = arguments.array("split_sizes", split_sizes, ("chunks",), jnp.integer)
    messages.check_sizes_known(name, x.shape)
    num_rows, num_chunks = x.shape[0], split_sizes.shape[0]
    if num_rows > arguments.MAX_ROWS:
        raise ArgumentValueError(
            f"Argument `{name}` must have at most 2**31 - 1 rows; got {num_rows}. Sort it in parts."
        )
    sorted_indices = arguments.array(
        "sorted_indices",
        sorted_indices,
        ("chunks",),
        jnp.integer,
        sizes={"chunks": num_chunks},
        of="`split_sizes`",
    )
    if probs is not None:
        sizes = {"tokens": num_rows}
        of = f"`{name}`"
        probs = arguments.array("probs", probs, ("tokens",), jnp.floating, sizes=sizes, of=of)
    implementations.check(implementation, **{name: x}, probs=probs)
    split_sizes, sorted_indices = map(arguments.as_int32, (split_sizes, sorted_indices))
    return x, split_sizes, sorted_indices, probs
