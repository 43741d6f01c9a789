"""Packs 4-bit numbers, two to a byte, and decodes scales that are powers of two.

The lower half of a byte holds the first of its two numbers along the last dimension, as in
gpt-oss's checkpoint and in the int32 words of GPTQ.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

PACKED = tuple(map(np.dtype, (ml_dtypes.float4_e2m1fn, ml_dtypes.int4)))
"""The 4-bit dtypes, whose numbers are stored two to a byte."""

E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
"""A scale of 8 bits: 2**(code - 127), and NaN for the code 255."""


def pack(codes: jax.Array) -> jax.Array:
    """Packs the lowest four bits of integers [..., n] into bytes [..., n / 2]."""
    codes = codes & 15
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(jnp.uint8)


def unpack(values: jax.Array, packed: str, dtype: Any) -> jax.Array:
    """Unpacks bytes [..., n / 2] to floats [..., n], exactly."""
    both = jnp.repeat(values.astype(jnp.int32), 2, axis=-1)
    odd = jax.lax.broadcasted_iota(jnp.int32, both.shape, both.ndim - 1) & 1
    code = both >> 4 * odd & 15
    if packed == "int4":
        return ((code ^ 8) - 8).astype(dtype)
    size = code & 7
    # Twice the number: 0, 1, 2, 3, 4, 6, 8, 12.
    twice = jnp.where(size < 2, size, (2 | size & 1) << jnp.maximum((size >> 1) - 1, 0))
    number = twice.astype(dtype) * 0.5
    return jnp.where(code >= 8, -number, number)


def powers_of_two(codes: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Returns two factors of the powers that E8M0 codes stand for, neither of them subnormal.

    XLA flushes subnormals to zero on CPUs, and 2**-127 is subnormal in float32.
    """
    codes = codes.astype(jnp.int32)
    bits = jnp.where(codes == 255, 0x7FC00000, jnp.maximum(codes, 1) << 23)
    powers = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return powers.astype(dtype), jnp.where(codes == 0, 0.5, 1).astype(dtype)
