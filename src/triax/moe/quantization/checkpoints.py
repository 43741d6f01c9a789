"""Makes scaled arrays from the arrays of quantized checkpoints, as Hugging Face stores them.

A `ScaledArray` of linear layers is [..., in, out], with any dimensions in front. Arrays of NumPy
give arrays of NumPy: nothing goes to a device before the caller puts it there.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from triax import messages
from triax.errors import ArgumentTypeError, ArgumentValueError, CheckpointError
from triax.moe.quantization import packing, scaled
from triax.moe.quantization.packing import E4M3, E8M0
from triax.moe.quantization.scaled import ScaledArray
from triax.moe.shared import arguments
from triax.moe.shared.arguments import Array, check_array

_INT32, _INT64 = ((np.dtype(name),) for name in ("int32", "int64"))
_BYTES, _CODES = (np.dtype("uint8"), np.dtype("int8")), (np.dtype("uint8"), E8M0)
_IN_ORDER = 4 * np.arange(8, dtype=np.int32)  # where the numbers of a word start, in bits
_AWQ_ORDER = _IN_ORDER[[0, 4, 1, 5, 2, 6, 3, 7]]
_BITS = " Only 4 bits are supported."
_FIX = ' If it is wrong or missing, pass `config={**checkpoint.config, "quantization_config": …}`.'


def from_mxfp4(blocks: Array, scales: Array, *, tiles: bool = True) -> ScaledArray:
    """Returns the weights of an MXFP4 checkpoint such as gpt-oss's.

        moe.from_mxfp4(blocks, scales).shape  # (experts, in, out)

    Each byte holds two numbers of float4_e2m1fn, the first in its lower half. Each scale is a
    power of two, float8_e8m0fnu, for 32 numbers along `in`. Errors are as in `from_gptq`.

    Args:
      blocks: uint8 or int8 [..., out, in / 32, 16], such as `mlp.experts.gate_up_proj_blocks`, or
        [..., out, in / 2], such as a single expert's `weight_packed`.
      scales: uint8 or float8_e8m0fnu [..., out, in / 32].
      tiles: as in `from_gptq`.
    """
    return _mxfp4("blocks", blocks, "scales", scales, tiles)


def _mxfp4(of_values: str, values: Any, of_scales: str, scales: Any, tiles: bool) -> ScaledArray:
    in_blocks = np.ndim(values) > np.ndim(scales)
    wanted = (..., "out", "in / 32", 16) if in_blocks else (..., "out", "in / 2")
    *lead, size = check_array(of_values, values, _BYTES, wanted, "MXFP4")
    count = lead.pop() if in_blocks else -(-size // 16)
    check_array(of_scales, scales, _CODES, (*lead, count), f"`{of_values}`")
    values = values.view(np.uint8).reshape(*lead, -1) if in_blocks else values.view(np.uint8)
    scales, packed = scales.view(E8M0), "float4_e2m1fn"
    return _scaled(of_scales, values, scales, (None, 32), tiles, packed=packed)


def from_nvfp4(
    weight: Array, weight_scale: Array, weight_scale_2: Array, *, tiles: bool = True
) -> ScaledArray:
    """Returns weights of an NVFP4 checkpoint: ``number * weight_scale * weight_scale_2``.

        moe.from_nvfp4(weight, weight_scale, weight_scale_2).shape  # (in, out), stored transposed
        moe.from_nvfp4(weight_packed, weight_scale, 1 / weight_global_scale)  # compressed-tensors

    Each byte holds two numbers of float4_e2m1fn, the first in its lower half. Errors are as in
    `from_gptq`.

    Args:
      weight: uint8 [..., out, in / 2].
      weight_scale: float8_e4m3fn [..., out, in / 16].
      weight_scale_2: float32 [...], [..., 1] or [..., 1, 1], one for each layer.
      tiles: as in `from_gptq`.
    """
    *lead, out, half = check_array("weight", weight, _BYTES[:1], (..., "out", "in / 2"), "NVFP4")
    check_array("weight_scale", weight_scale, (E4M3,), (*lead, out, -(-half // 8)), "`weight`")
    ones = (1,) * max(np.ndim(weight_scale_2) - len(lead), 0)
    check_array("weight_scale_2", weight_scale_2, scaled.FLOATS[:1], (*lead, *ones), "`weight`")
    of_columns = weight_scale_2.reshape(*lead, 1, 1) * np.ones((out, 1), np.float32)
    how = {"packed": "float4_e2m1fn", "global_scales": of_columns}
    return _scaled("weight_scale", weight, weight_scale, (None, 16), tiles, **how)


def from_gptq(
    qweight: Array,
    qzeros: Array,
    scales: Array,
    g_idx: Array | None = None,
    *,
    v2: bool = False,
    group_size: int | None = None,
    tiles: bool = True,
) -> ScaledArray:
    """Returns weights that GPTQ quantized to 4 bits: ``(number - zero) * scale``.

        moe.from_gptq(qweight, qzeros, scales, group_size=128).shape  # (in, out), stored transposed

    Args:
      qweight: int32 [..., in / 8, out]; each holds eight numbers, the first in the lowest bits.
      qzeros: int32 [..., groups, out / 8]; each holds eight zeros.
      scales: float32, float16 or bfloat16 [..., groups, out].
      g_idx: int32 or int64 [..., in], the group of each number. They must be in order: groups of
        "act order" (`desc_act`) are refused. The documentation shows how to sort them.
      v2: whether zeros are stored as they are (`"checkpoint_format": "gptq_v2"`), not less one.
      group_size: the size of a group along `in`, -1 for all of it; the last group may be smaller.
        None: by `g_idx`, else by the shapes if only one size fits, such as with one group.
      tiles: whether to reorder the weights as `ScaledArray.tile` does, if kernels then read them:
        `in` and `out` must be multiples of 64, and groups of 32. False keeps the stored order.

    Raises:
      ArgumentTypeError: an argument has the wrong type.
      ArgumentValueError: shapes do not match, `g_idx` is refused, or `group_size` must be given.
    """
    messages.check_bool(v2=v2)
    check_array("qweight", qweight, _INT32, (..., "in / 8", "out"), "GPTQ")
    values = qweight.mT.copy().view(np.uint8)
    arrays = {"scales": scales, "qzeros": qzeros, "g_idx": g_idx}
    return _int4(values, True, _IN_ORDER, 7 + v2, group_size, tiles, **arrays)


def from_awq(
    qweight: Array,
    qzeros: Array,
    scales: Array,
    *,
    group_size: int | None = None,
    tiles: bool = True,
) -> ScaledArray:
    """Returns weights that AWQ quantized to 4 bits, "gemm": ``(number - zero) * scale``.

    Args:
      qweight: int32 [..., in, out / 8]; each holds eight numbers, from the lowest bits in the order
        0, 2, 4, 6, 1, 3, 5, 7. `in` is even.
      qzeros: int32 [..., groups, out / 8]; each holds eight zeros in that order.
      scales, group_size, tiles: as in `from_gptq`, which lists the errors.
    """
    check_array("qweight", qweight, _INT32, (..., "in", "out / 8"), "AWQ")
    values = packing.pack(_nibbles(qweight, _AWQ_ORDER).mT.copy())
    arrays = {"scales": scales, "qzeros": qzeros, "g_idx": None}
    return _int4(values, True, _AWQ_ORDER, 8, group_size, tiles, **arrays)


def from_compressed_tensors(
    weight_packed: Array,
    weight_scale: Array,
    weight_shape: Array | None = None,
    weight_zero_point: Array | None = None,
    weight_g_idx: Array | None = None,
    *,
    group_size: int | None = None,
    tiles: bool = True,
) -> ScaledArray:
    """Returns weights of compressed-tensors' "pack-quantized": ``(number - zero) * scale``.

    Args:
      weight_packed: int32 [..., out, in / 8]; each holds eight numbers plus 8, lowest bits first.
      weight_scale: [..., out, groups], else as `scales` in `from_gptq`, which lists the errors.
      weight_shape: int32 or int64 [2] or [..., 2], out and in. `in` is even.
      weight_zero_point: int32 [..., out / 8, groups]; each holds eight zeros plus 8. None is 0.
      weight_g_idx: as `g_idx` in `from_gptq`; or all -1.
      group_size, tiles: as in `from_gptq`.
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
    arrays = {
        "weight_scale": weight_scale,
        "weight_zero_point": weight_zero_point,
        "weight_g_idx": weight_g_idx,
    }
    return _int4(values, False, _IN_ORDER, 8, group_size, tiles, **arrays)


def from_8_bits(
    weight: Array,
    weight_scale: Array,
    *,
    block_size: tuple[int, int] | None = None,
    tiles: bool = True,
) -> ScaledArray:
    """Returns weights in float8 or int8 times their scales.

        w = moe.from_8_bits(weight, weight_scale_inv, block_size=(128, 128))  # DeepSeek-V3
        w.shape  # (in, out), stored transposed

    Args:
      weight: float8_e4m3fn, float8_e5m2 or int8 [..., out, in]. Errors are as in `from_gptq`.
      weight_scale: what numbers are multiplied with, also if it is named `weight_scale_inv`:
        floats, or powers of two in float8_e8m0fnu or its bytes, uint8; [..., out / size, in /
        size], rounded up, for blocks; [..., out] or [..., out, 1] for channels; [...], [..., 1]
        or [..., 1, 1] for whole layers.
      block_size: the sizes of a block along `out` and `in`, -1 for all of it; the last block may be
        smaller. None: by the shapes if only one size fits, as with channels and whole layers.
      tiles: as in `from_gptq`; float8_e5m2 is never reordered. Pass False if the weights are
        multiplied by rows in 8 bits, or by rows in float16 and have scales for blocks.
    """
    sizes: Any = block_size
    if sizes is not None and not (
        isinstance(sizes, tuple | list) and len(sizes) == 2 and None not in sizes
    ):
        raise ArgumentTypeError(
            "Argument `block_size` must be the two sizes of a block along `out` and `in`; got "
            f"{messages.shown(block_size)}."
        )
    stated = [_size(f"block_size[{axis}]", of) for axis, of in enumerate(sizes or (None, None))]
    *lead, _, _ = check_array("weight", weight, scaled.DTYPES, (..., "out", "in"), "its scales")
    blocks = ("out / size", "in / size")[: max(np.ndim(weight_scale) - len(lead), 0)]
    shape = check_array(
        "weight_scale", weight_scale, (*scaled.FLOATS, *_CODES), (*lead, *blocks), "`weight`"
    )
    is_power = weight_scale.dtype in _CODES
    wide = weight_scale.view(E8M0) if is_power else weight_scale.astype(np.float32)
    wide = wide.reshape(*lead, *(*shape[len(lead) :], 1, 1)[:2])
    return _scaled("weight_scale", weight, wide, tuple(stated), tiles)


def in_tiles(weights: Any) -> Any:
    """Returns weights that are stored [..., out, in] in tiles, if kernels read these."""
    if not isinstance(weights, ScaledArray) or weights.dtype.name not in packing.TILED:
        return weights
    zeros, sizes = weights.zeros, weights.shape[-2:]
    out, depth = sizes[::-1] if weights.transposed else sizes
    group, least = scaled.stored_block(weights)[-1], packing.least_scaled(weights.scales)
    fits = weights.size and not (out % packing.TILE or depth % packing.TILE)
    fits = fits and (group is None or group >= depth or group % least == 0)
    return weights.tile() if fits and (zeros is None or zeros.dtype == np.int8) else weights


def flat(config: Any, module: str = "") -> dict[str, Any]:
    """Returns `quantization_config` with the keys of a linear layer's weights, for `linear`.

    Groups of compressed-tensors have targets: names, patterns of names behind "re:", and "Linear"
    for the rest. Quark has patterns of layers, and the rest. GPTQModel has rules by patterns,
    ModelOpt's mixed precision what each layer is, or all within it.

    Raises:
      CheckpointError: it, a group or a rule is no mapping, or weights of its groups differ and none
        of them is for `module`, or several are.
    """
    name = "quantization_config"
    config = _mapping(name, config)
    if config.get("quant_method") in ("gptq", "awq"):
        rules = _mapping(f'{name}["dynamic"]', config.get("dynamic"))
        config = {**config, "dynamic": None, **_rule(module, rules)}
    if config.get("quant_method") in ("modelopt", None) and config.get("quantized_layers"):
        stem = f'{name}["quantized_layers"]'
        layers = _mapping(stem, config["quantized_layers"])
        layer = max((of for of in layers if f"{module}.".startswith(f"{of}.")), key=len, default="")
        # Its groups say the same by `targets`.
        others = dict.fromkeys(("quantized_layers", "config_groups", "group_size"))
        config = {**config, **others, **_mapping(f"{stem}[{layer!r}]", layers.get(layer))}
    groups: list[tuple[list[str], Mapping[str, Any]]] = []
    ignored = _list(f'{name}["ignore"]', config.get("ignore"))
    of_groups = _mapping(f'{name}["config_groups"]', config.get("config_groups"))
    for group, of in of_groups.items():
        stem = f'{name}["config_groups"][{group!r}]'
        of = _mapping(stem, of)
        if weights := _mapping(f'{stem}["weights"]', of.get("weights")):
            stated = {} if of.get("format") is None else {"format": of["format"]}
            groups.append((_list(f'{stem}["targets"]', of.get("targets")), {**weights, **stated}))
    quark = {  # by patterns of names
        "Linear": config.get("global_quant_config"),
        **_mapping(f'{name}["layer_type_quant_config"]', config.get("layer_type_quant_config")),
        **_mapping(f'{name}["layer_quant_config"]', config.get("layer_quant_config")),
    }
    for pattern, of in quark.items() if config.get("global_quant_config") else ():
        stem = f"{name}[…_quant_config][{pattern!r}]"
        weight = _mapping(f'{stem}["weight"]', _mapping(stem, of).get("weight"))
        target = pattern if pattern == "Linear" else f"re:{fnmatch.translate(str(pattern))}"
        groups.append(([target], weight))
    whole = {"format": None} if config.get("format") == "mixed-precision" else {}
    return {**config, **whole, **_of_module(module, groups, ignored)}


def _rule(module: str, rules: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns what the first of GPTQModel's rules that is for a linear layer changes of its keys.

    What "-:" is before is not quantized, which the layer's tensors tell.
    """
    try:
        first = next((of for of in rules if re.match(re.sub("^[+-]:", "", str(of)), module)), "-:")
    except re.error as error:
        raise CheckpointError(f"A pattern in `quantization_config` is damaged: {error}.") from error
    stem = f'quantization_config["dynamic"][{first!r}]'
    return {} if str(first).startswith("-:") else _mapping(stem, rules[first])


def _of_module(module: str, groups: list[tuple[list[str], Any]], ignored: list[str]) -> Any:
    """Returns what the groups say about a linear layer's weights, by their targets."""
    if all(weights == groups[0][1] for _, weights in groups):
        return groups[0][1] if groups else {}

    def names(target: str) -> bool:
        return target == module or bool(target[:3] == "re:" and re.match(target[3:], module))

    try:
        exact = [weights for targets, weights in groups if module in targets]
        named = [weights for targets, weights in groups if any(map(names, targets))]
        ignores = any(map(names, ignored))
    except re.error as error:
        raise CheckpointError(f"A pattern in `quantization_config` is damaged: {error}.") from error
    fitting = exact or named or [weights for targets, weights in groups if "Linear" in targets]
    if ignores or not fitting or any(of != fitting[0] for of in fitting):
        why = "`ignore` has it" if ignores else f"{len(fitting)} of them are for it"
        raise CheckpointError(
            f"The weights of the groups in `quantization_config` differ, and it is not known which "
            f"are those of {module!r}: {why}.{_FIX}"
        )
    return fitting[0]


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise CheckpointError(
            f"The model's configuration must have a mapping as `{name}`; got "
            f"{messages.shown(value)}.{_FIX}"
        )
    return value or {}


def _list(name: str, value: Any) -> list[str]:
    strings = isinstance(value, list | tuple) and all(isinstance(of, str) for of in value)
    if value is not None and not strings:
        raise CheckpointError(
            f"The model's configuration must have a list of strings as `{name}`; got "
            f"{messages.shown(value)}.{_FIX}"
        )
    return [*(value or ())]


_SCALES = "weight_scale", "weight_scale_inv", "scale", "qscale_weight"
_FLOATS, _FP8 = ([of.name for of in dtypes] for dtypes in (scaled.FLOATS, scaled.DTYPES[:2]))
_POWERS = [of.name for of in _CODES]
_BY_ACTIVATION = True, "group", "dynamic"


class Format(NamedTuple):
    """A way to store a linear layer's weights.

    Attributes:
      tensors: their names, which end in "?" if they may be missing; `weight_scale` stands for all
        of `_SCALES`.
      numbers, scales: dtypes by name, where other formats have the same names of tensors.
      values: what keys of `quantization_config` may say; several are a tuple.
      read: makes the tensors a `ScaledArray` [..., in, out]; its second argument is what `flat`
        returns.
    """

    tensors: str
    numbers: Collection[str]
    scales: Collection[str]
    values: Mapping[str, Any]
    read: Callable[[Mapping[str, Any], Mapping[str, Any]], ScaledArray]

    def fits(self, own: Mapping[str, Any]) -> bool:
        """Whether the tensors that are there have the format's dtypes."""
        numbers, scales = own.get("weight", own.get("weight_packed")), own.get("weight_scale")
        return all(
            array is None or not dtypes or array.dtype.name in dtypes
            for array, dtypes in ((numbers, self.numbers), (scales, self.scales))
        )

    def choices(self, key: str) -> tuple[Any, ...]:
        """What a key may say."""
        values = self.values[key]
        return values if isinstance(values, tuple) else (values,)


def _read_gptq(own: Mapping[str, Any], config: Mapping[str, Any]) -> ScaledArray:
    groups = own["g_idx"] if config.get("desc_act") else own.get("g_idx")
    versions = {config.get(key) for key in ("checkpoint_format", "format")} - {None}
    if len(versions) > 1:
        raise ArgumentValueError(f"`checkpoint_format` and `format` differ.{_FIX}")
    options: Any = {"v2": versions == {"gptq_v2"}, "tiles": False}
    options["group_size"] = _integer(config, "group_size")
    made = from_gptq(own["qweight"], own["qzeros"], own["scales"], groups, **options)
    if not config.get("sym"):
        return made
    if np.any(made.zeros):
        raise ArgumentValueError(
            "The zeros of a checkpoint with `sym` must be 8: `checkpoint_format` must be "
            f'"gptq_v2" if they are stored as they are, else "gptq".{_FIX}'
        )
    return dataclasses.replace(made, zeros=None)


def _read_awq(own: Mapping[str, Any], config: Mapping[str, Any]) -> ScaledArray:
    size = _integer(config, "group_size")
    if config.get("pack_method"):  # Quark wrote it: symmetric numbers are signed there
        _said(config, "zero_point", (True,), True)
    return from_awq(own["qweight"], own["qzeros"], own["scales"], group_size=size, tiles=False)


def _read_packed(own: Mapping[str, Any], config: Mapping[str, Any]) -> ScaledArray:
    _, size = _block_size(config) or (None, None)
    packed = own["weight_packed"], own["weight_scale"], own.get("weight_shape")
    by_activation = config.get("actorder") in _BY_ACTIVATION
    groups = own["weight_g_idx"] if by_activation else own.get("weight_g_idx")
    zeros = own.get("weight_zero_point")
    return from_compressed_tensors(*packed, zeros, groups, group_size=size, tiles=False)


def _read_mxfp4(own: Mapping[str, Any], config: Mapping[str, Any]) -> ScaledArray:
    name = "weight_packed" if "weight_packed" in own else "weight"
    if own[name].dtype == np.int8:
        _said(config, "expert_dtype", ("fp4",))
    return _mxfp4(name, own[name], "weight_scale", own["weight_scale"], False)


def _read_nvfp4(own: Mapping[str, Any], config: Mapping[str, Any]) -> ScaledArray:
    if "weight_scale_2" in own:
        numbers, scale_2 = own["weight"], own["weight_scale_2"]
    else:  # compressed-tensors divides
        numbers, scale_2 = own["weight_packed"], 1 / own["weight_global_scale"]
    return from_nvfp4(numbers, own["weight_scale"], scale_2, tiles=False)


def _read_8_bits(own: Mapping[str, Any], config: Mapping[str, Any]) -> ScaledArray:
    weight, scale = own["weight"], own["weight_scale"]
    if scale.ndim == weight.ndim + 2 and scale.shape[-3::2] == (1, 1):  # ModelOpt's FP8_PB_WO
        scale = scale[..., 0, :, 0]
    block = _block_size(config) or _BLOCKS.get(config.get("quant_algo"))
    return from_8_bits(weight, scale, block_size=block, tiles=False)


_GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "desc_act": (True, False),
    "sym": (True, False),
    "checkpoint_format": ("gptq", "gptq_v2"),
    "format": ("gptq", "gptq_v2"),
    "method": "gptq",
}
_AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "desc_act": False,
    "version": ("gemm", "GEMM"),
    "pack_method": "reorder",
    "checkpoint_format": "gemm",
    "format": "gemm",
    "method": "awq",
}
_PACKED = {
    "quant_method": "compressed-tensors",
    "num_bits": 4,
    "type": "int",
    "format": "pack-quantized",
    "strategy": ("group", "channel"),
    "actorder": (*_BY_ACTIVATION, False, "weight", "static"),
}
# What ModelOpt says of no size.
_BLOCKS: dict[Any, tuple[int, int]] = {
    "MXFP8": (1, 32),
    "FP8_PB_WO": (128, 128),
    "fp8_pb_wo": (128, 128),
}
_MX = {"type": "float", "scale_format": "e8m0", "scale_fmt": "ue8m0"}
_MXFP4 = _MX | {
    "quant_method": ("mxfp4", "compressed-tensors", "quark", "fp8"),
    "num_bits": 4,
    "format": "mxfp4-pack-quantized",
    "strategy": "group",
    "group_size": 32,
    "dtype": "fp4",
    "qscheme": "per_group",
    "expert_dtype": "fp4",
}
_NVFP4 = {
    "quant_method": "modelopt",
    "quant_algo": ("NVFP4", "W4A16_NVFP4"),
    "num_bits": 4,
    "type": "float",
    "group_size": 16,
}
_NVFP4_PACKED = {
    "quant_method": "compressed-tensors",
    "num_bits": 4,
    "type": "float",
    "format": "nvfp4-pack-quantized",
    "strategy": "tensor_group",
    "group_size": 16,
}
_FLOAT8 = {
    "quant_method": ("fp8", "fbgemm_fp8", "compressed-tensors", "quark", "modelopt"),
    "quant_algo": ("FP8", "FP8_PB_WO", "fp8_pb_wo"),
    "num_bits": 8,
    "type": "float",
    "format": ("float-quantized", "naive-quantized"),
    "dtype": ("fp8_e4m3", "fp8_e5m2"),
    "scale_format": "float32",
}
_MXFP8 = _FLOAT8 | _MX | {"format": "mxfp8-quantized", "quant_algo": "MXFP8"}
_INT8 = {
    "quant_method": ("compressed-tensors", "quark"),
    "num_bits": 8,
    "type": "int",
    "format": ("int-quantized", "naive-quantized"),
    "dtype": "int8",
}
_PACKED_TENSORS = "weight_packed weight_scale weight_shape? weight_zero_point? weight_g_idx?"
_MXFP4_TENSORS = "weight? weight_packed? weight_scale weight_zero_point?"
_NVFP4_TENSORS = "weight_packed weight_scale weight_global_scale"
_TENSORS = "weight weight_scale weight_zero_point?"
FORMATS = (
    Format("qweight qzeros scales g_idx?", (), (), _GPTQ, _read_gptq),
    Format("qweight qzeros scales", (), (), _AWQ, _read_awq),
    Format(_PACKED_TENSORS, ("int32",), (), _PACKED, _read_packed),
    Format(_MXFP4_TENSORS, ("uint8", "int8"), _POWERS, _MXFP4, _read_mxfp4),
    Format("weight weight_scale weight_scale_2", ("uint8",), (E4M3.name,), _NVFP4, _read_nvfp4),
    Format(_NVFP4_TENSORS, ("uint8",), (E4M3.name,), _NVFP4_PACKED, _read_nvfp4),
    Format(_TENSORS, _FP8, _FLOATS, _FLOAT8, _read_8_bits),
    Format(_TENSORS, _FP8, _POWERS, _MXFP8, _read_8_bits),
    Format(_TENSORS, ("int8",), _FLOATS, _INT8, _read_8_bits),
)
NAMES = (
    "bias",
    *{name.rstrip("?"): 0 for of in FORMATS for name in of.tensors.split()},
    *_SCALES[1:],
)

# The keys of `quantization_config` by `quant_method`, with those of its weights: those that are
# read, and those that do not matter for a layer's weights. Any other is refused.
KEYS = {
    "awq": (
        "bits checkpoint_format desc_act dynamic format group_size method pack_method version "
        "zero_point",
        "autoround_version backend do_fuse exllama_config fuse_max_seq_len lm_head meta "
        "modules_to_fuse modules_to_not_convert pack_dtype",
    ),
    "compressed-tensors": (
        "actorder block_structure config_groups dynamic format group_size ignore num_bits strategy "
        "transform_config type",
        "global_compression_ratio kv_cache_scheme observer observer_kwargs quantization_status "
        "scale_dtype sparsity_config symmetric version zp_dtype",
    ),
    "fbgemm_fp8": ("", "activation_scale_ub modules_to_not_convert"),
    "fp8": (
        "expert_dtype scale_fmt weight_block_size",
        "activation_scheme dequantize fmt ignored_layers kv_cache_scheme modules_to_convert "
        "modules_to_not_convert",
    ),
    "gptq": (
        "bits checkpoint_format desc_act dynamic format group_size method sym",
        "act_group_aware autoround_version batch_size block_name_to_quantize cache_block_outputs "
        "damp_auto_increment damp_percent dataset exllama_config lm_head max_input_length meta "
        "model_file_base_name model_name_or_path model_seqlen module_name_preceding_first_block "
        "modules_in_block_to_quantize pack_dtype pack_impl pad_token_id static_groups tokenizer "
        "true_sequential use_cuda_fp16 use_exllama",
    ),
    "modelopt": (
        "config_groups dynamic group_size ignore num_bits quant_algo quantized_layers type",
        "exclude_modules kv_cache_quant_algo kv_cache_scheme producer",
    ),
    "mxfp4": ("", "dequantize modules_to_not_convert"),
    "quark": (
        "block_size ch_axis dtype global_quant_config group_size layer_quant_config "
        "layer_type_quant_config qscheme scale_format",
        "algo_config enable_buffer_reuse exclude export is_dynamic is_scale_quant "
        "kv_cache_post_rope kv_cache_quant_config max_input_numel mx_element_dtype observer_cls "
        "quant_mode round_method scale_calculation_mode scale_type softmax_quant_spec symmetric "
        "version zero_point_type",
    ),
}


def linear(own: Mapping[str, Any], quantization: Any, module: str = "") -> Any:
    """Returns the weights [..., out, in] of a linear layer, `module`, of its tensors.

    Their names and dtypes tell their format, and `quantization_config` must not contradict them.
    """
    config = flat(quantization, module)
    scale = next((name for name in _SCALES if name in own), "")
    own = {_SCALES[0] if name == scale else name: array for name, array in own.items()}
    named = [of for of in FORMATS if own.keys() <= {*of.tensors.replace("?", "").split()}]
    if not named:
        raise ArgumentValueError(f"No known format has all of these tensors: {', '.join(own)}.")
    if own.keys() <= {"weight"}:
        remedy = " Numbers of 8 bits or less must have scales."
        check_array("weight", own["weight"], scaled.FLOATS, (..., "out", "in"), "experts", remedy)
        return own["weight"]
    formats = [of for of in named if of.fits(own)] or named[-1:]
    for name in formats[0].tensors.split():
        if name[-1] != "?":
            own[name]  # raises if it is missing
    methods = [method for of in formats for method in of.choices("quant_method")]
    method = _said(config, "quant_method", methods, None if "qweight" in own else methods[0])
    of = next(of for of in formats if method in of.choices("quant_method"))
    _check_keys(config, methods if config.get("quant_method") is None else [method])
    for key in of.values:
        _said(config, key, of.choices(key), of.choices(key)[0])
    if of.read is not _read_packed and np.any(own.get("weight_zero_point")):
        raise ArgumentValueError("Weights of this format have no `weight_zero_point` but zeros.")
    made = of.read(own, config).mT
    (*_, rows, group), out = made.block, made.shape[-2]
    # Blocks of an expert's gate must not reach into `up`, which is put next to it.
    if made.ndim == 2 and (not rows or out % rows):
        scales: Any = np.repeat(made.scales, rows or out, 0)[:out]
        made = dataclasses.replace(made, scales=scales, block=(1, group))
    return made


def _check_keys(config: Mapping[str, Any], methods: list[str]) -> None:
    """Raises if `quantization_config` has keys that none of the methods has."""
    known = {key for method in methods for of in KEYS[method] for key in of.split()}
    known |= {"quant_method"}
    unknown = [key for key, value in config.items() if key not in known and value is not None]
    unknown += [key for key in ("transform_config", "dynamic") if config.get(key)]
    if unknown:
        keys = ", ".join(f'`quantization_config["{key}"]`' for key in dict.fromkeys(unknown))
        raise ArgumentValueError(
            f"{keys}: unknown beside {' or '.join(map(repr, methods))}, and weights may depend on "
            "it. Pass `config` without it if they do not."
        )


def _said(config: Mapping[str, Any], key: str, choices: Any, default: Any = None) -> Any:
    """Returns what `quantization_config` has for a key, which must be one of the choices."""
    value = default if config.get(key) is None else config[key]
    messages.check_choice(f'quantization_config["{key}"]', value, choices, _FIX)
    return value


def _integer(config: Mapping[str, Any], key: str) -> Any:
    """Returns a size that `quantization_config` has, or None."""
    return _size(f'quantization_config["{key}"]', config.get(key))


def _block_size(config: Mapping[str, Any]) -> Any:
    """Returns the sizes of a block along (out, in) that `quantization_config` has, or nothing."""
    group = _integer(config, "group_size")
    sizes: list[Any] = [(1, group)] if group is not None else []
    for key in ("weight_block_size", "block_structure", "block_size"):
        if (block := config.get(key)) is not None:
            name = f'quantization_config["{key}"]'
            if not isinstance(block, list | tuple) or len(block) != 2:
                raise ArgumentValueError(
                    f"Argument `{name}` must be two sizes; got {messages.short(block)}.{_FIX}"
                )
            sizes.append(tuple(_size(name, of) for of in block))
    wholes = {"tensor": (-1, -1), "channel": (1, -1), "group": None, "block": None}
    for key, before in (("strategy", ""), ("qscheme", "per_")):
        if config.get(key) is not None:
            strategy = _said(config, key, [before + of for of in wholes]).removeprefix(before)
            if strategy == "channel":  # Quark's may be those of `in`
                _said(config, "ch_axis", (0,), 0)
            sizes += [of] if (of := wholes[strategy]) else []
    if any(of != sizes[0] for of in sizes):
        raise ArgumentValueError(
            f"The sizes {sizes} that `quantization_config` has for a block differ.{_FIX}"
        )
    return sizes[0] if sizes else None


def _size(name: str, value: Any) -> int | None:
    """Returns a size, -1 for all of a dimension, or None if it is not given; checked."""
    if value is None or arguments.integer(name, value, -1) == -1:
        return value
    return arguments.integer(name, value, 1)


def _int4(
    values: Any,
    swaps: bool,
    order: Any,
    zero: int,
    group_size: int | None,
    tiles: bool,
    **arrays: Any,
) -> ScaledArray:
    """Returns a scaled array of bytes [..., out, in / 2]; 8 has been added to each number.

    `arrays` are scales, zeros and groups by their names; with `swaps` scales and zeros are
    [..., groups, out]. `zero` has been added to zeros, and words hold them in an `order`.
    """
    (of_scales, scales), (of_zeros, zeros), (of_groups, groups) = arrays.items()
    *lead, out, half = values.shape
    size = _size("group_size", group_size)
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
    if groups is not None:
        check_array(of_groups, groups, _INT32 + _INT64, (*lead, 2 * half), "the weights")
        if (groups != -1).any():
            said = ", as `group_size` says" * (size is not None)
            first = int((groups == 0).sum(-1).max(initial=0)) or None
            size, index = size or first, np.arange(2 * half)
            deep = 2 * half if size in (None, -1) else size
            if (groups != index // deep).any():
                if first and (groups == index // first).all():
                    raise ArgumentValueError(
                        f"Argument `group_size` must be {first}, the size of the groups in "
                        f"`{of_groups}`; got {size}."
                    )
                raise ArgumentValueError(
                    f"Argument `{of_groups}` must be in order, in groups of {deep}{said}: 0, …, 0, "
                    '1, …, 1, …. Those of "act order" are refused. Take a checkpoint that was made '
                    "without it, read this layer in 16 bits, or sort its rows: "
                    '"Act order" in the documentation.'
                )
    stated, values = (None, size), values ^ np.uint8(0x88)
    return _scaled(of_scales, values, scales, stated, tiles, packed="int4", zeros=zeros)


def _scaled(
    name: str, values: Any, scales: Any, stated: Any, tiles: bool, **packed: Any
) -> ScaledArray:
    """Returns a scaled array [..., in, out] of arrays [..., out, in], with `tiles` in tiles if apt.

    `stated` are the sizes of a block along (out, in), -1 for all and None if the shapes tell it.
    """
    messages.check_bool(tiles=tiles)
    shape = (*values.shape[:-1], 2 * values.shape[-1]) if packed else values.shape
    block: list[int | None] = [1 for _ in shape[2:]]
    for size, count, of in zip(shape[-2:], scales.shape[-2:], stated, strict=True):
        block.append(_along(size, count, of))
    if 0 in block:
        argument, size = ("group_size", stated[1]) if packed else ("block_size", stated)
        size = f" {size}" if {None} != {*stated} else ""
        raise ArgumentValueError(
            f"Argument `{name}` must have a scale for each block of `{argument}`{size}; got "
            f"{scales.shape[-2:]} along (out, in), which are {shape[-2:]}. Without `{argument}`, "
            "which `quantization_config` in config.json has, exactly one size must fit the shapes, "
            "and the last block may be partial."
        )
    made = ScaledArray(values, scales, tuple(block), **packed).mT
    return in_tiles(made) if tiles else made


def _along(size: int, count: int, stated: int | None) -> int | None:
    """Returns the size of a block along a dimension, None for all of it; 0 if it is not known."""
    if stated is not None:
        if count != (1 if stated == -1 else -(-size // stated)):
            return 0
        return None if count == 1 else stated
    if not size or count < 2:
        return None if size and count else 0
    # Blocks of `least` to `most` give so many scales, as the last one may be partial.
    least, most = -(-size // count), (size - 1) // (count - 1)
    return least if least == most else 0


def _nibbles(words: Any, order: Any) -> Any:
    """Returns the eight numbers in each int32, in an order: uint8 [..., 8 * n]."""
    nibbles = (words[..., None] >> order & 15).astype(np.uint8)
    return nibbles.reshape(*words.shape[:-1], 8 * words.shape[-1])
