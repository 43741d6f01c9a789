"""Makes scaled arrays from the arrays of quantized checkpoints."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from triax import messages
from triax.compat import jax_private
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe.quantization.packing import E8M0
from triax.moe.quantization.scaled import ScaledArray
from triax.moe.shared.arguments import Array

_BYTES = 16  # of the 32 numbers that share a scale


def from_mxfp4(blocks: Array, scales: Array) -> ScaledArray:
    """Returns the weights of an MXFP4 checkpoint such as gpt-oss's; bytes stay unchanged.

        w = moe.from_mxfp4(blocks, scales)
        w.shape  # (experts, in, out)

    Each byte holds two numbers of float4_e2m1fn, the first in its lower half. Each scale is a
    power of two, float8_e8m0fnu, for 32 numbers along `in`.

    Args:
      blocks: uint8 [..., out, in / 32, 16], such as `mlp.experts.gate_up_proj_blocks`.
      scales: uint8 [..., out, in / 32], such as `mlp.experts.gate_up_proj_scales`.

    Returns:
      A `ScaledArray` of shape [..., in, out] that is stored transposed.

    Raises:
      ArgumentTypeError: an argument is not an array of uint8.
      ArgumentValueError: the shapes do not match.
    """
    for name, array in (("blocks", blocks), ("scales", scales)):
        if not jax_private.is_array(array) or array.dtype != jnp.uint8:
            raise ArgumentTypeError(
                f"Argument `{name}` must be an array of uint8; got {messages.shown(array)}."
            )
    if blocks.ndim < 3 or blocks.shape[-1] != _BYTES:
        raise ArgumentValueError(
            f"Argument `blocks` must have shape [..., out, in / 32, {_BYTES}]; got {blocks.shape}."
        )
    if scales.shape != blocks.shape[:-1]:
        raise ArgumentValueError(
            f"Argument `scales` must have shape {blocks.shape[:-1]}, one for each {_BYTES} bytes "
            f"of `blocks`; got {scales.shape}."
        )
    *lead, count, each = blocks.shape
    values = jnp.reshape(blocks, (*lead, count * each))
    powers = jax.lax.bitcast_convert_type(jnp.asarray(scales), E8M0)
    block = *(1 for _ in lead[1:]), 2 * each, 1
    return ScaledArray(values, powers, block, True, "float4_e2m1fn")
