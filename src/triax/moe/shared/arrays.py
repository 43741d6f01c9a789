"""Array functions that several ops share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def take_rows(array: jax.Array, index: jax.Array, **mode: Any) -> jax.Array:
    """Takes rows of an array, bit for bit; `mode` is for indices out of range, as in `jnp.take`."""
    # Workaround: xla all, openxla/xla #34260: on CPUs, under vmap, it mixes up rows if both array
    # and index are constants.
    index = jax.lax.optimization_barrier(index)
    # Floats move as integers: on platforms without small floats XLA widens them even to gather, and
    # widening and narrowing changes NaNs.
    bits = jnp.finfo(array.dtype).bits if jnp.issubdtype(array.dtype, jnp.floating) else 0
    if bits not in (8, 16, 32, 64):
        return jnp.take(array, index, axis=0, **mode)
    words = jax.lax.bitcast_convert_type(array, f"uint{bits}")
    return jax.lax.bitcast_convert_type(jnp.take(words, index, axis=0, **mode), array.dtype)


def at_least_float32(dtype: Any) -> Any:
    """Returns the dtype in which floats are summed: float32, or float64 for float64.

    JAX's promotion would raise an error in its strict mode and for 8-bit floats.
    """
    return dtype if dtype.itemsize >= 4 else jnp.dtype(jnp.float32)


def is_nonzero(mask: jax.Array) -> jax.Array:
    """Returns a bool or integer mask as bools; JAX's strict mode does not compare bools with 0."""
    return mask if mask.dtype == jnp.bool_ else mask != 0


def stored(dtype: Any) -> Any:
    """Returns the dtype in which a kernel stores sums.

    For 8-bit floats it is float32, and JAX casts: GPUs saturate in such casts, and JAX does not.
    """
    return jnp.dtype(jnp.float32) if dtype.itemsize == 1 else dtype


def as_words(array: jax.Array | None) -> Any:
    """Reinterprets floats as integers: moves keep every bit, and dtypes share kernels."""
    if array is None or not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}")


def from_words(moved: jax.Array | None, original: jax.Array | None) -> Any:
    """Undoes `as_words`: returns a moved array in the dtype of the original."""
    if moved is None or original is None or moved.dtype == original.dtype:
        return moved
    return jax.lax.bitcast_convert_type(moved, original.dtype)


def absent(**outputs: object) -> dict[str, Any]:
    """Returns the arguments of a kernel for outputs that it lacks: None for each None given.

    The keywords are output parameters, each with the input that it needs.
    """
    return {name: None for name, source in outputs.items() if source is None}


def running_sum(sizes: jax.Array, limit: int) -> jax.Array:
    """Returns running sums of sizes in [0, limit], clamped to `limit` so that none wraps around."""
    add = lambda a, b: a + jnp.minimum(b, limit - a)
    return jax.lax.associative_scan(add, sizes)
