"""Array functions that several ops share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def take_rows(array: jax.Array, index: jax.Array, **mode: Any) -> jax.Array:
    """Rows of an array, bit for bit; `mode` handles indices out of range, as in `jnp.take`."""
    # Workaround: xla all, openxla/xla #34260: on CPUs, under vmap, it mixes up rows of constants
    # that are taken by constants.
    index = jax.lax.optimization_barrier(index)
    # Floats move as integers: on platforms without small floats XLA converts them to larger ones
    # even to gather, and converting there and back changes NaNs.
    bits = jnp.finfo(array.dtype).bits if jnp.issubdtype(array.dtype, jnp.floating) else 0
    if bits not in (8, 16, 32, 64):
        return jnp.take(array, index, axis=0, **mode)
    words = jax.lax.bitcast_convert_type(array, f"uint{bits}")
    return jax.lax.bitcast_convert_type(jnp.take(words, index, axis=0, **mode), array.dtype)


def at_least_float32(dtype: Any) -> Any:
    """What floats are summed in: float32, or float64 for those. Not by JAX's promotion, which is an
    error in its strict mode and for 8 bits."""
    return dtype if dtype.itemsize >= 4 else jnp.dtype(jnp.float32)


def is_nonzero(mask: jax.Array) -> jax.Array:
    """A mask of bools or integers as bools. (JAX's strict mode compares no bool with 0.)"""
    return mask if mask.dtype == jnp.bool_ else mask != 0


def stored(dtype: Any) -> Any:
    """The dtype in which a kernel stores sums.

    Not an 8-bit float: GPUs saturate in casts to these, and JAX, which casts afterwards, does not.
    """
    return jnp.dtype(jnp.float32) if dtype.itemsize == 1 else dtype


def as_words(array: jax.Array | None) -> Any:
    """Floats as integers of their size: a move keeps every bit, and dtypes share kernels."""
    if array is None or not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}")


def from_words(moved: jax.Array | None, original: jax.Array | None) -> Any:
    """The way back of `as_words`, to the dtype of what was moved."""
    if moved is None or original is None or moved.dtype == original.dtype:
        return moved
    return jax.lax.bitcast_convert_type(moved, original.dtype)


def absent(**outputs: jax.Array | None) -> dict[str, Any]:
    """None for each output parameter of a kernel whose input is None."""
    return {name: None for name, source in outputs.items() if source is None}


def running_sum(sizes: jax.Array, limit: int) -> jax.Array:
    """Inclusive sums of sizes in [0, limit], clamped to `limit` so that they cannot wrap around."""
    add = lambda a, b: a + jnp.minimum(b, limit - a)
    return jax.lax.associative_scan(add, sizes)
