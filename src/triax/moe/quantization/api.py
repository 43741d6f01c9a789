"""`quantize`: checks its arguments and calls the op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from triax import messages
from triax.compat import jax_private
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe.quantization import ops
from triax.moe.quantization.packing import E8M0, PACKED
from triax.moe.quantization.reference import FORMATS
from triax.moe.quantization.scaled import DTYPES, ScaledArray, checked_block
from triax.moe.shared import arguments
from triax.moe.shared import implementation as implementations
from triax.moe.shared.arguments import Array
from triax.moe.shared.implementation import Implementation


def quantize(
    array: Array,
    dtype: DTypeLike = "float8_e4m3fn",
    *,
    block: Sequence[int | None],
    transposed: bool = False,
    scale_dtype: DTypeLike = "float32",
    implementation: Implementation | None = None,
) -> ScaledArray:
    """Rounds an array to 8 or 4 bits, with a scale for each block.

        x8 = moe.quantize(x, block=(1, None))  # a scale for each row
        x8 = moe.quantize(x, block=(1, 128))  # for each 128 numbers of a row
        w8 = moe.quantize(w, block=(1, None, 1), transposed=True)  # for each column of experts
        w8 = moe.quantize(w, block=(1, 128, 128), transposed=True)  # for each tile
        w4 = moe.quantize(w, "int4", block=(1, 128, 1), transposed=True)  # along the depth
        mx = {"block": (1, 32, 1), "scale_dtype": "float8_e8m0fnu"}  # MXFP4, or MXFP8
        w4 = moe.quantize(w, "float4_e2m1fn", transposed=True, **mx)

    ``scale = max(largest / top, 2**-126)``, where `largest` is the largest magnitude of the block's
    finite numbers and `top` the largest number of `dtype`. ``value = round(number * (1 / scale))``,
    to nearest, ties to even. All steps are in float32, correctly rounded on every platform: values
    and scales are the same everywhere, bit for bit.

    Scales of float8_e8m0fnu follow OCP's MX formats: ``scale = 2**max(floor(log2(largest)) -
    floor(log2(top)), -127)``, and 2**-127 for zeros. Numbers beyond ``top * scale`` saturate: the
    largest of a block may lose up to a quarter in float4_e2m1fn, and up to an eighth in 8-bit
    floats.

    NaN stays NaN. float8_e5m2 keeps infinities, float8_e4m3fn makes them NaN. Integers and
    float4_e2m1fn have neither: a block with a NaN or an infinity has a NaN scale and values of 0.

    quantize is not differentiable; wrap its input in stop_gradient. To pass gradients straight on::

        y = moe.quantize(jax.lax.stop_gradient(x), block=(1, 128)).dequantize(x.dtype)
        y = x + jax.lax.stop_gradient(y - x)

    Args:
      array: float32, bfloat16 or float16, of any rank.
      dtype: float8_e4m3fn, float8_e5m2, int8, float4_e2m1fn or int4 (from -7 to 7). The last two
        are stored two to a byte: the size of the last stored dimension must be even.
      block: the size of a block along each dimension of `array`, None for a whole dimension. A last
        block may be partial.
      transposed: whether the values are stored with the last two dimensions swapped. Weights
        [experts, depth, columns] then have the depth innermost, as 8-bit tensor cores read them.
        The result stands for the same array either way.
      scale_dtype: float32, or float8_e8m0fnu for floats.
      implementation: None picks by the program's platform: Triton kernels on CUDA, plain JAX
        elsewhere. "triton", "interpret" (the kernels, interpreted on the CPU) and "xla" insist. The
        kernels support blocks (…, 1, None), (…, 1, b) with b a power of two from 16 to 256,
        (…, 128, 128), and, transposed, (…, None, 1) and (…, 128, 128), to 8 bits with float32
        scales; plain JAX supports all.

    Returns:
      A `ScaledArray` of shape `array.shape`.

    Raises:
      ArgumentTypeError: `array` is not an array of a supported dtype; a block size is not an int.
      ArgumentValueError: `block` has the wrong length or a size below one; `dtype`, `scale_dtype`
        or `implementation` is unknown; the requested kernels do not support these blocks or dtypes;
        a size that must be even is odd.
      DifferentiationError: `quantize` is differentiated.
    """
    if not jax_private.is_array(array):
        scaled = hasattr(array, "dequantize")
        raise ArgumentTypeError(
            f"Argument `array` must be an array; got {messages.shown(array)}. Use "
            f"{'`array.dequantize(dtype)`' if scaled else 'jnp.asarray'}."
        )
    if array.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ArgumentTypeError(
            f"Argument `array` must be of float32, bfloat16 or float16; got {array.dtype}. Cast "
            "it with `array.astype(jnp.float32)`."
        )
    array = jnp.asarray(array)
    dtype = arguments.dtype("dtype", dtype, (*DTYPES, *PACKED))
    block, transposed = checked_block(block, array.shape, transposed), bool(transposed)
    last = -2 if transposed else -1
    if dtype in PACKED and (not array.ndim or array.shape[last] % 2):
        raise ArgumentValueError(
            f"Argument `array` must have an even size along dimension {last}, because two "
            f"numbers of {dtype.name} share a byte; got shape {array.shape}. Pad it with zeros."
        )
    scale_dtype = arguments.dtype("scale_dtype", scale_dtype, (np.dtype("float32"), E8M0))
    if scale_dtype == E8M0 and FORMATS[dtype].sign is None:
        raise ArgumentValueError(
            "Argument `scale_dtype` is float8_e8m0fnu, which is for floats; got `dtype` "
            f"{dtype.name}. Let it be float32."
        )
    implementations.check(implementation, array=array)
    options: dict[str, Any] = {"block": block, "transposed": transposed, "scale_dtype": scale_dtype}
    return ops.quantized(array, dtype, **options, implementation=implementation)
