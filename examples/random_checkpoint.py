"""Random weights for a `config.json`, under the names and in the shapes of a published checkpoint.

    tensors = draw(TINY_GPT_OSS)  # a dictionary of NumPy arrays

gpt-oss' experts are in MXFP4 where the configuration says so, as published. Qwen3-MoE's are one by
one, and in float8 with their attention where it says so. Arrays depend on the seed alone, so that
logits can be recorded in another process.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "attention_bias": True,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "sliding_window": 128,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "hidden_act": "silu",
    "swiglu_limit": 7.0,
    "rms_norm_eps": 1e-05,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
_SMALL = {
    "vocab_size": 32,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
}
TINY_GPT_OSS = {
    **GPT_OSS_20B,
    **_SMALL,
    "intermediate_size": 32,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
    "num_local_experts": 8,
}
TINY_QWEN3_MOE: dict[str, Any] = {
    **_SMALL,
    "model_type": "qwen3_moe",
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "attention_bias": False,
    "sliding_window": None,
    "use_sliding_window": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}


# What published models of this architecture leave off.
TINY_QWEN3_MOE_ALL = {
    **TINY_QWEN3_MOE,
    "attention_bias": True,
    "norm_topk_prob": False,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 40960,
    },
    "max_position_embeddings": 163840,
    "sliding_window": 8,
    "use_sliding_window": True,
    "tie_word_embeddings": True,
}
# As Qwen3-30B-A3B-FP8, whose blocks are 128 by 128.
TINY_QWEN3_MOE_FP8 = {
    **TINY_QWEN3_MOE,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"],
        "quant_method": "fp8",
        "weight_block_size": [32, 32],
    },
}


def draw(config: dict[str, Any], seed: int = 0, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Returns a checkpoint's tensors by name, with floats in `dtype` where they are not packed."""
    rng = np.random.default_rng(seed)
    found: dict[str, np.ndarray] = {}
    is_gpt_oss = config["model_type"] == "gpt_oss"
    hidden, dim, width = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    bias = config["attention_bias"]

    def normal(name: str, *shape: int, scale: float, mean: float = 0.0) -> None:
        drawn = rng.standard_normal(shape, np.float32)
        found[name] = (mean + scale * drawn).astype(dtype)

    def norm(name: str, size: int) -> None:
        normal(f"{name}.weight", size, scale=0.1, mean=1.0)

    def linear(name: str, out: int, into: int, bias: bool = False) -> None:
        if "_proj" in name and "quantization_config" in config and not is_gpt_oss:
            numbers = rng.standard_normal((out, into), np.float32)
            scales = rng.random((out // 32, into // 32), np.float32) + 0.5
            found[f"{name}.weight"] = numbers.astype(ml_dtypes.float8_e4m3fn)
            found[f"{name}.weight_scale_inv"] = scales * np.float32(into**-0.5)
        else:
            normal(f"{name}.weight", out, into, scale=into**-0.5)
        if bias:
            normal(f"{name}.bias", out, scale=0.1)

    def stacked(name: str, count: int, into: int, out: int) -> None:
        """All experts' matrices of gpt-oss."""
        normal(f"{name}_bias", count, out, scale=0.1)
        if "quantization_config" not in config:
            normal(name, count, into, out, scale=into**-0.5)
            return
        power = 127 + round(math.log2(into**-0.5 / 2.9))  # MXFP4's numbers have a deviation of 2.9
        shape = count, out, into // 32
        found[f"{name}_blocks"] = rng.integers(0, 256, (*shape, 16), np.uint8)
        found[f"{name}_scales"] = rng.integers(power - 1, power + 2, shape, np.uint8)

    normal("model.embed_tokens.weight", config["vocab_size"], hidden, scale=1.0)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        norm(f"{layer}.input_layernorm", hidden)
        norm(f"{layer}.post_attention_layernorm", hidden)
        for name, count in {"q": heads, "k": kv_heads, "v": kv_heads}.items():
            linear(f"{layer}.self_attn.{name}_proj", count * dim, hidden, bias)
        linear(f"{layer}.self_attn.o_proj", hidden, heads * dim, bias)
        if is_gpt_oss:
            normal(f"{layer}.self_attn.sinks", heads, scale=1.0)
            count = config["num_local_experts"]
            linear(f"{layer}.mlp.router", count, hidden, bias=True)
            stacked(f"{layer}.mlp.experts.gate_up_proj", count, hidden, 2 * width)
            stacked(f"{layer}.mlp.experts.down_proj", count, width, hidden)
            continue
        norm(f"{layer}.self_attn.q_norm", dim)
        norm(f"{layer}.self_attn.k_norm", dim)
        linear(f"{layer}.mlp.gate", config["num_experts"], hidden)
        width = config["moe_intermediate_size"]
        for expert in range(config["num_experts"]):
            for name in ("gate_proj", "up_proj"):
                linear(f"{layer}.mlp.experts.{expert}.{name}", width, hidden)
            linear(f"{layer}.mlp.experts.{expert}.down_proj", hidden, width)
    norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        linear("lm_head", config["vocab_size"], hidden)
    return found
