"""Array functions that several ops share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def take_rows(array: jax.Array, index: jax.Array, **mode: Any) -> jax.Array:
    """Rows of an array, bit for bit; `mode` handles indices out of range, as in `jnp.take`."""
    # Floats move as integers: on platforms without small floats XLA converts them to larger ones
    # even to gather, and converting there and back changes NaNs.
    bits = jnp.finfo(array.dtype).bits if jnp.issubdtype(array.dtype, jnp.floating) else 0
    if bits not in (8, 16, 32, 64):
        return jnp.take(array, index, axis=0, **mode)
    words = jax.lax.bitcast_convert_type(array, f"uint{bits}")
    return jax.lax.bitcast_convert_type(jnp.take(words, index, axis=0, **mode), array.dtype)


def stored(dtype: Any) -> Any:
    """The dtype in which a kernel stores sums.

    Not an 8-bit float: GPUs saturate in casts to these, and JAX, which casts afterwards, does not.
    """
    return jnp.dtype(jnp.float32) if dtype.itemsize == 1 else dtype


def absent(**outputs: jax.Array | None) -> dict[str, Any]:
    """None for each output parameter of a kernel whose input is None."""
    return {name: None for name, source in outputs.items() if source is None}


def running_sum(sizes: jax.Array, limit: int) -> jax.Array:
    """Inclusive sums of sizes in [0, limit], clamped to `limit` so that they cannot wrap around."""
    add = lambda a, b: a + jnp.minimum(b, limit - a)
    return jax.lax.associative_scan(add, sizes)
