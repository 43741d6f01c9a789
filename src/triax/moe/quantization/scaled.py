"""`ScaledArray`: numbers of 8 bits with a scale for each block of them."""

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
from triax.moe.shared import sharding

DTYPES = tuple(map(np.dtype, (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.int8)))
"""The dtypes that values may have."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScaledArray:
    """An array in 8 bits, with a float32 scale for each block: ``values * scales``.

    `quantize` makes it. It is a pytree of `values` and `scales`, so it goes through `jit`, `vmap`,
    `scan` and checkpoints like an array.

    Attributes:
      values: float8_e4m3fn, float8_e5m2 or int8, of any rank.
      scales: float32, of as many dimensions; a size is that of `values`, divided by that of a
        block and rounded up.
      block: the sizes of a block along the dimensions of `values`. A last block may be partial.
      transposed: whether the array is `values` with its last two dimensions swapped: weights
        [experts, depth, columns] whose values are stored as [experts, columns, depth].
    """

    values: jax.Array
    scales: jax.Array
    block: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    transposed: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that this stands for."""
        shape = tuple(self.values.shape)
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape

    @property
    def ndim(self) -> int:
        """The rank of the array."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """The dtype of `values`."""
        return self.values.dtype

    def dequantize(self, dtype: Any = "float32") -> jax.Array:
        """The array in another float: each value times its scale in float32, rounded once.

        Args:
          dtype: any float.

        Returns:
          An array of shape `shape`.
        """
        check("self", self)
        dtype = jnp.dtype(dtype)
        wide = jnp.dtype("float64" if dtype == "float64" else "float32")
        scales = spread(self.scales.astype(wide), self.values.shape, self.block)
        array = (self.values.astype(wide) * scales).astype(dtype)
        return jnp.swapaxes(array, -1, -2) if self.transposed else array


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
    return x.values, x.scales


def num_blocks(shape: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales."""
    return tuple(-(-size // of) for size, of in zip(shape, block, strict=True))


def spread(scales: jax.Array, shape: tuple[int, ...], block: tuple[int, ...]) -> jax.Array:
    """Scales, repeated for each number of their blocks where they do not broadcast."""
    repeats = [of > 1 and count > 1 for of, count in zip(block, scales.shape, strict=True)]
    scales = sharding.gathered(scales, *(i for i, repeat in enumerate(repeats) if not repeat))
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
    if values.dtype not in DTYPES:
        raise ArgumentTypeError(
            f"Argument `{name}` must have values of {', '.join(d.name for d in DTYPES)}; got "
            f"{values.dtype}."
        )
    if scales.dtype != jnp.float32:
        raise ArgumentTypeError(
            f"Argument `{name}` must have scales of float32; got {scales.dtype}. Cast them."
        )
    sizes = isinstance(block, tuple) and all(type(b) is int and b > 0 for b in block)
    if not sizes or len(block) != values.ndim:
        raise ArgumentValueError(
            f"Argument `{name}` must have a `block` of one positive int for each dimension of its "
            f"values, which are of shape {values.shape}; got {messages.short(block)}."
        )
    if scales.shape != num_blocks(values.shape, block):
        raise ArgumentValueError(
            f"Argument `{name}` must have scales of shape {num_blocks(values.shape, block)}, one "
            f"for each block of {block} of its values of shape {values.shape}; got {scales.shape}."
        )
    if scaled.transposed and values.ndim < 2:
        raise ArgumentValueError(
            f"Argument `{name}` is transposed, which takes two dimensions; its values have shape "
            f"{values.shape}."
        )
