"""Makes scaled arrays from the arrays of quantized checkpoints, as Hugging Face stores them.

Linear layers are stored as [out, in], or as its transpose; a `ScaledArray` of them is [in, out],
and any dimensions in front are kept. Arrays of NumPy give arrays of NumPy: nothing goes to a device
before the caller puts it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
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
_INT32, _UINT8 = (np.dtype("int32"),), (np.dtype("uint8"),)
_FLOATS = tuple(map(np.dtype, ("float32", ml_dtypes.bfloat16, "float16")))
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where each of eight columns is in a word
_BITS = " Only 4 bits are supported."


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
    _check("scales", scales, _UINT8)
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
    """Returns the weights of linear layers that GPTQ quantized to 4 bits.

        w = moe.from_gptq(qweight, qzeros, scales, g_idx)
        w.shape  # (in, out)

    A word of `qweight` holds eight numbers from 0 to 15 along `in`, and a word of `qzeros` eight
    zeros along `out`, the first in the lowest bits. A weight is ``(number - zero) * scale``.

    Args:
      qweight: int32 [..., in / 8, out].
      qzeros: int32 [..., groups, out / 8].
      scales: float16, bfloat16 or float32 [..., groups, out].
      g_idx: integers [..., in], the group of each number along `in`, or None if numbers next to
        each other share a group. Groups in another order ("act order", `desc_act`) are refused.
      group_size: as in the checkpoint's `quantization_config`, -1 for all of `in`; None follows
        `g_idx`, or the shapes if they leave no doubt.
      v2: whether zeros are stored as they are, `"checkpoint_format": "gptq_v2"`. Otherwise each is
        stored less one.

    Returns:
      A `ScaledArray` of int4 with zeros, of shape [..., in, out], that is stored transposed.

    Raises:
      ArgumentTypeError: an argument has the wrong type.
      ArgumentValueError: shapes do not match, the numbers do not have 4 bits, `group_size` is wrong
        or missing, or `g_idx` is not in order.
    """
    messages.check_bool(v2=v2)
    _check("qweight", qweight, _INT32, 2)
    *lead, words, out = qweight.shape
    zeros = _zeros_by_group(lead, out, qzeros, scales)[..., :out]
    groups = 8 * words, scales.shape[-2]
    return _int4(
        _octets(_transposed(qweight)),
        _transposed(scales),
        _group(*groups, group_size, g_idx, (*lead, 8 * words)),
        _transposed(zeros) + np.uint8(not v2),
    )


def from_awq(
    qweight: Array, qzeros: Array, scales: Array, *, group_size: int | None = None
) -> ScaledArray:
    """Returns the weights of linear layers that AWQ quantized to 4 bits, in its "gemm" format.

        w = moe.from_awq(qweight, qzeros, scales)
        w.shape  # (in, out)

    A word holds eight numbers, or zeros, along `out`, from the lowest bits in the order 0, 2, 4, 6,
    1, 3, 5, 7. A weight is ``(number - zero) * scale``.

    Args:
      qweight: int32 [..., in, out / 8].
      qzeros: int32 [..., groups, out / 8].
      scales: float16, bfloat16 or float32 [..., groups, out].
      group_size: as in `from_gptq`.

    Returns:
      A `ScaledArray` of int4 with zeros, of shape [..., in, out], that is stored transposed.

    Raises:
      ArgumentTypeError: an argument has the wrong type.
      ArgumentValueError: shapes do not match, or `group_size` is wrong or missing.
    """
    _check("qweight", qweight, _INT32, 2)
    *lead, depth, words = qweight.shape
    zeros = _zeros_by_group(lead, 8 * words, qzeros, scales)
    if depth % 2:
        raise ArgumentValueError(
            f"Argument `qweight` must have an even number of rows; got {qweight.shape}."
        )
    numbers = _in_order(_nibbles(qweight))
    return _int4(
        _transposed(numbers[..., ::2, :] | numbers[..., 1::2, :] << 4),
        _transposed(scales),
        _group(depth, scales.shape[-2], group_size),
        _transposed(_in_order(zeros)),
    )


def from_compressed_tensors(
    weight_packed: Array,
    weight_scale: Array,
    weight_shape: Array | Sequence[int] | None = None,
    weight_zero_point: Array | None = None,
    weight_g_idx: Array | None = None,
    *,
    group_size: int | None = None,
) -> ScaledArray:
    """Returns the weights of linear layers in compressed-tensors' format "pack-quantized", 4 bits.

        w = moe.from_compressed_tensors(weight_packed, weight_scale, weight_shape)
        w.shape  # (in, out)

    A word of `weight_packed` holds eight numbers along `in`, and a word of `weight_zero_point`
    eight zeros along `out`, each plus 8, the first in the lowest bits. A weight is
    ``(number - zero) * scale``.

    Args:
      weight_packed: int32 [..., out, in / 8].
      weight_scale: float16, bfloat16 or float32 [..., out, groups].
      weight_shape: (out, in), integers [2] or [..., 2]; None if `in` is a multiple of 8.
      weight_zero_point: int32 [..., out / 8, groups], or None: all zero.
      weight_g_idx: as `g_idx` in `from_gptq`; -1 stands for no order.
      group_size: as in `from_gptq`.

    Returns:
      A `ScaledArray` of int4 of shape [..., in, out] that is stored transposed.

    Raises:
      ArgumentTypeError: an argument has the wrong type.
      ArgumentValueError: shapes do not match, the numbers do not have 4 bits, `in` is odd,
        `group_size` is wrong or missing, or `weight_g_idx` is not in order.
    """
    _check("weight_packed", weight_packed, _INT32, 2)
    _check("weight_scale", weight_scale, _FLOATS, 2)
    *lead, out, words = weight_packed.shape
    depth = 8 * words
    if weight_shape is not None:
        sizes = _concrete("weight_shape", weight_shape)
        depth = int(sizes.flat[-1]) if sizes.size else 0
        known = sizes.shape in ((2,), (*lead, 2)) and (sizes == (out, depth)).all()
        if not known or depth % 2 or -(-depth // 8) != words:
            raise ArgumentValueError(
                f"Argument `weight_shape` must be ({out}, in), with an even `in` of which "
                f"{words} words of `weight_packed` hold eight numbers each; got "
                f"{sizes.tolist()}.{_BITS}"
            )
    groups = weight_scale.shape[-1]
    wanted = (*lead, out, groups)
    arguments.check_shape("weight_scale", weight_scale.shape, wanted, "`weight_packed`")
    zeros = None
    if weight_zero_point is not None:
        _check("weight_zero_point", weight_zero_point, _INT32, 2)
        wanted = (*lead, -(-out // 8), groups)
        of = "`weight_scale`"
        arguments.check_shape("weight_zero_point", weight_zero_point.shape, wanted, of, _BITS)
        zeros = _transposed(_nibbles(_transposed(weight_zero_point))[..., :out])
    if weight_g_idx is not None and (_concrete("weight_g_idx", weight_g_idx) == -1).all():
        weight_g_idx = None
    group = _group(depth, groups, group_size, weight_g_idx, (*lead, depth), "weight_g_idx")
    return _int4(_octets(weight_packed)[..., : depth // 2], weight_scale, group, zeros)


def from_8_bits(
    weight: Array, weight_scale: Array, block: Sequence[int] = (128, 128)
) -> ScaledArray:
    """Returns the weights of linear layers in float8 or int8 with scales; bytes stay unchanged.

        w = moe.from_8_bits(weight, weight_scale_inv)  # DeepSeek-V3: for each 128 × 128
        w.shape  # (in, out)

    A weight is its number times its scale, also where the scale's name is `weight_scale_inv`.

    Args:
      weight: float8_e4m3fn, float8_e5m2 or int8 [..., out, in].
      weight_scale: float32, bfloat16, float16 or float8_e8m0fnu: [..., out / block, in / block],
        rounded up, for each block; [..., out] or [..., out, 1] for each channel; [...] or [..., 1]
        for the whole layer.
      block: the sizes of a block along out and in, a checkpoint's `weight_block_size`.

    Returns:
      A `ScaledArray` of shape [..., in, out] that is stored transposed.

    Raises:
      ArgumentTypeError: an argument has the wrong type.
      ArgumentValueError: the shapes do not match.
    """
    _check("weight", weight, DTYPES, 2)
    _check("weight_scale", weight_scale, (*_FLOATS, E8M0))
    if not isinstance(block, Sequence) or len(block) != 2:
        raise ArgumentTypeError(
            f"Argument `block` must be two ints, along out and in; got {messages.shown(block)}."
        )
    rows, columns = (arguments.integer(f"block[{i}]", of, 1) for i, of in enumerate(block))
    *lead, out, depth = weight.shape
    blocks = -(-out // rows), -(-depth // columns)
    ways: dict[tuple[int, ...], tuple[int | None, int | None]] = {
        (): (None, None),
        (1,): (None, None),
        (out,): (1, None),
        (out, 1): (1, None),
        blocks: (rows, columns),
    }
    leads = tuple(lead) == weight_scale.shape[: len(lead)]
    sizes = weight_scale.shape[len(lead) :]
    if not leads or sizes not in ways:
        choices = ", ".join(str((*lead, *sizes)) for sizes in ways)
        raise ArgumentValueError(
            f"Argument `weight_scale` must have one of the shapes {choices} to go with `weight` of "
            f"shape {weight.shape}, in blocks of {rows} × {columns}; got {weight_scale.shape}."
        )
    of_rows, of_columns = ways[sizes]
    shape = (*lead, *(sizes if len(sizes) == 2 else (*sizes, 1) if sizes else (1, 1)))
    numbers: Any = weight
    scales: Any = weight_scale if weight_scale.dtype == E8M0 else weight_scale.astype(np.float32)
    ones = (1,) * len(lead)
    return ScaledArray(numbers, scales.reshape(shape), (*ones, of_columns, of_rows), True)


def _check(name: str, array: Any, dtypes: tuple[np.dtype, ...], least_rank: int = 0) -> None:
    """Raises unless an argument is an array of one of the dtypes and of enough dimensions."""
    if not jax_private.is_array(array) or array.dtype not in dtypes:
        raise ArgumentTypeError(
            f"Argument `{name}` must be an array of {' or '.join(of.name for of in dtypes)}; got "
            f"{messages.shown(array)}."
        )
    if array.ndim < least_rank:
        raise ArgumentValueError(
            f"Argument `{name}` must have {least_rank} dimensions or more; got shape {array.shape}."
        )


def _concrete(name: str, value: Any) -> np.ndarray:
    """Returns integers on the host."""
    if isinstance(value, jax.core.Tracer) or np.asarray(value).dtype.kind not in "iu":
        raise ArgumentTypeError(
            f"Argument `{name}` must be integers that are known outside of jax.jit; got "
            f"{messages.shown(value)}."
        )
    return np.asarray(value)


def _zeros_by_group(lead: list[int], out: int, qzeros: Any, scales: Any) -> Any:
    """Returns the numbers in `qzeros`, of which a row belongs to a row of `scales`."""
    _check("qzeros", qzeros, _INT32, 2)
    _check("scales", scales, _FLOATS, 2)
    groups = scales.shape[-2]
    arguments.check_shape("scales", scales.shape, (*lead, "groups", out), "`qweight`", _OTHER)
    wanted = (*lead, groups, -(-out // 8))
    arguments.check_shape("qzeros", qzeros.shape, wanted, "`scales`", _BITS)
    return _nibbles(qzeros)


_OTHER = " GPTQ's `qweight` is [in / 8, out], AWQ's [in, out / 8]."


def _group(
    depth: int,
    count: int,
    group_size: int | None,
    g_idx: Any = None,
    shape: tuple[int, ...] = (),
    name: str = "g_idx",
) -> int | None:
    """Returns how many numbers along the depth share a scale, None for all, or raises."""
    size = None if group_size is None else arguments.integer("group_size", group_size, -1)
    if g_idx is not None:
        index = _concrete(name, g_idx)
        arguments.check_shape(name, index.shape, shape, "the depth of the weights")
        rows = index.reshape(-1, depth)
        found = int((rows[:1] == 0).sum())
        if not found or (rows != np.arange(depth) // found).any():
            raise ArgumentValueError(
                f"Argument `{name}` must be 0, …, 0, 1, …, 1, …, with numbers next to each other "
                "in groups of one size; got another order. Rows of weights in act order "
                '(`"desc_act": true`) would need another order of the tokens in each expert: use a '
                "checkpoint without it."
            )
        size = found if size in (None, -1) or min(size, depth) == found else 0
    if size is None and count > 0 and depth % count == 0:
        size = depth // count
        size = size if count == 1 or size & (size - 1) == 0 else None
    size = depth if size == -1 else size
    if not size or -(-depth // size) != count:
        given = f"{count} groups of a depth of {depth}"
        got = "no `group_size`" if group_size is None else f"`group_size` {group_size}"
        raise ArgumentValueError(
            f"Argument `group_size` must be the size of a group in `quantization_config`, of which "
            f"there are {given}; got {got}."
        )
    return None if count == 1 else size


def _int4(values: Any, scales: Any, group: int | None, zeros: Any) -> ScaledArray:
    """Returns a scaled array of numbers and zeros that are stored plus 8."""
    ones = (1,) * (values.ndim - 2)
    zeros = None if zeros is None else (zeros.astype(np.int8) - np.int8(8))
    scales = scales.astype(np.float32)
    return ScaledArray(values ^ np.uint8(0x88), scales, (*ones, group, 1), True, "int4", zeros)


def _transposed(array: Any) -> Any:
    """Swaps the last two dimensions in memory, too."""
    return array.swapaxes(-1, -2).copy()


def _octets(words: Any) -> Any:
    """Returns the bytes of each int32, from the lowest on: uint8 [..., 4 * n]."""
    words = np.ascontiguousarray(words) if isinstance(words, np.ndarray) else words
    return words.view(np.uint8)


def _nibbles(words: Any) -> Any:
    """Returns the eight numbers in each int32, from the lowest bits on: uint8 [..., 8 * n]."""
    octets = _octets(words)[..., None] >> np.array([0, 4], np.uint8) & np.uint8(15)
    return octets.reshape(*words.shape[:-1], -1)


def _in_order(numbers: Any) -> Any:
    """Returns the columns of AWQ's numbers in their order."""
    by_word = numbers.reshape(*numbers.shape[:-1], -1, 8)
    return by_word[..., np.array(_AWQ_ORDER)].reshape(numbers.shape)
