"""Quantization in plain JAX: the path for every block, and for platforms without Triton.

It computes on the bits of numbers, as integers: XLA flushes subnormal floats to zero on CPUs, and
on GPUs its division, and its casts to 8 bits in some versions, do not round correctly.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from triax.moe.quantization import packing
from triax.moe.quantization.packing import E8M0, PACKED
from triax.moe.quantization.scaled import num_blocks, spread

INFINITY = 0x7F800000  # the bits of float32 infinity
_BITS = 23  # the mantissa bits of float32
_NAN = INFINITY | 1 << (_BITS - 1)
_FLOAT32 = np.dtype(np.float32)
_LEAST_SCALE = 1 << _BITS  # the bits of 2**-126


@dataclasses.dataclass(frozen=True)
class Format:
    """A number format of 8 or 4 bits; a code is a number's bits without the sign.

    Attributes:
      largest: the largest finite number.
      mantissa: the number of mantissa bits.
      least_exponent: the exponent of the least normal number.
      top: the code of the largest finite number.
      sign: the sign bit; None for integers, which are two's complements.
      nan, infinity: their codes; None if either makes its block's scale NaN instead.
    """

    largest: float
    mantissa: int
    least_exponent: int
    top: int
    sign: int | None = None
    nan: int | None = None
    infinity: int | None = None


FORMATS = {
    np.dtype(ml_dtypes.float8_e4m3fn): Format(448.0, 3, -6, 0x7E, 0x80, 0x7F, 0x7F),
    np.dtype(ml_dtypes.float8_e5m2): Format(57344.0, 2, -14, 0x7B, 0x80, 0x7E, 0x7C),
    np.dtype(ml_dtypes.float4_e2m1fn): Format(6.0, 1, 0, 7, 8),
    # The integers are all subnormal numbers of these two formats, because they are evenly spaced.
    np.dtype(np.int8): Format(127.0, 7, 7, 127),
    np.dtype(ml_dtypes.int4): Format(7.0, 3, 3, 7),
}


@functools.partial(
    jax.jit, static_argnames=("block", "dtype", "transposed", "scale_dtype", "kernel")
)
def quantize_reference(
    array: jax.Array,
    *,
    block: tuple[int, ...],
    dtype: np.dtype,
    transposed: bool,
    scale_dtype: np.dtype = _FLOAT32,
    kernel: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the values and scales of an array; `block` has a size for each dimension.

    Outside `jit` it is one program too. `kernel` is unused: it names the kernel on the GPU path.
    """
    format_ = FORMATS[dtype]
    bits = _float32_bits(array)
    sign, size = bits < 0, bits & 0x7FFFFFFF
    largest = _largest(jnp.where(size < INFINITY, size, 0), block)
    if scale_dtype == E8M0:  # OCP: 2**(floor(log2(largest)) - floor(log2(format_.largest)))
        power = jnp.maximum((largest >> _BITS) - int(math.log2(format_.largest)), 0)
        scale, nan_scale, inverse = power, jnp.int32(255), 254 - power << _BITS
    else:
        scale, nan_scale = _scale(largest, format_.largest), jnp.int32(_NAN)
        inverse = _inverse(scale)

    code = _code(size, spread(inverse, array.shape, block), format_)
    if format_.nan is None:
        passed = _largest(size, block) < INFINITY
        scale = jnp.where(passed, scale, nan_scale)
        signed = jnp.where(sign, -code if format_.sign is None else code | format_.sign, code)
        code = jnp.where(spread(passed, array.shape, block), signed, 0)
    else:
        code = _of_float(code, sign, size, format_)
    if dtype not in PACKED:  # 4-bit numbers are packed below, once transposed
        code = code.astype(jnp.int8 if format_.sign is None else jnp.uint8)
    if transposed:
        code, scale = (jnp.swapaxes(a, -1, -2) for a in (code, scale))
    if dtype in PACKED:
        code = packing.pack(code)
    elif code.dtype != dtype:
        code = jax.lax.bitcast_convert_type(code, dtype)
    scale = scale.astype(jnp.uint8) if scale_dtype == E8M0 else scale
    return code, jax.lax.bitcast_convert_type(scale, scale_dtype)


def quantize_groups_reference(
    rows: jax.Array, group: jax.Array, *, num_groups: int, dtype: np.dtype
) -> tuple[jax.Array, jax.Array]:
    """Returns 8-bit floats [rows, columns], with scales [groups, columns].

    `group` is the group of each row; rows of a group that does not exist are zero.
    """
    format_ = FORMATS[dtype]
    bits = _float32_bits(rows)
    sign, size = bits < 0, bits & 0x7FFFFFFF
    largest = jnp.zeros((num_groups, rows.shape[1]), jnp.int32)
    largest = largest.at[group].max(jnp.where(size < INFINITY, size, 0), mode="drop")
    scale = _scale(largest, format_.largest)
    inverse = jnp.take(_inverse(scale), group, axis=0, mode="clip")
    values = _of_float(_code(size, inverse, format_), sign, size, format_)
    values = jnp.where((group < num_groups)[:, None], values, 0)
    return (
        jax.lax.bitcast_convert_type(values, dtype),
        jax.lax.bitcast_convert_type(scale, jnp.float32),
    )


def _code(size: jax.Array, inverse: jax.Array, format_: Format) -> jax.Array:
    """Returns magnitudes times their scale's inverse, rounded to codes."""
    product, exponent = _multiply(size, inverse)
    drop = _BITS - format_.mantissa + jnp.maximum(format_.least_exponent - exponent, 0)
    code = _rounded(product, jnp.minimum(drop, 26))  # dropping 26 bits leaves zero
    code += jnp.maximum(exponent - format_.least_exponent, 0) << format_.mantissa
    return jnp.where(size == 0, 0, jnp.minimum(code, format_.top))


def _of_float(code: jax.Array, sign: jax.Array, size: jax.Array, format_: Format) -> jax.Array:
    """Returns the bits of floats, from the codes and the float32 bits of their magnitudes."""
    nan, infinity = (jnp.int32(special) for special in (format_.nan, format_.infinity))
    finite = size < INFINITY
    is_infinity = (size == INFINITY) & (infinity != nan)
    code = jnp.where(finite | is_infinity, jnp.where(finite, code, infinity), nan)
    code = jnp.where(sign & (finite | is_infinity), code | 0x80, code)
    return code.astype(jnp.uint8)


def _float32_bits(array: jax.Array) -> jax.Array:
    if array.dtype == jnp.bfloat16:
        return jax.lax.bitcast_convert_type(array, jnp.uint16).astype(jnp.int32) << 16
    return jax.lax.bitcast_convert_type(array.astype(jnp.float32), jnp.int32)


def _largest(sizes: jax.Array, block: tuple[int, ...]) -> jax.Array:
    """Returns the largest integer of each block; all integers are at least 0."""
    for axis, (count, of) in enumerate(zip(num_blocks(sizes.shape, block), block, strict=True)):
        size = sizes.shape[axis]
        if of == 1 or not size:
            continue
        if count == 1:
            sizes = jnp.max(sizes, axis=axis, keepdims=True)
            continue
        edges = [(0, count * of - size if i == axis else 0) for i in range(sizes.ndim)]
        shape = *sizes.shape[:axis], count, of, *sizes.shape[axis + 1 :]
        sizes = jnp.max(jnp.pad(sizes, edges).reshape(shape), axis=axis + 1)
    return sizes


def _scale(largest: jax.Array, of: float) -> jax.Array:
    """Returns the bits of ``max(largest / of, 2**-126)``, from the bits of `largest`."""
    quotient, exponent = _divide(largest, jnp.int32(np.float32(of).view(np.int32)))
    normal = (largest > 0) & (exponent >= -126)
    # The leading bit of the quotient adds one to the exponent.
    return jnp.where(normal, (jnp.maximum(exponent, -126) + 126 << _BITS) + quotient, _LEAST_SCALE)


def _inverse(scale: jax.Array) -> jax.Array:
    """Returns the bits of ``1 / scale``, from the bits of `scale`."""
    quotient, exponent = _divide(jnp.full_like(scale, 0x3F800000), scale)
    return (exponent + 126 << _BITS) + quotient


def _multiply(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the product of two floats, rounded to float32, as `_divide` returns a quotient."""
    a, a_exponent = _parts(a)
    b, b_exponent = _parts(b)
    low = (1 << 12) - 1
    a_high, a_low, b_high, b_low = a >> 12, a & low, b >> 12, b & low
    middle = a_high * b_low + a_low * b_high
    rest = (middle & low) * (1 << 12) + a_low * b_low
    high = a_high * b_high + (middle >> 12) + (rest >> 24)
    rest &= (1 << 24) - 1  # a * b is high * 2**24 + rest
    less = (high < 1 << _BITS).astype(jnp.int32)
    high, rest = (high << less) + ((rest >> _BITS) & less), rest << less & (1 << 24) - 1
    half = 1 << _BITS
    high += ((rest > half) | ((rest == half) & (high & 1 == 1))).astype(jnp.int32)
    return high, a_exponent + b_exponent - 127 * 2 + 1 - less


def _parts(bits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the mantissa, 2**23 to 2**24, and biased exponent of normal or subnormal floats."""
    leading = 1 << _BITS
    below = jax.lax.clz(jnp.maximum(bits, 1)) - 8  # how far a subnormal is from being normal
    subnormal = bits < leading
    exponent = jnp.where(subnormal, 1 - below, bits >> _BITS)
    return jnp.where(
        subnormal, bits << jnp.maximum(below, 0), bits & (leading - 1) | leading
    ), exponent


def _divide(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns q from 2**23 to 2**24, and e: a / b, rounded to float32, is q * 2**(e - 23).

    Both a and b are the bits of floats without signs; b is neither subnormal nor zero.
    """
    leading = 1 << _BITS
    a, a_exponent = _parts(a)
    b_exponent, b = b >> _BITS, b & (leading - 1) | leading
    less = (a < b).astype(jnp.int32)
    a, exponent = a << less, a_exponent - b_exponent - less
    q = jnp.divide(a.astype(jnp.float32), b.astype(jnp.float32))
    q = (q * leading).astype(jnp.int32)
    rest = (a << _BITS) - q * b  # both terms may wrap, but not their small difference
    for _ in range(4):  # `divide` may be off by a few units, on GPUs by two
        step = (2 * rest > b).astype(jnp.int32) - (2 * rest < -b).astype(jnp.int32)
        q, rest = q + step, rest - step * b
    return q, exponent


def _rounded(number: jax.Array, drop: jax.Array) -> jax.Array:
    """Returns ``number / 2**drop``, rounded to nearest, ties to even."""
    half = jnp.left_shift(1, drop - 1)
    return (number + half - 1 + ((number >> drop) & 1)) >> drop
