"""`Experts.from_checkpoint`: what `config.json` decides, and what it is compared with."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.moe.checkpoint.configs import PUBLISHED, SHARED
from tests.moe.checkpoint.layers import (
    EXPERTS,
    FORMATS,
    GPT_OSS,
    GROUP,
    HIDDEN,
    MLP,
    QWEN,
    WIDTH,
    awq,
    floats,
    gpt_oss,
    gptq,
    in_8_bits,
    layer,
    packed,
    plain,
    read,
    rng,
    words,
)
from tests.moe.quantization.oracle import exactly
from triax import moe
from triax.errors import ArgumentTypeError, ArgumentValueError, CheckpointError
from triax.moe.model_types import TYPES
from triax.moe.quantization import checkpoints

GEMMA = {"model_type": "gemma4_text", "hidden_activation": "gelu_pytorch_tanh"}


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({}, "swiglu"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "geglu"),
        ({"hidden_act": "gelu"}, "geglu_exact"),
        ({"model_type": "new", "text_config": QWEN}, "swiglu"),
        ({"hidden_act": "relu6", "text_config": {"hidden_act": "gelu_pytorch_tanh"}}, "geglu"),
    ],
)
def test_activation(config, activation):
    assert read(layer(plain), config).activation == activation


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        (GEMMA, "geglu"),
        ({"model_type": "gemma4", "text_config": GEMMA}, "geglu"),
        (GPT_OSS, moe.Swiglu(alpha=1.702, limit=7.0, up_offset=1.0)),
        (GPT_OSS | {"swiglu_alpha": 1.5}, moe.Swiglu(alpha=1.5, limit=7.0, up_offset=1.0)),
        (GPT_OSS | {"model_type": "deepseek_v4"}, moe.Swiglu(limit=7.0)),
        (
            GPT_OSS | {"model_type": "minimax_m3_vl_text"},
            moe.Swiglu(alpha=1.702, limit=7.0, up_offset=1.0),
        ),
    ],
)
def test_activation_of_a_model_type(config, activation):
    how = {"config": config}
    tensors = gpt_oss(False)
    found = moe.Experts.from_checkpoint(tensors, MLP, **how)
    assert found.activation == activation
    assert found.interleaved == (config["model_type"] == "gpt_oss")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (QWEN | {"hidden_act": "relu6"}, "has `hidden_act` 'relu6', whose formula is not known"),
        (QWEN | {"hidden_act": None}, "has `hidden_act` None, whose formula"),
        (QWEN | {"hidden_act": ["silu"]}, r"has `hidden_act` \['silu'\], whose formula"),
        ({"model_type": "qwen3_moe"}, "has `hidden_act` None, whose formula"),
        (GPT_OSS | {"hidden_act": "gelu"}, "has `hidden_act` 'gelu', `swiglu_limit` 7.0, whose"),
        (GPT_OSS | {"swiglu_limit": None}, "`swiglu_limit` None, whose formula"),
        (GPT_OSS | {"swiglu_limit": -1}, "`swiglu_limit` -1, whose formula"),
        (GPT_OSS | {"swiglu_limit": True}, "`swiglu_limit` True, whose formula"),
        (GPT_OSS | {"swiglu_limit": 10**400}, "`swiglu_limit` 1000.*, whose formula"),
        (GPT_OSS | {"swiglu_limit": [7.0]}, r"`swiglu_limit` \[7.0\], whose formula"),
        (GPT_OSS | {"swiglu_alpha": "1"}, "and `swiglu_alpha` '1', whose formula"),
        ({}, "has `model_type` None, whose experts are not known; known are dbrx, "),
        ({"hidden_act": "silu"}, "has `model_type` None, whose experts are not known"),
        ({"model_type": "step3", "hidden_act": "silu"}, "has `model_type` 'step3', whose exp"),
        ({"model_type": "step3p5"}, "has `hidden_act` None, whose formula"),
        ({"model_type": ["qwen3_moe"]}, r"has `model_type` \['qwen3_moe'\], whose experts"),
        (GEMMA | {"model_type": "gemma4"}, "has `model_type` 'gemma4', whose experts"),
    ],
)
def test_an_activation_that_is_not_known(config, message):
    tensors = layer(plain) if config.get("model_type") != "gpt_oss" else gpt_oss(False)
    with pytest.raises(CheckpointError, match=f"{message}.* Pass `activation`, such as"):
        moe.Experts.from_checkpoint(tensors, MLP, config=config)
    limited = moe.Swiglu(limit=7.0)
    found = moe.Experts.from_checkpoint(tensors, MLP, config=config, activation=limited)
    assert found.activation is limited


@pytest.mark.parametrize(
    ("config", "key", "argument"),
    [
        (QWEN | {"swiglu_limits": [7.0]}, "swiglu_limits", "activation"),
        (QWEN | {"swiglu_limit": 7.0}, "swiglu_limit", "activation"),
        (QWEN | {"hidden_activation": "gelu"}, "hidden_activation", "activation"),
        (GEMMA | {"hidden_act": "gelu"}, "hidden_act", "activation"),
        (GPT_OSS | {"model_type": "deepseek_v4", "swiglu_alpha": 1}, "swiglu_alpha", "activation"),
        (QWEN | {"mlp_hidden_act": "gelu"}, "mlp_hidden_act", "activation"),
        (QWEN | {"attention_glu": True}, "attention_glu", "activation"),
        (QWEN | {"gate_up_interleaved": True}, "gate_up_interleaved", "interleaved"),
        (QWEN | {"expert_dtype": "fp4"}, "expert_dtype", "config"),
        (QWEN | {"mlp_bias": True}, "mlp_bias", "config"),
        (QWEN | {"moe_latent_size": 8}, "moe_latent_size", "config"),
        (QWEN | {"ffn_config": {}}, "ffn_config", "config"),
        (QWEN | {"compression_config": {}}, "compression_config", "config"),
        (QWEN | {"quantization": {}}, "quantization", "config"),
        (QWEN | {"new": 1}, "new", "config"),
    ],
)
def test_keys_that_are_not_known(config, key, argument):
    tensors = gpt_oss(False)
    message = rf"has `{key}`, unknown for `model_type` '\w+': .* Pass `{argument}`"
    for given in (config, {"model_type": config["model_type"], "text_config": config}):
        with pytest.raises(CheckpointError, match=message):
            moe.Experts.from_checkpoint(tensors, MLP, config=given)
    value = {"activation": "swiglu", "interleaved": False}.get(argument)
    other = {name: of for name, of in config.items() if name != key}
    how = {"config": other} if value is None else {"config": config, argument: value}
    moe.Experts.from_checkpoint(tensors, MLP, **how)


STEP = {"model_type": "step3p5", "hidden_act": "silu", "swiglu_limits": [0, 0, None, 7.0]}


def test_limits_by_layer():
    """Step-3.5 has one for each layer, and clips the gate after the activation."""
    for layer_number, prefix in ((1, "model.layers.1.moe"), (2, "layers.2")):
        tensors = layer(plain, prefix=prefix)
        assert moe.Experts.from_checkpoint(tensors, prefix, config=STEP).activation == "swiglu"
        limits = STEP | {"swiglu_limits": [7.0 * (i == layer_number) for i in range(4)]}
        with pytest.raises(
            CheckpointError, match=r"`swiglu_limits` 7.0 for .*behind SiLU. Pass `ac"
        ):
            moe.Experts.from_checkpoint(tensors, prefix, config=limits)
    clipped = lambda gate, up: jax.numpy.minimum(jax.nn.silu(gate), 7.0) * up.clip(-7.0, 7.0)
    tensors = layer(plain)
    with pytest.raises(CheckpointError, match=r"`swiglu_limits` 7\.0 for `model\.layers\.3\.mlp`"):
        moe.Experts.from_checkpoint(tensors, MLP, config=STEP)
    found = moe.Experts.from_checkpoint(tensors, MLP, config=STEP, activation=clipped)
    assert found.activation is clipped
    for prefix in ("model.layers.4.moe", "block"):  # its limit is not known
        with pytest.raises(CheckpointError, match=r"`swiglu_limits` \[0, 0, None, 7.0\] for "):
            moe.Experts.from_checkpoint(layer(plain, prefix=prefix), prefix, config=STEP)


def test_several_keys_that_are_not_known():
    config = QWEN | {"swiglu_limits": [1], "new": 1, "other": 2, "clamp": 3}
    with pytest.raises(CheckpointError) as caught:
        read(layer(plain), config)
    assert str(caught.value).endswith(
        "has `swiglu_limits`, `clamp`, `new`, `other`, unknown for `model_type` 'qwen3_moe': "
        "experts may depend on it. Pass `activation` to take the place of `swiglu_limits`, `clamp`."
        " Pass `config` without `new`, `other` if experts do not depend on it."
    )


def test_each_model_type_reads_and_leaves_other_keys():
    for name, of in TYPES.items():
        assert not of.read & {*of.others.split()}, name


@pytest.mark.parametrize("name", PUBLISHED)
def test_keys_of_published_configurations(name):
    keys, text = PUBLISHED[name]
    config = dict.fromkeys(f"{SHARED} {keys}".split())
    activation = TYPES[name].activation
    config.pop("hidden_act")
    config |= {"swiglu_limit": 7.0} if "swiglu_limit" in config else {}
    config |= {"model_type": name, activation: "silu"}
    config = {"model_type": "other", "text_config": config, **dict.fromkeys(text.split())}
    tensors = gpt_oss(False) if TYPES[name].gated else layer(plain, ("up_proj", "down_proj"))
    assert moe.Experts.from_checkpoint(tensors, MLP, config=config).w_down.shape[0] == EXPERTS


@pytest.mark.parametrize(
    ("key", "size", "message"),
    [
        ("hidden_size", HIDDEN, "64 columns of `down_proj`"),
        ("moe_intermediate_size", WIDTH, "96 rows of `down_proj`"),
    ],
)
def test_sizes_of_another_model(key, size, message):
    for tensors in (layer(plain), layer(gptq), gpt_oss(False), gpt_oss(True)):
        quantization = (
            {"quant_method": "gptq"} if f"{MLP}.experts.0.up_proj.qweight" in tensors else {}
        )
        config = {"quantization_config": quantization}
        with pytest.raises(CheckpointError, match=f"has `{key}` 32, and .* has {message}"):
            read(tensors, config | {key: 32})
        read(tensors, config | {key: size})


def in_groups_of(size, rows=192):
    """Weights [24, rows] of each format with groups of a size, which may be partial at the end."""
    groups = -(-rows // size)
    return {
        "gptq": {
            "qweight": words(rows // 8, 24),
            "qzeros": words(groups, 3),
            "scales": floats(groups, 24, dtype=np.float16),
        },
        "awq": {
            "qweight": words(rows, 3),
            "qzeros": words(groups, 3),
            "scales": floats(groups, 24, dtype=np.float16),
        },
        "packed": {"weight_packed": words(24, rows // 8), "weight_scale": floats(24, groups)},
        "8 bits": {
            "weight": rng.integers(-100, 100, (24, rows)).astype(np.int8),
            "weight_scale": floats(24, groups, dtype=np.float32),
        },
    }


OF_GROUPS = {
    "gptq": lambda size: {"quant_method": "gptq", "group_size": size},
    "awq": lambda size: {"quant_method": "awq", "group_size": size},
    "packed": lambda size: {
        "config_groups": {"a": {"weights": {"group_size": size, "strategy": "group"}}}
    },
    "8 bits": lambda size: {"config_groups": {"a": {"weights": {"group_size": size}}}},
}


@pytest.mark.parametrize("size", [32, 48, 96, 112, 128])
@pytest.mark.parametrize("name", OF_GROUPS)
def test_sizes_of_groups_are_those_of_the_configuration(name, size):
    """192 rows in 2 groups may be 96 + 96, or 112 + 80, or 128 + 64."""
    own = in_groups_of(size)[name]
    found = checkpoints.linear(own, OF_GROUPS[name](size))
    assert found.block == (1, size)
    other = {32: 48, 48: 64, 96: 64, 112: 64, 128: 64}[size]
    for wrong in (other, -1, 192):
        with pytest.raises(ArgumentValueError, match=rf"size` .*{wrong}\)?; got \(24, \d\) along"):
            checkpoints.linear(own, OF_GROUPS[name](wrong))
    without = OF_GROUPS[name](None) | {"strategy": None}
    with pytest.raises(ArgumentValueError, match=r"_size`; got .* `quantization_config`"):
        checkpoints.linear(own, without)


@pytest.mark.parametrize("quantization", [{}, {"quant_method": "auto-round"}])
def test_words_of_an_unknown_format(quantization):
    with pytest.raises(
        CheckpointError, match=r"quant_method.* must be one of 'gptq', 'awq'.*config="
    ):
        read(layer(awq), {"quantization_config": quantization})


def test_quantization_in_the_configuration_of_the_text():
    said = {"quantization_config": FORMATS["awq"][2]}
    assert read(layer(awq), {"text_config": said}).transposed
    assert read(layer(awq), {"text_config": said, **said}).transposed
    assert read(layer(awq), {"text_config": {"quantization_config": None}, **said}).transposed
    with pytest.raises(CheckpointError, match="has two `quantization_config` that differ"):
        read(layer(awq), {"text_config": said, "quantization_config": {"quant_method": "gptq"}})


def gptq_in_8_bits(out, depth):
    return gptq(out, depth) | {
        "qweight": words(depth // 4, out),
        "qzeros": words(depth // GROUP, out // 4),
    }


def awq_gemv(out, depth):
    return {
        "qweight": words(out, depth // 8),
        "qzeros": words(out, 1),
        "scales": floats(out, 8, dtype=np.float16),
    }


@pytest.mark.parametrize(
    ("make", "method", "message"),
    [
        (gptq_in_8_bits, "gptq", "`qzeros` must have shape .* Only 4 bits"),
        (awq_gemv, "awq", "`scales` must have shape"),
    ],
)
def test_shapes_tell_other_layouts_of_words(make, method, message):
    config = {"quantization_config": {"quant_method": method}}
    with pytest.raises(CheckpointError, match=message):
        read(layer(make), config)


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_missing_last_experts(key):
    tensors = {name: of for name, of in layer(plain).items() if ".2." not in name}
    with pytest.raises(CheckpointError, match=f"has `{key}` 3, and `{MLP}.experts.…` has 2 exp"):
        read(tensors, {key: EXPERTS})
    read(layer(plain), {key: EXPERTS})


@pytest.mark.parametrize(
    ("make", "quantization", "message"),
    [
        (
            gptq,
            {"quant_method": "gptq", "bits": 3},
            r'_config\["bits"\]` must be one of 4; got 3',
        ),
        (gptq, {"quant_method": "gptq", "checkpoint_format": "marlin"}, "'gptq_v2'; got 'marlin'"),
        (awq, {"quant_method": "awq", "version": "gemv"}, "version.* must be one of 'gemm'"),
        (packed, {"config_groups": {"a": {"weights": {"num_bits": 8}}}}, "num_bits.* must be one"),
        (packed, {"format": "marlin-24"}, "'pack-quantized'; got 'marlin-24'"),
        (packed, {"config_groups": {"a": {"weights": {"type": "float"}}}}, "'int'; got 'float'"),
        (packed, {"config_groups": {"a": {"weights": {"strategy": "tensor"}}}}, "got 'tensor'"),
        (packed, {"config_groups": {"a": {"weights": {"strategy": "channel"}}}}, r"size` -1; got"),
        (packed, {"quant_method": "gptq"}, "must be one of 'compressed-tensors'; got 'gptq'"),
        (gptq, {"quant_method": "gptq", "group_size": 64}, "be 32, .* groups in `g_idx`; got 64"),
        (gptq, {"quant_method": "gptq", "group_size": -1}, "be 32, .* groups in `g_idx`; got -1"),
        (gptq, {"quant_method": "gptq", "group_size": 0}, r"group_size\"\]` must be at least 1"),
        (gptq, {"quant_method": "gptq", "group_size": "32"}, r"must be a Python int.*got '32'"),
        (gptq, {"quant_method": "gptq", "desc_act": "false"}, "of True, False; got 'false'"),
        (gptq, {"quant_method": "gptq", "sym": 0}, "of True, False; got 0"),
        (gptq, {"quant_method": "gptq", "new": 0}, r'`quantization_config\["new"\]`: unknown'),
        (gptq, {"quant_method": "gptq", "format": "marlin"}, "'gptq_v2'; got 'marlin'"),
        (
            gptq,
            {"quant_method": "gptq", "format": "gptq", "checkpoint_format": "gptq_v2"},
            "`checkpoint_format` and `format` differ.* pass `config",
        ),
        (gptq, {"quant_method": "gptq", "dynamic": [1]}, r'mapping as .*"dynamic"\]`; got'),
        (packed, {"dynamic": {".*": {}}}, r'"dynamic"\]`: unknown'),
        (packed, {"transform_config": {"config_groups": {}}}, r'\["transform_config"\]`: unknown'),
        (in_8_bits("weight_scale_inv", 32, 32), {"quant_method": "mxfp4"}, "got 'mxfp4'"),
        (in_8_bits("weight_scale_inv", 32, 32), {"num_bits": 4}, "must be one of 8; got 4"),
        (in_8_bits("weight_scale_inv", 32, 32), {"bits": 4}, r'"bits"\]`: unknown beside'),
        (gptq, {"quant_method": "gptq", "num_bits": 8}, r'"num_bits"\]`: unknown beside'),
        (
            in_8_bits("weight_scale_inv", 32, 32),
            {"weight_block_size": [64, 64]},
            r"`block_size` \(64, 64\); got \(3, 2\) along \(out, in\), which are \(96, 64\)",
        ),
        (
            in_8_bits("weight_scale_inv", 32, 32),
            {"weight_block_size": [32, 32], "strategy": "channel"},
            r"sizes \[\(32, 32\), \(1, -1\)\] .* differ",
        ),
        (in_8_bits("weight_scale_inv", 32, 32), {"weight_block_size": 32}, "two sizes; got 32"),
        (in_8_bits("weight_scale_inv", 32, 32), {"block_structure": "32x32"}, "got '32x32'"),
        (
            in_8_bits("weight_scale_inv", 64, 64),
            {},
            r"for each block of `block_size`; got \(2, 1\)",
        ),
        (in_8_bits("weight_scale", 1, 1000), {"strategy": "tensor"}, r"\(-1, -1\); got \(96, 1\)"),
    ],
)
def test_other_widths_and_formats(make, quantization, message):
    config = {"quantization_config": quantization}
    with pytest.raises(CheckpointError, match=message):
        read(layer(make), config)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("blocks", "desc_act", False),
        ("blocks", "type", "float"),
        ("blocks", "version", "gemm"),
        ("gptq", "weight_block_size", [1, 32]),
        ("gptq", "version", "gemm"),
        ("awq", "sym", True),
        ("awq", "num_bits", 4),
        ("packed", "desc_act", False),
        ("packed", "scale_fmt", "ue8m0"),
        ("mxfp4", "bits", 4),
        ("quark", "type", "float"),
        ("deepseek_v4", "num_bits", 4),
        ("mxfp8", "fmt", "e4m3"),
    ],
)
def test_keys_of_another_format(name, key, value):
    """They contradict no number, and are of no format that the tensors can have."""
    make, _, quantization = FORMATS[name]
    methods = {"blocks": "fp8", "packed": "compressed-tensors"}
    quantization = {"quant_method": methods.get(name), **quantization}
    tensors = layer(make)
    read(tensors, {"quantization_config": quantization | {key: None}})
    message = rf'`quantization_config\["{key}"\]`: unknown beside {quantization["quant_method"]!r}'
    with pytest.raises(CheckpointError, match=message):
        read(tensors, {"quantization_config": quantization | {key: value}})


CHANNELS_OF_QUARK = {
    "ch_axis": 0,
    "dtype": "int8",
    "qscheme": "per_channel",
    "quant_method": "quark",
}


@pytest.mark.parametrize(
    ("name", "said", "message"),
    [
        ("mxfp4", {"num_bits": 8}, "num_bits.* must be one of 4; got 8"),
        ("mxfp4", {"type": "int"}, "type.* must be one of 'float'; got 'int'"),
        ("mxfp4", {"group_size": 16}, "group_size.* must be one of 32; got 16"),
        ("mxfp4", {"strategy": "channel"}, "strategy.* must be one of 'group'; got 'channel'"),
        ("mxfp4", {"format": "nvfp4-pack-quantized"}, "'mxfp4-pack-quantized'; got 'nvfp4-"),
        ("nvfp4", {"quant_algo": "FP8"}, "must be one of 'NVFP4', 'W4A16_NVFP4'; got 'FP8'"),
        ("nvfp4", {"quant_algo": "MIXED_PRECISION"}, "'W4A16_NVFP4'; got 'MIXED_PRECISION'"),
        ("nvfp4", {"group_size": 32}, "group_size.* must be one of 16; got 32"),
        ("nvfp4", {"quant_method": "compressed-tensors"}, "be one of 'modelopt'; got 'compressed"),
        ("nvfp4_of_compressed_tensors", {"group_size": 32}, "must be one of 16; got 32"),
        (
            "nvfp4_of_compressed_tensors",
            {"format": "mxfp4-pack-quantized"},
            "must be one of 'nvfp4-pack-quantized'; got 'mxfp4-pack-quantized'",
        ),
        ("nvfp4_of_compressed_tensors", {"strategy": "group"}, "'tensor_group'; got 'group'"),
        ("awq", {"format": "gemv"}, "format.* must be one of 'gemm'; got 'gemv'"),
        ("awq", {"checkpoint_format": "gemv_fast"}, "must be one of 'gemm'; got 'gemv_fast'"),
        ("awq", {"desc_act": True}, "desc_act.* must be one of False; got True"),
        ("awq", {"pack_method": "order"}, "pack_method.* must be one of 'reorder'; got 'order'"),
        (
            "awq",
            {"pack_method": "reorder", "zero_point": False},
            "zero_point.* must be one of True; got False",
        ),
        ("modelopt_fp8", {"quant_algo": "NVFP4"}, "must be one of 'FP8', .*; got 'NVFP4'"),
        ("modelopt_fp8", {"quant_algo": "MXFP8"}, "must be one of 'FP8', .*; got 'MXFP8'"),
        ("modelopt_mxfp8", {"quant_algo": "FP8"}, "must be one of 'MXFP8'; got 'FP8'"),
        ("mxfp8", {"type": "int"}, "type.* must be one of 'float'; got 'int'"),
        ("mxfp8", {"format": "float-quantized"}, "must be one of 'mxfp8-quantized'; got 'float-q"),
        ("mxfp8", {"group_size": 64}, r"`block_size` \(1, 64\); got \(96, 2\)"),
        ("channels", {"type": "float"}, "type.* must be one of 'int'; got 'float'"),
        ("deepseek_v4", {"expert_dtype": "fp8"}, "expert_dtype.* must be one of 'fp4'; got 'fp8'"),
        ("deepseek_v4", {"expert_dtype": None}, "expert_dtype.* must be one of 'fp4'; got None"),
        ("deepseek_v4", {"scale_fmt": "float"}, "scale_fmt.* must be one of 'ue8m0'; got 'float'"),
        ("channels", CHANNELS_OF_QUARK | {"ch_axis": 1}, "ch_axis.* must be one of 0; got 1"),
        ("quark", {"dtype": "mx"}, "dtype.* must be one of 'fp4'; got 'mx'"),
        ("quark", {"qscheme": "per_channel"}, "qscheme.* must be one of 'per_group'; got 'per_ch"),
    ],
)
def test_keys_that_contradict_the_tensors(name, said, message):
    make, _, quantization = FORMATS[name]
    tensors = layer(make)
    read(tensors, {"quantization_config": quantization})
    flat = checkpoints.flat(quantization)
    flat = {
        key: of for key, of in flat.items() if key not in ("config_groups", "global_quant_config")
    }
    with pytest.raises(CheckpointError, match=message):
        read(tensors, {"quantization_config": flat | said})


KIMI_K2 = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
GPTQ_MODEL = {
    "act_group_aware": True,
    "bits": 4,
    "checkpoint_format": "gptq",
    "damp_percent": 0.01,
    "desc_act": False,
    "dynamic": {"-:.*shared_expert.*": {}, "+:.*self_attn.*": {"bits": 8}},
    "format": "gptq",
    "group_size": 32,
    "lm_head": False,
    "meta": {"quantizer": ["gptqmodel:5.6.0"]},
    "method": "gptq",
    "pack_impl": "cpu",
    "quant_method": "gptq",
    "static_groups": False,
    "sym": False,
    "true_sequential": True,
}
DEEPSEEK = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [32, 32],
}
CHANNELS = {
    "config_groups": {"a": {"weights": {"num_bits": 8, "strategy": "channel", "type": "int"}}},
    "quant_method": "compressed-tensors",
    "version": "0.9.0",
}
AWQ = {
    "bits": 4,
    "group_size": 32,
    "modules_to_not_convert": ["gate"],
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
}


AWQ_OF_GPTQ_MODEL = {
    "bits": 4,
    "checkpoint_format": "gemm",
    "desc_act": False,
    "dynamic": {"-:.*shared_expert.*": {}, "+:.*self_attn.*": {"bits": 8}},
    "format": "gemm",
    "group_size": 32,
    "lm_head": False,
    "meta": {"quantizer": ["gptqmodel:7.7.0"]},
    "method": "awq",
    "pack_dtype": "int32",
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": False,
}


MODELOPT = {
    "config_groups": {
        "group_0": {
            "input_activations": {
                "dynamic": False,
                "group_size": 16,
                "num_bits": 4,
                "type": "float",
            },
            "targets": ["Linear"],
            "weights": {"dynamic": False, "group_size": 16, "num_bits": 4, "type": "float"},
        }
    },
    "ignore": ["lm_head", "model.layers.0.mlp.gate"],
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "producer": {"name": "modelopt", "version": "0.33.0"},
    "quant_algo": "NVFP4",
    "quant_method": "modelopt",
}


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("nvfp4", MODELOPT),
        ("packed", KIMI_K2),
        ("gptq", GPTQ_MODEL),
        ("awq", AWQ),
        ("awq", AWQ | {"pack_method": "reorder"}),  # of Quark
        ("awq", AWQ_OF_GPTQ_MODEL),
        ("awq", AWQ_OF_GPTQ_MODEL | {"version": None}),
        ("blocks", DEEPSEEK),
        ("channels", CHANNELS),
        ("channels", CHANNELS_OF_QUARK),
    ],
)
def test_published_quantization(name, published):
    tensors = layer(FORMATS[name][0])
    found = read(tensors, {"quantization_config": published})
    wanted = read(tensors, {"quantization_config": FORMATS[name][2]})
    np.testing.assert_array_equal(exactly(found.w_gate_up), exactly(wanted.w_gate_up))


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"+:.*experts.*": {"bits": 4, "group_size": 32}}, None),
        ({".*experts.*": {"group_size": 32}, ".*": {"bits": 8}}, None),
        ({"+:.*self_attn.*": {"bits": 8}, r"-:.*mlp\.gate$": {}, "experts": {"bits": 8}}, None),
        ({"-:.*experts.*": {}, ".*": {"bits": 8}}, None),
        ({".*": {"bits": 8}}, r'"bits"\]` must be one of 4; got 8'),
        ({r"+:.*\.2\.down_proj": {"group_size": 64}}, r"2\.down_proj.* must be 32, .*; got 64"),
        ({"+:.*": {"adapter": 1}}, r'"adapter"\]`: unknown beside'),
        ({".*": {"dynamic": {".*": {}}}}, r'"dynamic"\]`: unknown beside'),
        ({".*": 8}, r"\[\"dynamic\"\]\['\.\*'\]`; got 8"),
        ({"+:[": {}}, "A pattern in `quantization_config` is damaged"),
    ],
)
def test_rules_for_layers(rules, message):
    """GPTQModel's `dynamic`: the first pattern at a name's start counts; all groups are of 32."""
    tensors, config = layer(gptq), {"quantization_config": GPTQ_MODEL | {"dynamic": rules}}
    if message is None:
        read(tensors, config)
    else:
        with pytest.raises(CheckpointError, match=message):
            read(tensors, config)


@pytest.mark.parametrize("algorithm", ["FP8_PB_WO", "fp8_pb_wo"])
def test_blocks_of_modelopt(algorithm):
    """Scales [out / 128, 1, in / 128, 1], of a size that its configuration does not have."""
    own = in_8_bits("weight_scale", 128, 128)(300, 200)
    config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": algorithm}}
    wide = own | {"weight_scale": own["weight_scale"][:, None, :, None]}
    read = lambda own: moe.linear_from_checkpoint(
        {f"{MLP}.up_proj.{name}": of for name, of in own.items()}, f"{MLP}.up_proj", config=config
    )
    wanted = exactly(moe.from_8_bits(*own.values(), block_size=(128, 128)))
    for of in (own, wide):
        np.testing.assert_array_equal(exactly(read(of)), wanted.T)
    with pytest.raises(CheckpointError, match=r"`weight_scale` must have shape"):
        read(own | {"weight_scale": own["weight_scale"][None, :, None]})


NVFP4 = {"quant_algo": "NVFP4", "group_size": 16}


@pytest.mark.parametrize(
    ("name", "layers", "message"),
    [
        ("nvfp4", {f"{MLP}.experts": NVFP4}, None),
        ("nvfp4", {f"{MLP}.experts": NVFP4 | {"quant_algo": "W4A16_NVFP4"}}, None),
        ("nvfp4", {MLP: {"quant_algo": "FP8"}, f"{MLP}.experts": NVFP4}, None),
        ("modelopt_fp8", {f"{MLP}.experts": {"quant_algo": "FP8"}, "lm_head": NVFP4}, None),
        ("nvfp4", {f"{MLP}.expert": NVFP4}, "got 'MIXED_PRECISION'"),
        ("nvfp4", {f"{MLP}.experts": {"quant_algo": "FP8"}}, "got 'FP8'"),
        ("nvfp4", {f"{MLP}.experts": NVFP4 | {"encoding": "csf"}}, r'"encoding"\]`: unknown'),
        ("nvfp4", {f"{MLP}.experts": 16}, r"\[\"quantized_layers\"\]\['.*experts'\]`; got 16"),
        ("nvfp4", ["lm_head"], r'a mapping as .*\["quantized_layers"\]`; got'),
        ("gptq", {f"{MLP}.experts": {}}, r'`quantization_config\["quantized_layers"\]`: unknown'),
    ],
)
def test_layers_of_mixed_precision(name, layers, message):
    """ModelOpt's, whose groups have the same layers as targets."""
    make, _, quantization = FORMATS[name]
    tensors = layer(make)
    groups = {str(i): {"targets": ["lm_head"], "weights": {"num_bits": i}} for i in range(2)}
    mixed = {"quant_algo": "MIXED_PRECISION", "group_size": 16, "config_groups": groups}
    mixed = quantization if name == "gptq" else quantization | mixed
    config = {"quantization_config": mixed | {"quantized_layers": layers}}
    if message is None:
        found = read(tensors, config)
        wanted = read(tensors, {"quantization_config": quantization})
        np.testing.assert_array_equal(exactly(found.w_gate_up), exactly(wanted.w_gate_up))
    else:
        with pytest.raises(CheckpointError, match=message):
            read(tensors, config)


def groups_of(*groups, ignore=None):
    """A configuration of compressed-tensors with groups (targets, weights)."""
    said = {
        str(i): {"targets": targets, "weights": weights}
        for i, (targets, weights) in enumerate(groups)
    }
    return {"quantization_config": {"config_groups": said, "ignore": ignore}}


def test_groups_of_a_configuration():
    """A layer's weights are those of the group that has it as a target; the tensors, of 32."""
    tensors, of_32, of_64 = layer(packed), {"group_size": 32}, {"group_size": 64}
    down, rest = [r"re:.*\.down_proj$"], ["Linear"]
    read(tensors, groups_of((rest, of_32), (rest, of_32), (rest, None)))
    read(tensors, groups_of((["re:.*self_attn.*"], of_64), (rest, of_32)))
    of_several = groups_of((["re:.*self_attn.*"], of_64), (rest, of_32))["quantization_config"]
    read(tensors, {"quantization_config": of_several | {"format": "mixed-precision"}})
    read(tensors, groups_of((["re:.*self_attn.*", "lm_head"], of_64), (["re:.*experts.*"], of_32)))
    read(tensors, groups_of((rest, of_64), ([r"re:.*experts\.\d+\.(gate|up|down)_proj"], of_32)))
    exact = [name.rpartition(".")[0] for name in tensors]
    read(tensors, groups_of((["re:.*"], of_64), (exact, of_32)))
    both = FORMATS["packed"][0], in_8_bits("weight_scale", 1, 1000)
    mixed, whole = layer(both[0]), layer(both[1])
    mixed = {name: of for name, of in mixed.items() if "down_proj" not in name}
    mixed |= {name: of for name, of in whole.items() if "down_proj" in name}
    channels = {"num_bits": 8, "type": "float", "strategy": "channel"}
    found = read(mixed, groups_of((rest, of_32 | {"num_bits": 4}), (down, channels)))
    assert (found.w_gate_up.packed, found.w_down.dtype) == ("int4", "float8_e4m3fn")
    np.testing.assert_array_equal(
        exactly(found.w_down), exactly(read(whole, groups_of((rest, channels))).w_down)
    )
    with pytest.raises(CheckpointError, match=r"down_proj.*: Argument .*must be one of 8; got 4"):
        read(mixed, groups_of((down, of_32 | {"num_bits": 4}), (rest, of_32 | {"num_bits": 4})))


@pytest.mark.parametrize(
    ("groups", "ignore", "why"),
    [
        (([], None), None, "0 of them are for it"),
        ((["re:.*self_attn.*"], ["re:.*mlp.gate$"]), None, "0 of them are for it"),
        ((["Linear"], ["Linear"]), None, "2 of them are for it"),
        ((["re:.*gate_proj"], ["re:.*experts.*"]), None, "2 of them are for it"),
        ((["re:.*self_attn.*"], ["Linear"]), ["lm_head", "re:.*experts.*"], "`ignore` has it"),
    ],
)
def test_groups_of_a_configuration_that_differ(groups, ignore, why):
    sizes = {"group_size": 64}, {"group_size": 32}
    config = groups_of(*zip(groups, sizes, strict=True), ignore=ignore)
    with pytest.raises(
        CheckpointError, match=f"differ, .*experts.0.gate_proj': {why}.* pass `config"
    ):
        read(layer(packed), config)


def test_targets_that_are_damaged():
    groups = (["re:["], {"group_size": 64}), (["Linear"], {"group_size": 32})
    with pytest.raises(CheckpointError, match="A pattern in `quantization_config` is damaged"):
        read(layer(packed), groups_of(*groups))
    for targets in ("Linear", [3]):
        with pytest.raises(CheckpointError, match=r'a list of strings as .*\["targets"\]`; got'):
            read(layer(packed), groups_of((targets, {"group_size": 32})))


LIES = None, 0, 1.5, True, "x", [], [None], {}, {"weights": 3}, {"x": None}, [[1]]


@pytest.mark.parametrize(
    "name", ["plain", "gptq", "awq", "packed", "blocks", "mxfp4", "quark", "mxfp8", "gpt_oss"]
)
def test_configurations_that_lie_in_their_types(name):
    """Each is read as if it were not there, or refused: no error is a bare Python one."""
    make = None if name == "gpt_oss" else FORMATS[name][0]
    tensors = gpt_oss(True) if make is None else layer(make)
    method = {"quant_method": name} if name in ("gptq", "awq") else {}
    config = (GPT_OSS if make is None else QWEN) | {"quantization_config": method}
    refused = 0
    keys = ["quantization_config", "text_config", "hidden_size", "num_experts", "swiglu_alpha"]
    for lie in LIES:
        configs = [config | {key: lie} for key in [*config, *keys]]
        for key in [*{key for of, _ in checkpoints.KEYS.values() for key in of.split()}, "new"]:
            configs.append(config | {"quantization_config": method | {key: lie}})
        for key in ("a", "weights"):
            groups = {"a": lie} if key == "a" else {"a": {"weights": lie}}
            configs.append(config | {"quantization_config": method | {"config_groups": groups}})
        for given in configs:
            try:
                moe.Experts.from_checkpoint(tensors, MLP, config=given)
            except CheckpointError:
                refused += 1
    assert refused > 90


@pytest.mark.parametrize("lie", [[], "fp8", [None], 3])
def test_configurations_that_are_no_mappings(lie):
    tensors = layer(plain)
    with pytest.raises(CheckpointError, match="must have a mapping as `quantization_config`; got"):
        read(tensors, {"quantization_config": lie})
    with pytest.raises(CheckpointError, match="must have a mapping as `text_config`; got"):
        read(tensors, {"text_config": lie})
    with pytest.raises(ArgumentTypeError, match=r"`config` must be what `config\.json` holds"):
        moe.Experts.from_checkpoint(tensors, MLP, config=lie)
    groups = {"a": {"weights": lie}}, {"a": lie}, lie
    for of in groups:
        with pytest.raises(CheckpointError, match=r'a mapping as `quantization_config\["config_gr'):
            read(tensors, {"quantization_config": {"config_groups": of}})


@pytest.mark.parametrize("key", ["checkpoint_format", "format"])
@pytest.mark.parametrize("checkpoint_format", ["gptq", "gptq_v2"])
def test_zeros_of_a_symmetric_checkpoint(checkpoint_format, key):
    """They are all 8 and can be left out; others are of a version that is not said."""
    config = {"quant_method": "gptq", "sym": True, key: checkpoint_format}
    eights = {"gptq": 0x77777777, "gptq_v2": 0x88888888 - 2**32}
    drawn = layer(gptq)
    symmetric = lambda of: {
        name: np.full_like(array, eights[of]) if name.endswith("qzeros") else array
        for name, array in drawn.items()
    }
    found, with_zeros = (
        read(symmetric(checkpoint_format), {"quantization_config": config | {"sym": sym}})
        for sym in (True, False)
    )
    assert found.w_down.zeros is None
    assert not with_zeros.w_down.zeros.any()
    np.testing.assert_array_equal(exactly(found.w_down), exactly(with_zeros.w_down))
    (other,) = eights.keys() - {checkpoint_format}
    with pytest.raises(CheckpointError, match=r"checkpoint_format.*config="):
        read(symmetric(other), {"quantization_config": config})


def test_the_documentation_lists_the_model_types():
    page = Path(__file__).parents[3] / "docs" / "from-a-checkpoint.md"
    _, _, listed = page.read_text("utf-8").partition("The model types are ")
    assert {*re.findall(r"`(\w+)`", listed.partition(".")[0])} == TYPES.keys()
