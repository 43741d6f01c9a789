"""Makes scaled arrays from the arrays of quantized checkpoints, as Hugging Face stores them.

A `ScaledArray` of linear layers is [..., in, out], with any dimensions in front. Arrays of NumPy
give arrays of NumPy: nothing goes to a device before the caller puts it there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from triax import messages
from triax.errors import ArgumentValueError
from triax.moe.quantization import packing, scaled
from triax.moe.quantization.packing import E8M0
from triax.moe.quantization.scaled import ScaledArray
from triax.moe.shared.arguments import Array, check_array

_UINT8, _INT32, _INT64 = ((np.dtype(name),) for name in ("uint8", "int32", "int64"))
_IN_ORDER = 4 * np.arange(8, dtype=np.int32)  # where the numbers of a word start, in bits
_AWQ_ORDER = _IN_ORDER[[0, 4, 1, 5, 2, 6, 3, 7]]
_BITS = " Only 4 bits are supported."
_FIX = ' If it is wrong or missing, pass `config={**checkpoint.config, "quantization_config": …}`.'
_PACKED = "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"
NAMES = *_PACKED, "weight", "weight_scale_inv", "bias", "qweight", "qzeros", "scales", "g_idx"


def from_mxfp4(blocks: Array, scales: Array) -> ScaledArray:
    """Returns the weights of an MXFP4 checkpoint such as gpt-oss's; bytes stay unchanged.

        moe.from_mxfp4(blocks, scales).shape  # (experts, in, out)

    Each byte holds two numbers of float4_e2m1fn, the first in its lower half. Each scale is a
    power of two, float8_e8m0fnu, for 32 numbers along `in`. Errors are as in `from_gptq`.

    Args:
      blocks: uint8 [..., out, in / 32, 16], such as `mlp.experts.gate_up_proj_blocks`.
      scales: uint8 [..., out, in / 32], such as `mlp.experts.gate_up_proj_scales`.
    """
    *lead, count, _ = check_array("blocks", blocks, _UINT8, (..., "out", "in / 32", 16), "MXFP4")
    check_array("scales", scales, _UINT8, (*lead, count), "`blocks`")
    values, scales = blocks.reshape(*lead, 16 * count), scales.view(E8M0)
    return _scaled("scales", values, scales, packed="float4_e2m1fn")


def from_gptq(
    qweight: Array, qzeros: Array, scales: Array, g_idx: Array | None = None, *, v2: bool = False
) -> ScaledArray:
    """Returns weights that GPTQ quantized to 4 bits: ``(number - zero) * scale``.

        moe.from_gptq(qweight, qzeros, scales, g_idx).shape  # (in, out), stored transposed

    Args:
      qweight: int32 [..., in / 8, out]; each holds eight numbers, the first in the lowest bits.
      qzeros: int32 [..., groups, out / 8]; each holds eight zeros.
      scales: float32, float16 or bfloat16 [..., groups, out]. A group's size along `in` is a power
        of two, or all of it.
      g_idx: int32 or int64 [..., in], the group of each number. They must be in order: groups of
        "act order" (`desc_act`) are refused. The documentation shows how to sort them.
      v2: whether zeros are stored as they are (`"checkpoint_format": "gptq_v2"`), not less one.

    Raises:
      ArgumentTypeError: an argument has the wrong type.
      ArgumentValueError: shapes do not match, or `g_idx` is refused.
    """
    messages.check_bool(v2=v2)
    check_array("qweight", qweight, _INT32, (..., "in / 8", "out"), "GPTQ")
    values = qweight.mT.copy().view(np.uint8)
    return _int4(values, True, _IN_ORDER, 7 + v2, scales=scales, qzeros=qzeros, g_idx=g_idx)


def from_awq(qweight: Array, qzeros: Array, scales: Array) -> ScaledArray:
    """Returns weights that AWQ quantized to 4 bits, "gemm": ``(number - zero) * scale``.

    Args:
      qweight: int32 [..., in, out / 8]; each holds eight numbers, from the lowest bits in the order
        0, 2, 4, 6, 1, 3, 5, 7. `in` is even.
      qzeros: int32 [..., groups, out / 8]; each holds eight zeros in that order.
      scales: as in `from_gptq`, which lists result and errors.
    """
    check_array("qweight", qweight, _INT32, (..., "in", "out / 8"), "AWQ")
    values = packing.pack(_nibbles(qweight, _AWQ_ORDER).mT.copy())
    return _int4(values, True, _AWQ_ORDER, 8, scales=scales, qzeros=qzeros, g_idx=None)


def from_compressed_tensors(
    weight_packed: Array,
    weight_scale: Array,
    weight_shape: Array | None = None,
    weight_zero_point: Array | None = None,
    weight_g_idx: Array | None = None,
) -> ScaledArray:
    """Returns weights of compressed-tensors' "pack-quantized": ``(number - zero) * scale``.

    Args:
      weight_packed: int32 [..., out, in / 8]; each holds eight numbers plus 8, lowest bits first.
      weight_scale: [..., out, groups], else as `scales` in `from_gptq`, which lists the errors.
      weight_shape: int32 or int64 [2] or [..., 2], out and in. `in` is even.
      weight_zero_point: int32 [..., out / 8, groups]; each holds eight zeros plus 8. None is 0.
      weight_g_idx: as `g_idx` in `from_gptq`; or all -1.
    """
    check_array("weight_packed", weight_packed, _INT32, (..., "out", "in / 8"), "pack-quantized")
    values = weight_packed.copy().view(np.uint8)
    if weight_shape is not None:
        check_array("weight_shape", weight_shape, _INT32 + _INT64, (..., 2), "`weight_packed`")
        out, depth = np.asarray(weight_shape).reshape(-1, 2).max(axis=0).tolist()
        wanted = (..., out, -(-depth // 8))
        check_array("weight_packed", weight_packed, _INT32, wanted, "`weight_shape`", _BITS)
        if depth % 2:
            raise ArgumentValueError(f"Argument `weight_shape` must have even `in`; got {depth}.")
        values = values[..., : depth // 2]
    arrays = {"weight_scale": weight_scale, "weight_zero_point": weight_zero_point}
    return _int4(values, False, _IN_ORDER, 8, **arrays, weight_g_idx=weight_g_idx)


def from_8_bits(weight: Array, weight_scale: Array) -> ScaledArray:
    """Returns weights in float8 or int8 times their scales; bytes stay unchanged.

        moe.from_8_bits(weight, weight_scale_inv).shape  # (in, out), stored transposed; DeepSeek-V3

    Args:
      weight: float8_e4m3fn, float8_e5m2 or int8 [..., out, in]. Errors are as in `from_gptq`.
      weight_scale: what numbers are multiplied with, also if it is named `weight_scale_inv`:
        floats [..., out / size, in / size], rounded up, for square blocks of a power of two;
        [..., out] or [..., out, 1] for channels; [...], [..., 1] or [..., 1, 1] for whole layers.
    """
    *lead, _, _ = check_array("weight", weight, scaled.DTYPES, (..., "out", "in"), "its scales")
    blocks = ("out / size", "in / size")[: max(np.ndim(weight_scale) - len(lead), 0)]
    shape = check_array(
        "weight_scale", weight_scale, (*scaled.FLOATS, E8M0), (*lead, *blocks), "`weight`"
    )
    wide = weight_scale if weight_scale.dtype == E8M0 else weight_scale.astype(np.float32)
    return _scaled("weight_scale", weight, wide.reshape(*lead, *(*shape[len(lead) :], 1, 1)[:2]))


def linear(own: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
    """Returns a linear layer's weights [out, in]. The names of its tensors tell their format."""
    group: Any = next(iter((config.get("config_groups") or {}).values()), {})
    config = {**config, **(group.get("weights") or {})}
    act_order = config.get("desc_act") or config.get("actorder") in (True, "group", "dynamic")
    groups = own.__getitem__ if act_order else own.get
    # AutoGPTQ wrote zeros as the biases of linear layers that have none.
    for name in ("bias", "weight_zero_point")[: 1 if "weight_packed" in own else 2]:
        if np.any(own.get(name)):
            raise ArgumentValueError(f"Experts of this format have no `{name}` but zeros.")
    if "qweight" in own:
        _said(config, "bits", (4,), 4)
        words = own["qweight"], own["qzeros"], own["scales"]
        if _said(config, "quant_method", ("gptq", "awq")) == "awq":
            _said(config, "version", ("gemm", "GEMM"), "gemm")
            made = from_awq(*words)
        else:
            of = _said(config, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
            made = from_gptq(*words, groups("g_idx"), v2=of == "gptq_v2")
            if config.get("sym") is True:
                if np.any(made.zeros):
                    raise ArgumentValueError(
                        "The zeros of a checkpoint with `sym` must be 8: `checkpoint_format` must "
                        f'be "gptq_v2" if they are stored as they are, else "gptq".{_FIX}'
                    )
                made = dataclasses.replace(made, zeros=None)
    elif "weight_packed" in own:
        _said(config, "num_bits", (4,), 4)
        words = own["weight_packed"], own["weight_scale"], own.get("weight_shape")
        zeros = own.get("weight_zero_point")
        made = from_compressed_tensors(*words, zeros, groups("weight_g_idx"))
    elif "weight_scale" in own or "weight_scale_inv" in own:
        made = from_8_bits(own["weight"], own.get("weight_scale", own.get("weight_scale_inv")))
    else:
        remedy = " Numbers of 8 bits or less must have scales."
        check_array("weight", own["weight"], scaled.FLOATS, (..., "out", "in"), "experts", remedy)
        return own["weight"]
    made = made.mT
    (rows, group), out = made.block, len(made)
    if not rows or out % rows:  # blocks of the gate must not reach into `up`, which is next to it
        scales: Any = np.repeat(made.scales, rows or out, 0)[:out]
        made = dataclasses.replace(made, scales=scales, block=(1, group))
    return made


def _said(config: Mapping[str, Any], key: str, choices: Any, default: Any = None) -> Any:
    """Returns what `quantization_config` has for a key, which must be one of the choices."""
    found = config.get(key) or default
    messages.check_choice(f'quantization_config["{key}"]', found, choices, _FIX)
    return found


def _int4(values: Any, swaps: bool, order: Any, zero: int, **arrays: Any) -> ScaledArray:
    """Returns a scaled array of numbers that are stored plus 8, in bytes [..., out, in / 2].

    `arrays` are scales, zeros and groups by their names; with `swaps` scales and zeros are
    [..., groups, out]. Zeros are stored plus `zero`, in an `order` in words.
    """
    (of_scales, scales), (of_zeros, zeros), (of_groups, groups) = arrays.items()
    *lead, out, half = values.shape
    stored = scaled.swapped if swaps else tuple
    remedy = " GPTQ's `qweight` is [in / 8, out], AWQ's [in, out / 8]." * swaps
    check_array(
        of_scales, scales, scaled.FLOATS, stored((*lead, out, "groups")), "the weights", remedy
    )
    scales = scales.mT.copy() if swaps else scales
    if swaps or zeros is not None:
        wanted = stored((*lead, -(-out // 8), scales.shape[-1]))
        check_array(of_zeros, zeros, _INT32, wanted, f"`{of_scales}`", _BITS)
        zeros = _nibbles(zeros if swaps else zeros.mT, order)[..., :out]
        zeros = zeros.mT.copy().astype(np.int8) - np.int8(zero)
    found = _scaled(of_scales, values ^ np.uint8(0x88), scales, packed="int4", zeros=zeros)
    if groups is not None:
        check_array(of_groups, groups, _INT32 + _INT64, (*lead, 2 * half), "the weights")
        size = found.block[-2] or 2 * half
        if ((groups != -1) & (groups != np.arange(2 * half) // size)).any():
            raise ArgumentValueError(
                f"Argument `{of_groups}` must be in order, in groups of {size}: 0, …, 0, 1, …, 1, …"
                '. Those of "act order" are refused. Take a checkpoint that was made without it, '
                'read the experts in 16 bits, or sort their rows: "Act order" in the documentation.'
            )
    return found


def _scaled(name: str, values: Any, scales: Any, **packed: Any) -> ScaledArray:
    """Returns a scaled array [..., in, out] of arrays [..., out, in], which tell its blocks."""
    shape = (*values.shape[:-1], 2 * values.shape[-1]) if packed else values.shape
    block: list[int | None] = [1 for _ in shape[2:]]
    for size, count in zip(shape[-2:], scales.shape[-2:], strict=True):
        fits = (2**n for n in range(31) if -(-size // 2**n) == count)
        block.append(None if size and count == 1 else next(fits, 0))
    if 0 in block or len({*block[-2:]} - {1, None}) > 1:
        raise ArgumentValueError(
            f"Argument `{name}` must be for rows, columns, or square blocks of a power of two; got "
            f"{scales.shape[-2:]} along (out, in), which are {shape[-2:]}."
        )
    return ScaledArray(values, scales, tuple(block), **packed).mT


def _nibbles(words: Any, order: Any) -> Any:
    """Returns the eight numbers in each int32, in an order: uint8 [..., 8 * n]."""
    found = (words[..., None] >> order & 15).astype(np.uint8)
    return found.reshape(*words.shape[:-1], 8 * words.shape[-1])
