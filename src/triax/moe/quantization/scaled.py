"""`ScaledArray`: numbers of 8 or 4 bits with a scale for each block of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from triax import messages
from triax.compat import jax_private
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe.quantization import packing
from triax.moe.quantization.packing import E8M0, PACKED
from triax.sharding import explicit

DTYPES = tuple(map(np.dtype, (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.int8)))
"""The dtypes of values of 8 bits."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScaledArray:
    """An array in 8 or 4 bits, with a scale for each block: ``(values - zeros) * scales``.

    `quantize` makes it, or you do, of the parts of a quantized checkpoint. It is a pytree of
    `values`, `scales` and `zeros`, so it goes through `jit`, `vmap`, `scan` and checkpoints like an
    array.

    Attributes:
      values: float8_e4m3fn, float8_e5m2 or int8, of any rank. With `packed`, uint8: two numbers in
        each byte, of which the lower half is the first along the last dimension.
      scales: float32, or float8_e8m0fnu (powers of two, as in MX formats), of as many dimensions; a
        size is that of the numbers, divided by that of a block and rounded up.
      block: the sizes of a block along the dimensions of the numbers in `values`. A last block may
        be partial.
      transposed: whether the array is the numbers with their last two dimensions swapped: weights
        [experts, depth, columns] whose values are stored as [experts, columns, depth].
      packed: "float4_e2m1fn" or "int4" (two's complement), if that is what the bytes hold.
      zeros: int8 or float32, of the shape of `scales`: the number of each block that stands for
        zero. For "int4" alone; None is zero.
    """

    values: jax.Array
    scales: jax.Array
    block: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    transposed: bool = dataclasses.field(default=False, metadata={"static": True})
    packed: str | None = dataclasses.field(default=None, metadata={"static": True})
    zeros: jax.Array | None = None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the numbers in `values`, as they are stored."""
        shape = tuple(self.values.shape)
        return (*shape[:-1], 2 * shape[-1]) if self.packed else shape

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that this stands for."""
        shape = self.stored_shape
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape

    @property
    def ndim(self) -> int:
        """The rank of the array."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the numbers in `values`."""
        return np.dtype(getattr(ml_dtypes, self.packed)) if self.packed else self.values.dtype

    def dequantize(self, dtype: Any = "float32") -> jax.Array:
        """The array in another float: each value times its scale in float32, rounded once.

        ``values - zeros`` is rounded before, if `zeros` are floats.

        Args:
          dtype: any float.

        Returns:
          An array of shape `shape`.

        Raises:
          ArgumentTypeError: `dtype` is no float.
        """
        check("self", self)
        dtype = _float(dtype)
        wide = jnp.dtype("float64" if dtype == "float64" else "float32")
        parts = self.values, self.scales, self.zeros
        array = product(*parts, self.block, wide, self.packed).astype(dtype)
        return jnp.swapaxes(array, -1, -2) if self.transposed else array


def _float(dtype: Any) -> np.dtype:
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise ArgumentTypeError(
            "Argument `dtype` must be a float such as jnp.bfloat16; got "
            f"{messages.short(dtype)}. The numbers without their scales are in `values`."
        )
    return found


def tokens(name: str, x: ScaledArray, scales: Any) -> tuple[jax.Array, jax.Array]:
    """The values [tokens, hidden] and scales [tokens, …] of the argument `name`, to be moved.

    Raises:
      ArgumentTypeError: `scales` is given too.
      ArgumentValueError: tokens share scales, or the array is not one of tokens.
    """
    check(name, x)
    if scales is not None:
        raise ArgumentTypeError(
            f"Argument `scales` is given, and `{name}` is a ScaledArray, which has scales. Leave "
            "`scales` out."
        )
    if x.ndim != 2 or x.transposed or (x.block[0] != 1 and x.shape[0] > 1):
        raise ArgumentValueError(
            f"Argument `{name}` must be [tokens, hidden] with scales of its own for each token: "
            f"`block=(1, …)`; got shape {x.shape}, block {x.block} and transposed={x.transposed}."
        )
    if x.zeros is not None:
        raise ArgumentValueError(
            f"Argument `{name}` has `zeros`, which do not move with their tokens. Quantize them "
            "without, as `moe.quantize` does."
        )
    return x.values, x.scales


def num_blocks(shape: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales."""
    return tuple(-(-size // of) for size, of in zip(shape, block, strict=True))


def product(
    values: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    block: tuple[int, ...],
    dtype: Any,
    packed: str | None = None,
) -> jax.Array:
    """The numbers in `values`, less the zeros and times the scales of their blocks."""
    if packed is None:
        numbers = values.astype(dtype)
    else:
        numbers = packing.unpack(explicit.gathered(values, *range(values.ndim - 1)), packed, dtype)
    if zeros is not None:
        numbers -= spread(zeros.astype(dtype), numbers.shape, block)
    if scales.dtype != E8M0:
        return numbers * spread(scales.astype(dtype), numbers.shape, block)
    codes = jax.lax.bitcast_convert_type(scales, jnp.uint8)
    power, half = packing.powers_of_two(spread(codes, numbers.shape, block), dtype)
    return numbers * half * power


def spread(scales: jax.Array, shape: tuple[int, ...], block: tuple[int, ...]) -> jax.Array:
    """Scales, repeated for each number of their blocks where they do not broadcast."""
    repeats = [of > 1 and count > 1 for of, count in zip(block, scales.shape, strict=True)]
    scales = explicit.gathered(scales, *(i for i, repeat in enumerate(repeats) if not repeat))
    for axis, (size, of) in enumerate(zip(shape, block, strict=True)):
        if repeats[axis]:
            repeated = jnp.repeat(scales, of, axis=axis)
            scales = jax.lax.slice_in_dim(repeated, 0, size, axis=axis)
    return scales


def check(name: str, scaled: Any) -> None:
    """Raises unless `scaled`, the argument `name`, is a `ScaledArray` whose parts go together.

    Not when it is made: a pytree may hold anything where JAX takes it apart.

    Raises:
      ArgumentTypeError: it is something else, or a part of it is of the wrong type.
      ArgumentValueError: its parts do not go together.
    """
    if not isinstance(scaled, ScaledArray):
        raise ArgumentTypeError(
            f"Argument `{name}` must be a ScaledArray; got {messages.shown(scaled)}. Make one with "
            "`moe.quantize`."
        )
    for part in ("values", "scales"):
        value = getattr(scaled, part)
        if not jax_private.is_array(value):
            raise ArgumentTypeError(
                f"Argument `{name}` must have an array as its `{part}`; got "
                f"{messages.shown(value)}. Make one with `moe.quantize`."
            )
    values, scales, block = scaled.values, scaled.scales, scaled.block
    _check_values(name, scaled)
    if scales.dtype not in (jnp.float32, E8M0):
        remedy = "Cast them."
        if scales.dtype == jnp.uint8:
            remedy = "Those of MX formats are `scales.view(jnp.float8_e8m0fnu)`."
        raise ArgumentTypeError(
            f"Argument `{name}` must have scales of float32 or float8_e8m0fnu; got {scales.dtype}. "
            f"{remedy}"
        )
    shape = scaled.stored_shape
    sizes = isinstance(block, tuple) and all(type(b) is int and b > 0 for b in block)
    if not sizes or len(block) != values.ndim:
        raise ArgumentValueError(
            f"Argument `{name}` must have a `block` of one positive int for each dimension of its "
            f"values, which are of shape {shape}; got {messages.short(block)}."
        )
    if scales.shape != num_blocks(shape, block):
        raise ArgumentValueError(
            f"Argument `{name}` must have scales of shape {num_blocks(shape, block)}, one "
            f"for each block of {block} of its values of shape {shape}; got {scales.shape}."
        )
    if scaled.transposed and values.ndim < 2:
        raise ArgumentValueError(
            f"Argument `{name}` is transposed, which takes two dimensions; its values have shape "
            f"{shape}."
        )
    if scaled.zeros is not None:
        _check_zeros(name, scaled)


def check_no_bytes(name: str, array: Any, ranks: range) -> None:
    """Raises if weights, the argument `name`, are the bytes of a checkpoint with numbers of 4 bits.

    Those of other ranks than `ranks` may be integers.

    Raises:
      ArgumentTypeError: they are.
    """
    if getattr(array, "dtype", None) == jnp.uint8 and getattr(array, "ndim", -1) in ranks:
        raise ArgumentTypeError(
            f"Argument `{name}` must be weights, or a ScaledArray; got uint8 of shape "
            f"{array.shape}. Of MXFP4's blocks make one with `moe.from_mxfp4(blocks, scales)`, of "
            "other numbers of 4 bits with `moe.ScaledArray(…, packed=…)`."
        )


def _check_values(name: str, scaled: ScaledArray) -> None:
    values, packed = scaled.values, scaled.packed
    names = [dtype.name for dtype in PACKED]
    if packed is not None and packed not in names:
        raise ArgumentValueError(
            f"Argument `{name}` must have `packed` of {' or '.join(map(repr, names))}, or None; "
            f"got {messages.short(packed)}."
        )
    if packed is None and values.dtype not in DTYPES:
        remedy = ""
        if values.dtype == jnp.uint8 or values.dtype in PACKED:
            remedy = (
                " Numbers of 4 bits are stored in uint8, two to a byte, with "
                f"`packed={names[0]!r}` or `packed={names[1]!r}`."
            )
        raise ArgumentTypeError(
            f"Argument `{name}` must have values of {', '.join(d.name for d in DTYPES)}; got "
            f"{values.dtype}.{remedy}"
        )
    if packed is not None and (values.dtype != jnp.uint8 or not values.ndim):
        raise ArgumentTypeError(
            f"Argument `{name}` is packed as {packed}, two to a byte, and must have values of "
            f"uint8 with a dimension or more; got {values.dtype} of shape {values.shape}."
        )


def _check_zeros(name: str, scaled: ScaledArray) -> None:
    zeros: Any = scaled.zeros
    if scaled.packed != "int4":
        raise ArgumentValueError(
            f"Argument `{name}` has `zeros`, which are for values that are packed as int4; got "
            f"{scaled.packed or scaled.values.dtype}. Leave them out."
        )
    if not jax_private.is_array(zeros) or zeros.dtype not in (jnp.int8, jnp.float32):
        raise ArgumentTypeError(
            f"Argument `{name}` must have an array of int8 or float32 as its `zeros`, or None; got "
            f"{messages.shown(zeros)}. Cast them."
        )
    if zeros.shape != scaled.scales.shape:
        raise ArgumentValueError(
            f"Argument `{name}` must have zeros of the shape of its scales, {scaled.scales.shape}; "
            f"got {zeros.shape}."
        )
