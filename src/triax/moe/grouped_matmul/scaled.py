"""`ScaledArray` operands of ragged_dot as raw arrays, scales, and what the scales are for."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe.grouped_matmul.options import PackedScales
from triax.moe.quantization.packing import E8M0
from triax.moe.quantization.scaled import ScaledArray, check, check_no_bytes
from triax.moe.shared import arguments

# Blocks along the depth must be multiples of what tensor cores take at a time.
_LEAST = 32


class Unpacked(NamedTuple):
    """Values, their scales, and `block` and `packed`, which are those of `Options`."""

    values: Any
    scales: Any
    block: Any
    packed: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the numbers in `values`."""
        shape = tuple(self.values.shape)
        return (*shape[:-1], 2 * shape[-1]) if self.packed else shape


def rows(array: Any, row_scales: Any) -> Unpacked:
    """Rows, whose scales are [rows], or [rows, blocks of the depth] with the size of a block."""
    if not isinstance(array, ScaledArray):
        return Unpacked(array, row_scales, None)
    _check("rows", array, 2, "row_scales", row_scales)
    if array.packed:
        raise ArgumentTypeError(
            f"Argument `rows` must be in 8 bits or more; got a ScaledArray of {array.dtype}. Pass "
            "`rows.dequantize(jnp.bfloat16)`."
        )
    row_scales = _float32(array.scales)
    if array.transposed:
        raise _unsupported("rows", array, "rows that are stored as such (`transposed=False`)")
    if not array.values.size:  # no scales, or none that matter
        return Unpacked(array.values, None, None)
    per_row, depth = array.block
    if per_row == 1 and depth >= array.shape[1]:
        return Unpacked(array.values, row_scales.reshape(-1), None)
    if per_row == 1 and _suits(depth):
        return Unpacked(array.values, row_scales, depth)
    raise _unsupported("rows", array, "(1, depth) or (1, a power of two from 32 on)")


def weights(array: Any, group_scales: Any, transposed: bool) -> Unpacked:
    """Weights, whose scales are [groups], [groups, columns], or those of blocks.

    The block is of columns and depth. `transposed` is whether values are [groups, columns, depth].
    """
    if not isinstance(array, ScaledArray):
        check_no_bytes("weights", array, range(4, 6))
        return Unpacked(array, group_scales, (None, None))
    _check("weights", array, 3, "group_scales", group_scales)
    if not array.values.size:  # no scales, or none that matter
        nothing = jnp.zeros(array.stored_shape, jnp.int8) if array.packed else array.values
        return Unpacked(nothing, None, (None, None))
    order = slice(None, 0, -1) if transposed else slice(1, None)
    depth, columns = array.stored_shape[order]
    per_group = array.block[0]
    deep, wide = array.block[order]
    if array.packed:
        if per_group > 1:
            raise _unsupported("weights", array, "(1, any, any)")
        packed_scales = PackedScales(array.scales, array.zeros)
        return Unpacked(array.values, packed_scales, (wide, deep), array.packed)
    group_scales = _float32(array.scales)
    if per_group == 1 and deep >= depth:
        if wide >= columns:
            return Unpacked(array.values, group_scales.reshape(-1), (None, None))
        if wide == 1:
            scales = group_scales.reshape(array.shape[0], columns)
            return Unpacked(array.values, scales, (1, None))
    if per_group == 1 and _suits(deep) and wide > 0:
        return Unpacked(array.values, group_scales, (min(wide, columns), deep))
    raise _unsupported(
        "weights",
        array,
        "(1, depth, columns), (1, depth, 1) or (1, a power of two from 32 on, any)",
    )


def check_rows(array: Any, packed: str | None) -> None:
    """Raises unless rows can be multiplied by weights in 8 bits, or by packed ones."""
    if isinstance(array, ScaledArray) and packed:
        raise ArgumentTypeError(
            f"Argument `rows` is a ScaledArray, and `weights` is one of {packed}, which is "
            "multiplied by floats of 16 bits or more. Pass `rows.dequantize(jnp.bfloat16)`."
        )
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize == 1:
        raise ArgumentTypeError(
            "Argument `rows` must be floats of 16 bits or more, or a ScaledArray, to go with a "
            f"ScaledArray of weights; got {array.dtype}."
        )


def check_scales(name: str, scales: Any, count: int, axis: str) -> jax.Array | None:
    """One float for each of `count` rows or groups, or None."""
    if scales is None:
        return None
    if getattr(scales, "ndim", 1) > 1:
        remedy = f"Reshape them: `{name}.reshape({count})`."
        if scales.size != count:
            remedy = "For scales of blocks, pass a `ScaledArray`."
        raise ArgumentValueError(
            f"Argument `{name}` must have shape [{axis}], one value for each of the {count} "
            f"{axis}; got {scales.shape}. {remedy}"
        )
    scales = arguments.array(name, scales, (axis,), jnp.floating)
    arguments.check_length(name, scales, count, "value", axis)
    return scales


def _float32(scales: jax.Array) -> jax.Array:
    return scales.astype(jnp.float32) if scales.dtype == E8M0 else scales


def _suits(depth: int) -> bool:
    return depth >= _LEAST and depth & (depth - 1) == 0


def _check(name: str, array: ScaledArray, ndim: int, other: str, scales: Any) -> None:
    check(name, array)
    if array.ndim != ndim:
        raise ArgumentValueError(
            f"Argument `{name}` must have {ndim} dimensions; got a ScaledArray of {array.shape}."
        )
    if scales is not None:
        raise ArgumentTypeError(
            f"Argument `{other}` is given, and `{name}` is a ScaledArray, which has scales. Leave "
            f"`{other}` out."
        )


def _unsupported(name: str, array: ScaledArray, what: str) -> ArgumentValueError:
    return ArgumentValueError(
        f"Argument `{name}` must have scales of blocks {what}; got values {array.stored_shape} "
        f"with blocks {array.block}, transposed={array.transposed}. Quantize it so, or pass "
        f"`{name}.dequantize(dtype)`."
    )
