"""Checks ragged_dot's operands, arrays or `ScaledArray`s, and takes them apart for the kernels.

A `ScaledArray` of weights is [groups, depth, columns], whichever way its values are stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from triax import messages
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe.quantization.packing import E4M3, E8M0, PACKED, TILE, TILED, least_scaled
from triax.moe.quantization.scaled import ScaledArray, check, stored_block, swapped
from triax.moe.shared import arguments
from triax.moe.shared.blocks import power_of_two

# Tensor cores multiply 32 of the depth at a time, which must share a scale.
_LEAST = 32


class Parts(NamedTuple):
    """The parts of an operand, as kernels take them.

    Attributes:
      values: the array, or the stored values of a `ScaledArray`.
      scales: None, [rows], [groups] or [groups, columns]; scales of blocks as they are stored.
      deep: how much of the depth shares a scale; None for all of it.
      wide: how many columns of weights share a scale; None for all of them.
      zeros, packed, tiled, global_scales: as in `ScaledArray`.
    """

    values: jax.Array
    scales: jax.Array | None = None
    deep: int | None = None
    wide: int | None = None
    zeros: jax.Array | None = None
    packed: str | None = None
    tiled: bool = False
    global_scales: jax.Array | None = None

    @property
    def columns(self) -> int:
        """The number of columns; only for weights that are stored with their depth innermost."""
        return self.values.shape[1] * (TILE if self.tiled else 1)

    @property
    def codes(self) -> str | None:
        """The dtype of scales of 8 bits, by which packed numbers are multiplied when unpacked.

        The products are exact in bfloat16. Kernels take such scales as codes.
        """
        if self.packed is None or self.scales is None or self.scales.dtype not in (E8M0, E4M3):
            return None
        return str(self.scales.dtype)

    @property
    def least_deep(self) -> int:
        """Divides the depth of every block with a scale, in weights that kernels read."""
        return least_scaled(self.scales)

    @property
    def has_8_bits(self) -> bool:
        """Whether numbers of weights read alone have 8 bits; otherwise they have four."""
        return self.packed is None or TILED[self.packed] not in PACKED


def parts(operand: Any) -> Parts:
    """Returns the parts of rows or weights."""
    if not isinstance(operand, ScaledArray):
        return Parts(operand)
    deep, wide = _sizes(operand)
    scales = operand.scales
    if operand.dtype not in PACKED:
        scales = scales.astype(jnp.float32)
        if deep is None:
            scales = scales.reshape([n for axis, n in enumerate(scales.shape) if n > 1 or not axis])
    more = operand.zeros, operand.packed, operand.tiled, operand.global_scales
    return Parts(operand.values, scales, deep, wide, *more)


def dims(operand: Any, of_values: str) -> list[str]:
    """Returns the dimensions of each array of an operand: values, scales, zeros, global scales.

    A dimension has the letter `_` if all of its elements share a scale.
    """
    if not isinstance(operand, ScaledArray):
        return [of_values]
    blocks = zip(of_values, _shared(operand), strict=True)
    of_scales = "".join("_" if of is None else dim for dim, of in blocks)
    of_values += "_" * operand.tiled
    of_zeros = [of_scales] * (operand.zeros is not None)
    of_all = [f"{of_scales[:-1]}_"] * (operand.global_scales is not None)
    return [of_values, of_scales, *of_zeros, *of_all]


def pieces(operands: Iterable[tuple[Any, str]]) -> dict[str, int]:
    """Returns the most shards of dimensions, none of which has a part of a block, byte or tile.

    `operands` come with the dimensions of their values. One piece is all if the last is partial.
    """
    most: dict[str, int] = {}
    least: dict[str, int] = {}
    for operand, of_values in operands:
        if not isinstance(operand, ScaledArray):
            continue
        stored = swapped(operand.shape) if operand.transposed else operand.shape
        columns, depth = of_values[-2], of_values[-1]
        whole = {columns: TILE, depth: TILE} if operand.tiled else {depth: 1 + bool(operand.packed)}
        if operand.shard is not None:
            sizes = operand.shard[::-1] if operand.transposed else operand.shard
            whole = dict(zip((columns, depth), sizes, strict=True))
        for dim, size, block in zip(of_values, stored, _shared(operand), strict=True):
            least[dim] = math.lcm(least.get(dim, 1), block or 1, whole.get(dim, 1))
            most[dim] = 1 if size % least[dim] else size // least[dim]
    return {dim: count for dim, count in most.items() if least[dim] > 1}


def _shared(operand: ScaledArray) -> tuple[int | None, ...]:
    """Returns the block along the dimensions of the values, None if all of one shares scales."""
    stored = swapped(operand.shape) if operand.transposed else operand.shape
    blocks = zip(stored_block(operand), stored, strict=True)
    return tuple(None if of is None or of >= size > 1 else of for of, size in blocks)


def _sizes(operand: ScaledArray) -> tuple[int | None, int | None]:
    """Returns `deep` and `wide`, as in `Parts`."""
    _, depth, *columns = operand.shape
    sizes = zip(operand.block[1:], operand.shape[1:], strict=True)
    deep, wide = (*(None if of is None or of >= n else of for of, n in sizes), None)[:2]
    if operand.scales_tiled:  # a shard of the depth may have one scale, in the order of tiles
        deep = stored_block(operand)[-1] if operand.transposed else deep
    is_packed = operand.dtype in PACKED
    if deep is None and wide is not None and wide > 1 and not is_packed:
        # Kernels expect column blocks to have a depth: one that covers all of it.
        deep = max(_LEAST, power_of_two(depth))
    if columns and (deep or is_packed):
        wide = wide or columns[0]
    return deep, wide


def operand(name: str, value: Any, axes: tuple[str, ...], *, swap: bool = False) -> Any:
    """Returns the argument `name`, checked, as a JAX array or a `ScaledArray` of JAX arrays.

    `axes` names its dimensions. With `swap` the last two of a `ScaledArray` are swapped first.
    """
    if isinstance(value, ScaledArray):
        return jax.tree.map(jnp.asarray, checked(name, value, axes, swap=swap))
    value = arguments.array(name, value, axes)
    messages.check_sizes_known(name, value.shape)
    return value


def checked(name: str, value: ScaledArray, axes: tuple[str, ...], *, swap: bool) -> ScaledArray:
    """Does what `operand` does for a `ScaledArray`, but leaves its arrays as they are."""
    check(name, value)
    if value.ndim != len(axes):
        raise ArgumentValueError(
            f"Argument `{name}` must have shape [{', '.join(axes)}]; got a ScaledArray of "
            f"{value.shape}."
        )
    messages.check_sizes_known(name, value.shape)
    are_rows = value.ndim == 2
    if value.packed and are_rows:
        raise ArgumentTypeError(
            f"Argument `{name}` must be in 8 bits or more; got a ScaledArray of {value.dtype}. "
            f"Pass `{name}.dequantize(jnp.bfloat16)`."
        )
    value = value.mT if swap else value
    deep, _ = _sizes(value)
    fits = value.packed or deep is None or (deep >= _LEAST and deep & (deep - 1) == 0)
    fits = fits and value.scales.shape[0] == value.values.shape[0]
    fits = fits and not (are_rows and value.transposed)
    if value.size and not fits:
        wanted = "(1, b)" if are_rows else "(1, any, any)" if value.packed else "(1, b, any)"
        where = "" if value.packed else ", where b is None or a power of two from 32 on"
        raise ArgumentValueError(
            f"Argument `{name}` must have scales of blocks {wanted} for [{', '.join(axes)}]{where}"
            f"{', and not be transposed' * are_rows}; got block {value.block} for shape "
            f"{value.shape}, transposed={value.transposed}. Quantize it so, or pass "
            f"`{name}.dequantize(dtype)`."
        )
    return value


def check_rows(rows: Any, weights: ScaledArray, names: tuple[str, str]) -> None:
    """Raises unless `rows` can be multiplied by scaled `weights`; `names` are the arguments'."""
    of_rows, of_weights = names
    scaled = isinstance(rows, ScaledArray)
    is_float = jnp.issubdtype(rows.dtype, jnp.floating) and rows.dtype.itemsize > 1
    in_tiles = weights.tiled and weights.dtype not in PACKED
    # With more rows, tiles are multiplied by their scales first, which may overflow float16.
    is_narrow = in_tiles and rows.dtype == jnp.float16 and bool(_sizes(weights)[0])
    if is_narrow or (weights.packed if scaled else not is_float):
        others = ", other than float16," if is_narrow else ""
        others = others if weights.packed else ", or a ScaledArray,"
        remedy = f" Pass `{of_rows}.dequantize(jnp.bfloat16)`." if scaled else ""
        if in_tiles:
            remedy = f" Make `{of_weights}` with `tiles=False`, or cast `{of_rows}`."
        raise ArgumentTypeError(
            f"Argument `{of_rows}` must be floats of 16 bits or more{others} to go with a "
            f"ScaledArray of {weights.dtype} weights{' in tiles' * in_tiles}; got "
            f"{messages.shown(rows)}.{remedy}"
        )
