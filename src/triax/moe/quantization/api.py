"""`quantize`: checks its arguments and calls the op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from triax import messages
from triax.compat import jax_private
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe.quantization import configs, ops
from triax.moe.quantization.scaled import DTYPES, ScaledArray
from triax.moe.shared import arguments
from triax.moe.shared import implementation as implementations
from triax.moe.shared.implementation import Implementation


def quantize(
    array: Any,
    dtype: Any = "float8_e4m3fn",
    *,
    block: Sequence[int | None],
    transposed: bool = False,
    implementation: Implementation | None = None,
) -> ScaledArray:
    """Rounds an array to 8 bits, with a scale for each block of it.

        x8 = moe.quantize(x, block=(1, None))  # a scale for each row
        x8 = moe.quantize(x, block=(1, 128))  # for each 128 numbers of a row
        w8 = moe.quantize(w, block=(1, None, 1), transposed=True)  # for each column of experts
        w8 = moe.quantize(w, block=(1, 128, 128), transposed=True)  # for each tile

    ``scale = max(largest / top, 2**-126)``, where `largest` is the largest magnitude of the block's
    finite numbers and `top` the largest number of `dtype`. ``value = round(number * (1 / scale))``,
    to the nearest or to an even one of two. All steps are float32's, correctly rounded, on every
    platform: values and scales are the same everywhere, bit for bit.

    NaN stays NaN. float8_e5m2 has infinities, float8_e4m3fn makes them NaN. int8 has neither: the
    scale of a block with one of them is NaN, and its values are 0.

    It has no derivative, and differentiating it is an error. To pass gradients straight through::

        y = moe.quantize(jax.lax.stop_gradient(x), block=(1, 128)).dequantize(x.dtype)
        y = x + jax.lax.stop_gradient(y - x)

    Args:
      array: float32, bfloat16 or float16, of any rank.
      dtype: float8_e4m3fn, float8_e5m2 or int8.
      block: the sizes of a block along the dimensions of `array`, None for a whole dimension. A
        last block may be partial.
      transposed: whether the values are stored with the last two dimensions swapped. Weights
        [experts, depth, columns] then have the depth innermost, as 8-bit tensor cores read them.
        The result stands for the same array either way.
      implementation: None picks by the program's platform: Triton kernels on CUDA, plain JAX
        elsewhere. "triton", "interpret" (the kernels, interpreted on the CPU) and "xla" insist. The
        kernels do blocks (…, 1, None), (…, 1, b) with b a power of two from 16 to 256,
        (…, 128, 128), and, transposed, (…, None, 1) and (…, 128, 128); plain JAX does all.

    Returns:
      A `ScaledArray` of shape `array.shape`.

    Raises:
      ArgumentTypeError: `array` is not an array, or of another dtype; a block's size is no int.
      ArgumentValueError: `block` has the wrong length or a size below one; `dtype` or
        `implementation` is unknown; the kernels, which were requested, do not do these blocks.
      DifferentiationError: it is differentiated.
    """
    array = _array(array)
    dtype = _dtype(dtype)
    sizes = _block(block, array.shape)
    if transposed and array.ndim < 2:
        raise ArgumentValueError(
            "Argument `transposed` is True, which takes an array of two dimensions or more; got "
            f"shape {array.shape}. Leave it out."
        )
    transposed = bool(transposed)
    implementation = implementations.resolve(implementation, array=array)
    kernel = configs.kernel_of(array.shape, sizes, transposed)
    if kernel is None and implementation in ("triton", "interpret"):
        how = " transposed" if transposed else ""
        raise ArgumentValueError(
            f"Argument `block` must be one that kernels do: {configs.KERNELS}; got {sizes}{how} "
            f"for shape {array.shape}. Let `implementation` be None or 'xla'."
        )
    if kernel is None or not array.size:
        implementation = "xla"
    op = ops.quantize(sizes, transposed)
    options = {"block": sizes, "dtype": dtype, "transposed": transposed, "kernel": kernel}
    values, scales = op(array, implementation=implementation, **options)
    if transposed:
        sizes = *sizes[:-2], sizes[-1], sizes[-2]
    return ScaledArray(values, scales, sizes, transposed)


def _array(array: Any) -> jax.Array:
    if not jax_private.is_array(array):
        raise ArgumentTypeError(
            f"Argument `array` must be an array; got {messages.shown(array)}. Use jnp.asarray."
        )
    if array.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ArgumentTypeError(
            f"Argument `array` must be of float32, bfloat16 or float16; got {array.dtype}. Cast "
            "it with `array.astype(jnp.float32)`."
        )
    return jnp.asarray(array)


def _dtype(dtype: Any) -> np.dtype:
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found not in DTYPES:
        raise ArgumentValueError(
            f"Argument `dtype` must be {', '.join(d.name for d in DTYPES[:-1])} or "
            f"{DTYPES[-1].name}; got {messages.short(dtype)}."
        )
    return found


def _block(block: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A size for each dimension; that of an empty one is one."""
    if not isinstance(block, (tuple, list)):
        raise ArgumentTypeError(
            "Argument `block` must be a tuple of an int or None for each dimension of `array`; got "
            f"{messages.shown(block)}."
        )
    if len(block) != len(shape):
        raise ArgumentValueError(
            "Argument `block` must have an int or None for each dimension of `array`, which has "
            f"shape {shape}; got {messages.short(block)}."
        )
    return tuple(
        max(size, 1) if of is None else arguments.integer(f"block[{axis}]", of, 1)
        for axis, (of, size) in enumerate(zip(block, shape, strict=True))
    )
