"""Layers of small checkpoints: their tensors by name, and what is wanted of them."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np

from tests.moe.quantization.oracle import exactly
from triax import moe

EXPERTS, HIDDEN, WIDTH, GROUP = 3, 64, 96, 32
MLP = "model.layers.3.mlp"
USUAL, MIXTRAL = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")
SHAPES = (WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)

rng = np.random.default_rng(0)


def words(*shape):
    return rng.integers(-(2**31), 2**31, shape, np.int32)


def floats(*shape, dtype=ml_dtypes.bfloat16):
    return rng.standard_normal(shape).astype(dtype)


def plain(out, depth):
    return {"weight": floats(out, depth)}


def gptq(out, depth):
    groups = depth // GROUP
    return {
        "qweight": words(depth // 8, out),
        "qzeros": words(groups, out // 8),
        "scales": floats(groups, out, dtype=np.float16),
        "g_idx": np.arange(depth, dtype=np.int32) // GROUP,
    }


def awq(out, depth):
    rest = {name: array for name, array in gptq(out, depth).items() if name != "g_idx"}
    return rest | {"qweight": words(depth, out // 8)}


def packed(out, depth):
    return {
        "weight_packed": words(out, depth // 8),
        "weight_scale": floats(out, depth // GROUP),
        "weight_shape": np.array([out, depth]),
    }


def packed_with_zeros(out, depth):
    return packed(out, depth) | {"weight_zero_point": words(out // 8, depth // GROUP)}


def mxfp4(numbers, scales, dtype=np.uint8, of_scales=np.uint8):
    """Single linear layers in MXFP4, under a format's names for numbers and scales."""

    def make(out, depth):
        values = rng.integers(0, 256, (out, depth // 2), np.uint8)
        codes = rng.integers(118, 130, (out, depth // 32), np.uint8)
        return {numbers: values.view(dtype), scales: codes.view(of_scales)}

    return make


def mxfp8(out, depth):
    weight = rng.integers(-100, 100, (out, depth)).astype(ml_dtypes.float8_e4m3fn)
    return {
        "weight": weight,
        "weight_scale": rng.integers(118, 130, (out, depth // 32), np.uint8),
    }


def nvfp4(*names):
    """Weights with scales of 16, and one more for each linear layer."""

    def make(out, depth):
        scales = rng.integers(0, 127, (out, depth // 16), np.uint8)
        scale_2 = np.float32(2.0 ** rng.integers(-9, 9))  # 1 / scale_2 is exact
        if names[-1] == "weight_global_scale":
            scale_2 = np.array([scale_2])
        values = rng.integers(0, 256, (out, depth // 2), np.uint8)
        return dict(
            zip(names, (values, scales.view(ml_dtypes.float8_e4m3fn), scale_2), strict=True)
        )

    return make


def in_8_bits(scale, *sizes, dtype=ml_dtypes.float8_e4m3fn, of_scales=np.float32):
    """Weights with scales of the sizes, where a number is that of a block."""

    def make(out, depth):
        found = [-(-of // size) for of, size in zip((out, depth), sizes, strict=False)]
        weight = rng.integers(-100, 100, (out, depth)).astype(dtype)
        return {"weight": weight, scale: np.array(2.0 ** rng.integers(-3, 3, found), of_scales)}

    return make


def of_group(quant_format, **weights):
    """What compressed-tensors says of weights, as published."""
    weights = {"dynamic": False, "symmetric": True, "strategy": "group", "group_size": 32} | weights
    group = {"format": quant_format, "targets": ["Linear"], "weights": weights}
    method = {"quant_method": "compressed-tensors", "format": quant_format, "ignore": ["lm_head"]}
    return method | {"config_groups": {"group_0": group}}


QUARK = {
    "algo_config": None,
    "exclude": ["lm_head"],
    "export": {"pack_method": "reorder", "weight_format": "real_quantized"},
    "global_quant_config": {
        "bias": None,
        "input_tensors": {"dtype": "fp4", "group_size": 32, "is_dynamic": True},
        "weight": {
            "ch_axis": -1,
            "dtype": "fp4",
            "group_size": 32,
            "is_dynamic": False,
            "observer_cls": "PerBlockMXObserver",
            "qscheme": "per_group",
            "scale_format": "e8m0",
            "symmetric": None,
        },
    },
    "layer_quant_config": {},
    "layer_type_quant_config": {},
    "quant_method": "quark",
    "quant_mode": "eager_mode",
    "version": "0.11",
}
# DeepSeek-V4's linear layers are in float8; `expert_dtype` is beside `quantization_config`.
V4 = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [32, 32], "fmt": "e4m3"}
QWEN = {"model_type": "qwen3_moe", "hidden_act": "silu"}
GPT_OSS = {"model_type": "gpt_oss", "hidden_act": "silu", "swiglu_limit": 7.0}


def read(tensors, config=None, **how):
    """The layer's experts; what `config` does not say is of Qwen3-MoE, but for a checkpoint's."""
    of_folder = config is None and isinstance(tensors, moe.Checkpoint)
    config = None if of_folder else {**QWEN, **(config or {})}
    return moe.Experts.from_checkpoint(tensors, MLP, config=config, **how)


FROM_PACKED = functools.partial(moe.from_compressed_tensors, group_size=GROUP)
FROM_BLOCKS = functools.partial(moe.from_8_bits, block_size=(32, 32))
IN_BLOCKS = {"weight_block_size": [32, 32]}
FORMATS = {
    "plain": (plain, moe.Experts, {}),
    "gptq": (gptq, moe.from_gptq, {"quant_method": "gptq"}),
    "gptq_v2": (
        gptq,
        lambda *of: moe.from_gptq(*of, v2=True),
        {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    ),
    "awq": (
        awq,
        functools.partial(moe.from_awq, group_size=GROUP),
        {"quant_method": "awq", "version": "GEMM", "group_size": GROUP},
    ),
    "packed": (packed, FROM_PACKED, {"group_size": GROUP}),
    "packed_with_zeros": (packed_with_zeros, FROM_PACKED, {"group_size": GROUP}),
    "blocks": (in_8_bits("weight_scale_inv", 32, 32), FROM_BLOCKS, IN_BLOCKS),
    "compressed_blocks": (in_8_bits("weight_scale", 32, 32), FROM_BLOCKS, IN_BLOCKS),
    # The last block of the gate is partial, and up is next to it.
    "partial_blocks": (
        in_8_bits("weight_scale_inv", 64, 64),
        lambda *of: moe.from_8_bits(*of, block_size=(64, 64)),
        {"quant_method": "fp8", "weight_block_size": [64, 64]},
    ),
    # 128 × 128: both gate and up are in a part of a block.
    "wide_blocks": (in_8_bits("weight_scale_inv", 128, 128), moe.from_8_bits, {}),
    "channels": (in_8_bits("weight_scale", 1, 1000, dtype=np.int8), moe.from_8_bits, {}),
    "tensors": (in_8_bits("weight_scale"), moe.from_8_bits, {}),
    "mxfp4": (
        mxfp4("weight_packed", "weight_scale"),
        moe.from_mxfp4,
        of_group("mxfp4-pack-quantized", num_bits=4, type="float", scale_dtype="torch.uint8"),
    ),
    "nvfp4": (
        nvfp4("weight", "weight_scale", "weight_scale_2"),
        moe.from_nvfp4,
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
    ),
    "nvfp4_of_compressed_tensors": (
        nvfp4("weight_packed", "weight_scale", "weight_global_scale"),
        lambda packed, scale, of_all: moe.from_nvfp4(packed, scale, 1 / of_all),
        of_group(
            "nvfp4-pack-quantized",
            num_bits=4,
            type="float",
            strategy="tensor_group",
            group_size=16,
            scale_dtype="torch.float8_e4m3fn",
        ),
    ),
    "modelopt_fp8": (
        in_8_bits("weight_scale"),
        moe.from_8_bits,
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
    ),
    "modelopt_mxfp8": (
        mxfp8,
        functools.partial(moe.from_8_bits, block_size=(1, 32)),
        {"quant_method": "modelopt", "quant_algo": "MXFP8"},
    ),
    "quark": (mxfp4("weight", "weight_scale"), moe.from_mxfp4, QUARK),
    "deepseek_v4": (
        mxfp4("weight", "scale", np.int8, ml_dtypes.float8_e8m0fnu),
        moe.from_mxfp4,
        V4 | {"expert_dtype": "fp4"},
    ),
    "mxfp8": (
        mxfp8,
        functools.partial(moe.from_8_bits, block_size=(1, 32)),
        of_group("mxfp8-quantized", num_bits=8, type="float", scale_dtype="torch.uint8"),
    ),
    "blocks_of_powers": (
        in_8_bits("scale", 32, 32, of_scales=ml_dtypes.float8_e8m0fnu),
        FROM_BLOCKS,
        V4 | {"expert_dtype": "fp4"},
    ),
    "mistral": (in_8_bits("qscale_weight"), moe.from_8_bits, {"quant_method": "fp8"}),
}


def layer(make, linears=USUAL, prefix=MLP, experts=EXPERTS):
    return {
        f"{prefix}.experts.{e}.{name}.{of}": array
        for e in range(experts)
        for name, shape in zip(linears, SHAPES[-len(linears) :], strict=True)
        for of, array in make(*shape).items()
    }


def exact(weights, transposed):
    """Weights [experts, in, out] in float64."""
    is_scaled = isinstance(weights, moe.ScaledArray)
    array = exactly(weights) if is_scaled else np.asarray(weights, np.float64)
    return array.swapaxes(-1, -2) if transposed else array


def wanted(tensors, name, linears, expert, prefix=MLP):
    """One expert's [gate | up] and down, by the function for one matrix."""
    found = []
    for linear in linears:
        stem = f"{prefix}.experts.{expert}.{linear}."
        arrays = [array for of, array in tensors.items() if of.startswith(stem)]
        one = FORMATS[name][1]
        found.append(exact(arrays[0], True) if one is moe.Experts else exact(one(*arrays), False))
    return np.concatenate(found[:2], axis=-1), found[2]


def gpt_oss(quantized):
    stem, tensors = f"{MLP}.experts", {}
    for name, depth, out in (("gate_up_proj", HIDDEN, 2 * WIDTH), ("down_proj", WIDTH, HIDDEN)):
        tensors[f"{stem}.{name}_bias"] = floats(EXPERTS, out)
        if not quantized:
            tensors[f"{stem}.{name}"] = floats(EXPERTS, depth, out)
            continue
        blocks = rng.integers(0, 256, (EXPERTS, out, depth // 32, 16), np.uint8)
        scales = rng.integers(118, 130, (EXPERTS, out, depth // 32), np.uint8)
        tensors |= {f"{stem}.{name}_blocks": blocks, f"{stem}.{name}_scales": scales}
    return tensors
