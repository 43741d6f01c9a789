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
from triax.errors import ArgumentTypeError, ArgumentValueError, CheckpointError
from triax.moe.quantization import packing, scaled
from triax.moe.quantization.packing import E8M0
from triax.moe.quantization.scaled import ScaledArray
from triax.moe.shared import arguments
from triax.moe.shared.arguments import Array, check_array

_UINT8, _INT32, _INT64 = ((np.dtype(name),) for name in ("uint8", "int32", "int64"))
_IN_ORDER = 4 * np.arange(8, dtype=np.int32)  # where the numbers of a word start, in bits
_AWQ_ORDER = _IN_ORDER[[0, 4, 1, 5, 2, 6, 3, 7]]
_BITS = " Only 4 bits are supported."
_FIX = ' If it is wrong or missing, pass `config={**checkpoint.config, "quantization_config": …}`.'
_PACKED = "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"
_FORMATS = (
    ("weight", "weight_scale", "weight_zero_point"),
    ("weight", "weight_scale_inv", "weight_zero_point"),
    ("qweight", "qzeros", "scales", "g_idx"),
    _PACKED,
)
NAMES = "bias", *dict.fromkeys(name for names in _FORMATS for name in names)

# Keys of `quantization_config`, and of the weights of its groups: those that are read, and those
# that do not matter for a layer's weights. Any other is refused.
_READ = """
    actorder bits block_structure checkpoint_format config_groups desc_act dynamic format group_size
    num_bits quant_method strategy sym transform_config type version weight_block_size
"""
_OTHERS = """
    activation_scale_ub activation_scheme autoround_version backend batch_size
    block_name_to_quantize cache_block_outputs damp_auto_increment damp_percent dataset dequantize
    do_fuse exllama_config fmt fuse_max_seq_len global_compression_ratio ignore ignored_layers
    kv_cache_scheme lm_head max_input_length meta model_file_base_name model_name_or_path
    model_seqlen module_name_preceding_first_block modules_in_block_to_quantize modules_to_fuse
    modules_to_not_convert observer observer_kwargs pack_dtype pad_token_id quantization_status
    scale_dtype scale_fmt sparsity_config static_groups symmetric tokenizer true_sequential
    use_cuda_fp16 use_exllama zero_point zp_dtype
"""


def from_mxfp4(blocks: Array, scales: Array, *, tiles: bool = True) -> ScaledArray:
    """Returns the weights of an MXFP4 checkpoint such as gpt-oss's.

        moe.from_mxfp4(blocks, scales).shape  # (experts, in, out)

    Each byte holds two numbers of float4_e2m1fn, the first in its lower half. Each scale is a
    power of two, float8_e8m0fnu, for 32 numbers along `in`. Errors are as in `from_gptq`.

    Args:
      blocks: uint8 [..., out, in / 32, 16], such as `mlp.experts.gate_up_proj_blocks`.
      scales: uint8 [..., out, in / 32], such as `mlp.experts.gate_up_proj_scales`.
      tiles: as in `from_gptq`.
    """
    *lead, count, _ = check_array("blocks", blocks, _UINT8, (..., "out", "in / 32", 16), "MXFP4")
    check_array("scales", scales, _UINT8, (*lead, count), "`blocks`")
    values, scales = blocks.reshape(*lead, 16 * count), scales.view(E8M0)
    return _scaled("scales", values, scales, (None, 32), tiles, packed="float4_e2m1fn")


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
        floats [..., out / size, in / size], rounded up, for blocks; [..., out] or [..., out, 1] for
        channels; [...], [..., 1] or [..., 1, 1] for whole layers.
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
        "weight_scale", weight_scale, (*scaled.FLOATS, E8M0), (*lead, *blocks), "`weight`"
    )
    wide = weight_scale if weight_scale.dtype == E8M0 else weight_scale.astype(np.float32)
    wide = wide.reshape(*lead, *(*shape[len(lead) :], 1, 1)[:2])
    return _scaled("weight_scale", weight, wide, tuple(stated), tiles)


def in_tiles(weights: Any) -> Any:
    """Returns weights that are stored [..., out, in] in tiles, if kernels read these."""
    if not isinstance(weights, ScaledArray) or weights.dtype.name not in packing.TILED:
        return weights
    zeros, sizes = weights.zeros, weights.shape[-2:]
    out, depth = sizes[::-1] if weights.transposed else sizes
    group = scaled.stored_block(weights)[-1]
    fits = weights.size and not (out % packing.TILE or depth % packing.TILE)
    fits = fits and (group is None or group >= depth or group % packing.LEAST_SCALED == 0)
    return weights.tile() if fits and (zeros is None or zeros.dtype == np.int8) else weights


def flat(config: Any) -> dict[str, Any]:
    """Returns `quantization_config` with the keys of its groups' weights, for `linear`.

    Raises:
      CheckpointError: it or a group is no mapping, or weights of its groups differ.
    """
    name = "quantization_config"
    config = _mapping(name, config)
    said: list[dict[str, Any]] = []
    for group, of in _mapping(f'{name}["config_groups"]', config.get("config_groups")).items():
        of = _mapping(f'{name}["config_groups"][{group!r}]', of)
        weights = _mapping(f'{name}["config_groups"][{group!r}]["weights"]', of.get("weights"))
        if weights:
            of_group = {} if of.get("format") is None else {"format": of["format"]}
            said.append({**weights, **of_group})
    if any(of != said[0] for of in said):
        raise CheckpointError(
            f'The weights of the groups in `{name}["config_groups"]` differ, and it is not known '
            f"which are the experts'.{_FIX}"
        )
    return {**config, **(said[0] if said else {})}


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise CheckpointError(
            f"The model's configuration must have a mapping as `{name}`; got "
            f"{messages.shown(value)}.{_FIX}"
        )
    return value or {}


def linear(own: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
    """Returns a linear layer's weights [out, in]. The names of its tensors tell their format.

    `config` is what `flat` returns. Its sizes of groups and blocks must be those of the arrays.
    """
    # AutoGPTQ wrote zeros as the biases of linear layers that have none.
    for name in ("bias", "weight_zero_point")[: 1 if "weight_packed" in own else 2]:
        if np.any(own.get(name)):
            raise ArgumentValueError(f"Experts of this format have no `{name}` but zeros.")
    if not any(own.keys() <= {*names, "bias"} for names in _FORMATS):
        raise ArgumentValueError(f"No known format has all of these tensors: {', '.join(own)}.")
    if own.keys() <= {"weight", "bias"}:
        remedy = " Numbers of 8 bits or less must have scales."
        check_array("weight", own["weight"], scaled.FLOATS, (..., "out", "in"), "experts", remedy)
        return own["weight"]
    check(config)
    act_order = _said(config, "desc_act", (True, False), False)
    act_order |= _said(config, "actorder", _ORDERS, "weight") in _BY_ACTIVATION
    groups = own.__getitem__ if act_order else own.get
    bits = 4 if own.keys() & {"qweight", "weight_packed"} else 8
    for key in ("bits", "num_bits"):
        _said(config, key, (bits,), bits)
    if "qweight" in own:
        words = own["qweight"], own["qzeros"], own["scales"]
        size = _integer(config, "group_size")
        methods = ("gptq",) if "g_idx" in own else ("gptq", "awq")
        if _said(config, "quant_method", methods) == "awq":
            _said(config, "version", ("gemm", "GEMM"), "gemm")
            made = from_awq(*words, group_size=size, tiles=False)
        else:
            of = _said(config, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
            options: Any = {"v2": of == "gptq_v2", "group_size": size, "tiles": False}
            made = from_gptq(*words, groups("g_idx"), **options)
            if _said(config, "sym", (True, False), False):
                if np.any(made.zeros):
                    raise ArgumentValueError(
                        "The zeros of a checkpoint with `sym` must be 8: `checkpoint_format` must "
                        f'be "gptq_v2" if they are stored as they are, else "gptq".{_FIX}'
                    )
                made = dataclasses.replace(made, zeros=None)
    elif "weight_packed" in own:
        for key, choices in _PACK_QUANTIZED.items():
            _said(config, key, choices, choices[0])
        _, size = _block_size(config) or (None, None)
        packed = own["weight_packed"], own["weight_scale"], own.get("weight_shape")
        more = own.get("weight_zero_point"), groups("weight_g_idx")
        made = from_compressed_tensors(*packed, *more, group_size=size, tiles=False)
    else:
        _said(config, "quant_method", ("fp8", "fbgemm_fp8", "compressed-tensors"), "fp8")
        scale = own.get("weight_scale", own.get("weight_scale_inv"))
        made = from_8_bits(own["weight"], scale, block_size=_block_size(config), tiles=False)
    made = made.mT
    (rows, group), out = made.block, len(made)
    if not rows or out % rows:  # blocks of the gate must not reach into `up`, which is next to it
        scales: Any = np.repeat(made.scales, rows or out, 0)[:out]
        made = dataclasses.replace(made, scales=scales, block=(1, group))
    return made


_BY_ACTIVATION = True, "group", "dynamic"
_ORDERS = *_BY_ACTIVATION, False, "weight", "static"
_PACK_QUANTIZED = {
    "quant_method": ("compressed-tensors",),
    "type": ("int",),
    "format": ("pack-quantized",),
    "strategy": ("group", "channel"),
}


def mxfp4(own: Mapping[str, Any], config: Mapping[str, Any]) -> ScaledArray:
    """Returns all experts' weights [experts, in, out] of gpt-oss's tensors."""
    check(config)
    _said(config, "quant_method", ("mxfp4",), "mxfp4")
    return from_mxfp4(own["_blocks"], own["_scales"], tiles=False)


def check(config: Mapping[str, Any]) -> None:
    """Raises if a flat `quantization_config` has keys that may matter and are not known."""
    known = {*_READ.split(), *_OTHERS.split()}
    unknown = [f'`quantization_config["{key}"]`' for key in config if key not in known]
    if config.get("transform_config"):
        unknown.append('`quantization_config["transform_config"]`')
    dynamic = config.get("dynamic")  # GPTQ's: what begins with "-:" is not quantized
    is_mapping = isinstance(dynamic, Mapping)
    if dynamic and not (is_mapping and all(str(of).startswith("-:") for of in dynamic)):
        unknown.append('`quantization_config["dynamic"]`')
    if unknown:
        raise ArgumentValueError(
            f"{', '.join(unknown)}: unknown, and weights may depend on it.{_FIX}"
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
    for key in ("weight_block_size", "block_structure"):
        if (block := config.get(key)) is not None:
            name = f'quantization_config["{key}"]'
            if not isinstance(block, list | tuple) or len(block) != 2:
                raise ArgumentValueError(
                    f"Argument `{name}` must be two sizes; got {messages.short(block)}.{_FIX}"
                )
            sizes.append(tuple(_size(name, of) for of in block))
    strategy = config.get("strategy")
    if strategy is not None:
        choices = {"tensor": (-1, -1), "channel": (1, -1), "group": None, "block": None}
        _said(config, "strategy", tuple(choices))
        sizes += [of] if (of := choices[strategy]) else []
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
            size = size or int((groups == 0).sum(-1).max(initial=0)) or None
            deep = 2 * half if size in (None, -1) else size
            if (groups != np.arange(2 * half) // deep).any():
                raise ArgumentValueError(
                    f"Argument `{of_groups}` must be in order, in groups of {deep}{said}: 0, …, 0, "
                    '1, …, 1, …. Those of "act order" are refused. Take a checkpoint that was made '
                    "without it, read the experts in 16 bits, or sort their rows: "
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
