"""Makes scaled arrays from the arrays of quantized checkpoints, as Hugging Face stores them.

A `ScaledArray` of linear layers is [..., in, out], with any dimensions in front. Arrays of NumPy
give arrays of NumPy: nothing goes to a device before the caller puts it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from triax import messages
from triax.compat import jax_private
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe.quantization.packing import E8M0
from triax.moe.quantization.scaled import DTYPES, ScaledArray
from triax.moe.shared import arguments
from triax.moe.shared.arguments import Array

_BYTES = 16  # of the 32 numbers that share a scale
_UINT8, _INT32 = (np.dtype("uint8"),), (np.dtype("int32"),)
_INTEGERS = (*_INT32, np.dtype("int64"))
_FLOATS = tuple(map(np.dtype, ("float32", "float16", ml_dtypes.bfloat16)))
_AWQ_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # where each of eight columns is in a word
_BITS = " Only 4 bits are supported."
_LAYOUTS = " GPTQ's `qweight` is [in / 8, out], AWQ's [in, out / 8]."


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
    _check("blocks", blocks, _UINT8)
    _check("scales", scales, _UINT8, rank=0)
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
    values: Any = blocks.reshape(*lead, count * each)
    block = *(1 for _ in lead[1:]), 2 * each, 1
    return ScaledArray(values, scales.view(E8M0), block, True, "float4_e2m1fn")


def from_gptq(
    qweight: Array,
    qzeros: Array,
    scales: Array,
    g_idx: Array | None = None,
    *,
    group_size: int | None = None,
    v2: bool = False,
) -> ScaledArray:
    """Returns weights that GPTQ quantized to 4 bits: ``(number - zero) * scale``.

        w = moe.from_gptq(qweight, qzeros, scales, g_idx)
        w.shape  # (in, out)

    Args:
      qweight: int32 [..., in / 8, out]; each holds eight numbers, the first in the lowest bits.
      qzeros: int32 [..., groups, out / 8]; each holds eight zeros.
      scales: float32, float16 or bfloat16 [..., groups, out].
      g_idx: int32 or int64 [..., in], the group of each number. They must be in order: groups of
        "act order" (`desc_act`) are refused. The documentation shows how to sort them.
      group_size: as in the checkpoint's `quantization_config`. None follows `g_idx`, or else the
        shapes, if that is a power of two or all of `in`.
      v2: whether zeros are stored as they are, `"checkpoint_format": "gptq_v2"`. Otherwise they
        are stored less one.

    Returns:
      A `ScaledArray` of shape [..., in, out] that is stored transposed.

    Raises:
      ArgumentTypeError: an argument has the wrong type.
      ArgumentValueError: shapes do not match, or `group_size` or `g_idx` is refused.
    """
    messages.check_bool(v2=v2)
    _check("qweight", qweight, _INT32)
    *lead, words, out = qweight.shape
    zeros = _transposed(_zeros(qzeros, scales, lead, out)[..., :out]) + np.uint8(not v2)
    group = _group(8 * words, scales.shape[-2], group_size, lead, "g_idx", g_idx)
    return _int4(_octets(_transposed(qweight)), _transposed(scales), group, zeros)


def from_awq(
    qweight: Array, qzeros: Array, scales: Array, *, group_size: int | None = None
) -> ScaledArray:
    """Returns weights that AWQ quantized to 4 bits, "gemm": ``(number - zero) * scale``.

    Args:
      qweight: int32 [..., in, out / 8]; each holds eight numbers, from the lowest bits in the order
        0, 2, 4, 6, 1, 3, 5, 7. `in` is even.
      qzeros: int32 [..., groups, out / 8]; each holds eight zeros in that order.
      scales, group_size: as in `from_gptq`, which lists result and errors.
    """
    _check("qweight", qweight, _INT32)
    *lead, depth, words = qweight.shape
    zeros = _transposed(_in_order(_zeros(qzeros, scales, lead, 8 * words)))
    group = _group(depth, scales.shape[-2], group_size, lead)
    numbers = _in_order(_nibbles(qweight))
    both = numbers[..., ::2, :] | numbers[..., 1::2, :] << 4
    return _int4(_transposed(both), _transposed(scales), group, zeros)


def from_compressed_tensors(
    weight_packed: Array,
    weight_scale: Array,
    weight_shape: Array | None = None,
    weight_zero_point: Array | None = None,
    weight_g_idx: Array | None = None,
    *,
    group_size: int | None = None,
) -> ScaledArray:
    """Returns weights of compressed-tensors' "pack-quantized": ``(number - zero) * scale``.

    Args:
      weight_packed: int32 [..., out, in / 8]; each holds eight numbers plus 8, the first in the
        lowest bits.
      weight_scale: float32, float16 or bfloat16 [..., out, groups].
      weight_shape: int32 or int64 [2] or [..., 2], out and in. `in` is even.
      weight_zero_point: int32 [..., out / 8, groups]; each holds eight zeros plus 8. None is 0.
      weight_g_idx: as `g_idx` in `from_gptq`; or all -1.
      group_size: as in `from_gptq`, which lists result and errors.
    """
    _check("weight_packed", weight_packed, _INT32)
    *lead, out, words = weight_packed.shape
    _check("weight_scale", weight_scale, _FLOATS, (*lead, out, "groups"), "`weight_packed`")
    groups, depth, zeros = weight_scale.shape[-1], 8 * words, None
    if weight_shape is not None:
        wanted = (*lead, 2)[-weight_shape.ndim :]
        _check("weight_shape", weight_shape, _INTEGERS, wanted, "`weight_packed`")
        sizes = np.asarray(weight_shape)
        depth = int(sizes[..., 1].max(initial=0))
        if (sizes != (out, depth)).any() or -(-depth // 8) != words:
            raise ArgumentValueError(
                f"Argument `weight_shape` must be ({out}, in), where `in` numbers take {words} "
                f"words of eight, as in `weight_packed`; got {sizes.tolist()}.{_BITS}"
            )
    if weight_zero_point is not None:
        wanted = (*lead, -(-out // 8), groups)
        _check("weight_zero_point", weight_zero_point, _INT32, wanted, "`weight_scale`", _BITS)
        zeros = _nibbles(_transposed(weight_zero_point))[..., :out].swapaxes(-1, -2)
    if weight_g_idx is not None and (np.asarray(weight_g_idx) == -1).all():
        weight_g_idx = None
    group = _group(depth, groups, group_size, lead, "weight_g_idx", weight_g_idx)
    return _int4(_octets(weight_packed)[..., : depth // 2], weight_scale, group, zeros)


def from_8_bits(
    weight: Array, weight_scale: Array, *, block: Sequence[int] = (128, 128)
) -> ScaledArray:
    """Returns weights in float8 or int8 times their scales; bytes stay unchanged.

        w = moe.from_8_bits(weight, weight_scale_inv)  # DeepSeek-V3
        w.shape  # (in, out)

    Args:
      weight: float8_e4m3fn, float8_e5m2 or int8 [..., out, in].
      weight_scale: what numbers are multiplied with, also if it is named `weight_scale_inv`:
        floats [..., out / block, in / block], rounded up, for blocks; [..., out] or [..., out, 1]
        for channels; [...] or [..., 1] for whole layers.
      block: the sizes of a block along out and in, a checkpoint's `weight_block_size`.

    Returns:
      A `ScaledArray` of shape [..., in, out] that is stored transposed.

    Raises:
      ArgumentTypeError: an argument has the wrong type.
      ArgumentValueError: the shapes do not match.
    """
    _check("weight", weight, DTYPES)
    if not isinstance(block, Sequence) or len(block) != 2:
        raise ArgumentTypeError(
            f"Argument `block` must be two ints, along out and in; got {messages.shown(block)}."
        )
    rows, columns = (arguments.integer(f"block[{i}]", of, 1) for i, of in enumerate(block))
    *lead, out, depth = weight.shape
    blocks = -(-out // rows), -(-depth // columns)
    ways: dict[Any, Any] = {blocks: (columns, rows), (out, 1): (None, 1), (1, 1): (None, None)}
    _check("weight_scale", weight_scale, (*_FLOATS, E8M0), rank=0)
    sizes = (*weight_scale.shape[len(lead) :], 1, 1)[:2]
    fits = weight_scale.shape == (*lead, *sizes)[: max(weight_scale.ndim, len(lead))]
    if not fits or sizes not in ways:
        raise ArgumentValueError(
            "Argument `weight_scale` must have one of the shapes "
            f"{', '.join(str((*lead, *way)) for way in ways)} to go with `weight` of shape "
            f"{weight.shape}, in blocks of {rows} × {columns}; got {weight_scale.shape}."
        )
    values: Any = weight
    scales: Any = weight_scale if weight_scale.dtype == E8M0 else weight_scale.astype(np.float32)
    return ScaledArray(
        values, scales.reshape(*lead, *sizes), (*(1 for _ in lead), *ways[sizes]), True
    )


def _check(
    name: str, array: Any, dtypes: tuple[np.dtype, ...], shape: Any = None, *of: str, rank: int = 2
) -> None:
    """Raises unless an argument is an array of a dtype, and of a shape or of `rank` dimensions."""
    few = shape is None and getattr(array, "ndim", 0) < rank
    if not jax_private.is_array(array) or array.dtype not in dtypes or few:
        raise ArgumentTypeError(
            f"Argument `{name}` must be an array of {' or '.join(of.name for of in dtypes)}"
            f"{', of two dimensions or more' * few}; got {messages.shown(array)}."
        )
    if shape is not None:
        arguments.check_shape(name, array.shape, shape, *of)


def _zeros(qzeros: Any, scales: Any, lead: list[int], out: int) -> Any:
    """Returns the numbers in `qzeros`, a row for each row of `scales`."""
    _check("scales", scales, _FLOATS, (*lead, "groups", out), "`qweight`", _LAYOUTS)
    wanted = (*lead, scales.shape[-2], -(-out // 8))
    _check("qzeros", qzeros, _INT32, wanted, "`scales`", _BITS)
    return _nibbles(qzeros)


def _group(
    depth: int, count: int, size: Any, lead: list[int], name: str = "", g_idx: Any = None
) -> int | None:
    """Returns how many numbers along the depth share a scale, None for all, or raises."""
    found: Any = None if size is None else arguments.integer("group_size", size, -1)
    if g_idx is not None:
        _check(name, g_idx, _INTEGERS, (*lead, depth), "the weights")
        index = np.asarray(g_idx).reshape(-1, depth)
        found = max(np.count_nonzero(index[:1] == 0), 1)
        if (index != np.arange(depth) // found).any():
            raise ArgumentValueError(
                f"Argument `{name}` must be in order, 0, …, 0, 1, …, 1, …, in groups of one size. "
                'The groups of "act order" would need the tokens in another order for each '
                'expert: use a checkpoint with `"desc_act": false`, or sort the rows by group: '
                '"Act order" in the documentation.'
            )
    elif found is None:
        found = depth // max(count, 1)
        found = found if count == 1 or found & (found - 1) == 0 else None
    found = depth if found == -1 else found
    if not found or -(-depth // found) != count or depth % 2:
        groups = f"there are {count} groups"
        if found:
            groups = f"{count} groups of {found} are {count * found} numbers"
        raise ArgumentValueError(
            "Argument `group_size` must be the size of a group, as in `quantization_config`: "
            f"{groups}, and `in` is {depth}{', which must be even' * (depth % 2)}; got {size}."
        )
    return None if count == 1 else found


def _int4(values: Any, scales: Any, group: int | None, zeros: Any) -> ScaledArray:
    """Returns a scaled array of numbers and zeros that are stored plus 8."""
    if zeros is not None:
        zeros = zeros.astype(np.int8) - np.int8(8)
    block = *(1 for _ in values.shape[2:]), group, 1
    values, scales = values ^ np.uint8(0x88), scales.astype(np.float32)
    return ScaledArray(values, scales, block, True, "int4", zeros)


def _transposed(array: Any) -> Any:
    """Swaps the last two dimensions, in memory too."""
    return array.swapaxes(-1, -2).copy()


def _octets(words: Any) -> Any:
    """Returns the bytes of each int32, from the lowest on: uint8 [..., 4 * n]."""
    return (np.ascontiguousarray(words) if isinstance(words, np.ndarray) else words).view(np.uint8)


def _nibbles(words: Any) -> Any:
    """Returns the eight numbers in each int32, from the lowest bits on: uint8 [..., 8 * n]."""
    found = _octets(words)[..., None] >> np.array([0, 4], np.uint8) & np.uint8(15)
    return found.reshape(*words.shape[:-1], 8 * words.shape[-1])


def _in_order(numbers: Any) -> Any:
    """Returns columns that are in AWQ's order in theirs."""
    words = numbers.reshape(*numbers.shape[:-1], numbers.shape[-1] // 8, 8)
    return words[..., _AWQ_ORDER].reshape(numbers.shape)
