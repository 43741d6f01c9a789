"""Compares checkpoints as Triax reads them with transformers' and compressed-tensors' own code.

transformers makes a small model of each kind with random weights, and saves it; its experts, and
those that `Experts.from_checkpoint` reads, are given the same tokens. The other lines are weights
that the packages unpack. An error is as in `benchmarks/models.py`; exits with 1 above the limits.

    python -m benchmarks.checkpoints
"""

from __future__ import annotations

import importlib
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.models import EXPERTS, HIDDEN, LIMIT, TOP_K, WIDTH, error
from triax import moe
from triax.moe.checkpoint import EXPERTS as EXPERTS_NAMES

MODELS = {  # the folder under `transformers/models`, the model's class and its config's
    "Mixtral": "mixtral MixtralModel MixtralConfig",
    "Qwen2-MoE": "qwen2_moe Qwen2MoeModel Qwen2MoeConfig",
    "Qwen3-MoE": "qwen3_moe Qwen3MoeModel Qwen3MoeConfig",
    "Qwen3-Next": "qwen3_next Qwen3NextModel Qwen3NextConfig",
    "Qwen3-VL-MoE": "qwen3_vl_moe Qwen3VLMoeTextModel Qwen3VLMoeTextConfig",
    "Qwen3.5-MoE": "qwen3_5_moe Qwen3_5MoeTextModel Qwen3_5MoeTextConfig",
    "OLMoE": "olmoe OlmoeModel OlmoeConfig",
    "PhiMoE": "phimoe PhimoeModel PhimoeConfig",
    "DeepSeek-V2": "deepseek_v2 DeepseekV2Model DeepseekV2Config",
    "DeepSeek-V3": "deepseek_v3 DeepseekV3Model DeepseekV3Config",
    "DeepSeek-V4": "deepseek_v4 DeepseekV4Model DeepseekV4Config",
    "GLM-4.5": "glm4_moe Glm4MoeModel Glm4MoeConfig",
    "GLM-4.7-Flash": "glm4_moe_lite Glm4MoeLiteModel Glm4MoeLiteConfig",
    "GLM-5": "glm_moe_dsa GlmMoeDsaModel GlmMoeDsaConfig",
    "MiniMax-Text-01": "minimax MiniMaxModel MiniMaxConfig",
    "MiniMax-M2": "minimax_m2 MiniMaxM2Model MiniMaxM2Config",
    "MiniMax-M3": "minimax_m3_vl MiniMaxM3VLTextModel MiniMaxM3VLTextConfig",
    "Gemma 4": "gemma4 Gemma4TextModel Gemma4TextConfig",
    "gpt-oss": "gpt_oss GptOssModel GptOssConfig",
    "Granite MoE": "granitemoe GraniteMoeModel GraniteMoeConfig",
    "Granite MoE, shared": "granitemoeshared GraniteMoeSharedModel GraniteMoeSharedConfig",
    "Granite 4": "granitemoehybrid GraniteMoeHybridModel GraniteMoeHybridConfig",
    "DBRX": "dbrx DbrxModel DbrxConfig",
    "Step 3.7": "step3p7 Step3p7TextModel Step3p7TextConfig",
    "ERNIE 4.5": "ernie4_5_moe Ernie4_5_MoeModel Ernie4_5_MoeConfig",
    "Hunyuan-A13B": "hunyuan_v1_moe HunYuanMoEV1Model HunYuanMoEV1Config",
    "Kimi Linear": "kimi_linear KimiLinearModel KimiLinearConfig",
    "Nemotron-H": "nemotron_h NemotronHModel NemotronHConfig",
}
# What else their configurations must have for a layer of experts.
ALSO = {
    "Gemma 4": {
        "enable_moe_block": True,
        "top_k_experts": TOP_K,
        "layer_types": ["full_attention"],
    },
    "DeepSeek-V4": {"swiglu_limit": 0.7},
    "GLM-4.7-Flash": {"mlp_layer_types": ["sparse"]},
    "MiniMax-M3": {"swiglu_limit": 0.7, "swiglu_alpha": 1.2},
    "gpt-oss": {"swiglu_limit": 0.7, "swiglu_alpha": 1.2},
    "Granite 4": {"layer_types": ["full_attention"], "mamba_n_heads": 1},
    "DBRX": {
        "d_model": HIDDEN,
        "n_heads": 2,
        "n_layers": 1,
        "attn_config": {"rope_theta": 1e4},
        "ffn_config": {
            "ffn_hidden_size": WIDTH,
            "moe_num_experts": EXPERTS,
            "moe_top_k": TOP_K,
            "ffn_act_fn": {"name": "silu"},
        },
    },
    "Step 3.7": {"mlp_layer_types": ["sparse"], "share_expert_dim": WIDTH},
    "Kimi Linear": {"pad_token_id": 0},
    "ERNIE 4.5": {"moe_layer_start_index": 0, "moe_num_experts": EXPERTS, "moe_k": TOP_K},
    "Nemotron-H": {"layers_block_type": ["moe"], "moe_shared_expert_intermediate_size": WIDTH},
}


def saved(names: str, also: dict) -> float:
    """The error of the experts of a model that transformers saves."""
    import torch

    folder, model, config = names.split()
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    sizes = dict.fromkeys(("intermediate_size", "moe_intermediate_size"), WIDTH)
    sizes |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), EXPERTS)
    sizes |= {"hidden_size": HIDDEN, "num_experts_per_tok": TOP_K, "num_hidden_layers": 1}
    sizes |= {"vocab_size": 50, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    sizes |= {"first_k_dense_replace": 0, "bos_token_id": 0, "eos_token_id": 0}
    made = getattr(module, model)(getattr(module, config)(**sizes, **also)).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.3)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((20, HIDDEN), np.float32)
    chosen = rng.permuted(np.tile(np.arange(EXPERTS), (20, 1)), axis=1)[:, :TOP_K]
    weights = rng.random((20, TOP_K), np.float32)
    block = next(b for name, b in made.named_modules() if name.endswith(".experts"))
    wanted = block(*map(torch.from_numpy, (x, chosen, weights))).detach()
    with tempfile.TemporaryDirectory() as path:
        made.save_pretrained(path)
        checkpoint = moe.Checkpoint(path)
        found = filter(None, map(EXPERTS_NAMES.match, checkpoint))
        prefix = next(at[1] or at[2] for at in found)
        experts = jax.device_put(moe.Experts.from_checkpoint(checkpoint, prefix))
        return error(moe.feed_forward(x, moe.Routing(weights, chosen), experts).tokens, wanted)


def mxfp4() -> float:
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (EXPERTS, WIDTH, HIDDEN // 32, 16), np.uint8)
    scales = rng.integers(120, 135, blocks.shape[:-1], np.uint8)
    both = torch.from_numpy(blocks), torch.from_numpy(scales)
    wanted = convert_moe_packed_tensors(*both, dtype=torch.float32)
    return error(moe.from_mxfp4(blocks, scales).dequantize(), wanted)


def pack_quantized(symmetric: bool, group: int | None) -> float:
    import torch
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    rng = np.random.default_rng(0)
    depth = 2 * group if group else 60  # which is not a multiple of 8
    weight = torch.from_numpy(rng.standard_normal((24, depth), np.float32))
    strategy = "group" if group else "channel"
    how = {"num_bits": 4, "symmetric": symmetric, "strategy": strategy, "group_size": group}
    args = QuantizationArgs(**how)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    groups = weight.reshape(24, -1, group or depth)
    scale, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    state = {"weight": weight, "weight_scale": scale}
    state |= {} if symmetric else {"weight_zero_point": zeros.to(torch.int8)}
    packed = PackedQuantizationCompressor.compress(state, scheme)
    wanted = PackedQuantizationCompressor.decompress(dict(packed), scheme)["weight"]
    arrays = {name: tensor.numpy() for name, tensor in packed.items()}
    found = moe.from_compressed_tensors(**arrays, group_size=group or -1)
    return error(found.dequantize().T, wanted)


def microscaled(bits: int) -> float:
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    weight = torch.from_numpy(np.random.default_rng(0).standard_normal((24, 96), np.float32))
    how = {"num_bits": bits, "type": "float", "strategy": "group", "group_size": 32}
    args = QuantizationArgs(**how, scale_dtype="torch.uint8", zp_dtype="torch.uint8")
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    groups = weight.reshape(24, -1, 32)
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    name = "mxfp4-pack-quantized" if bits == 4 else "mxfp8-quantized"
    compressor = BaseCompressor.get_value_from_registry(name)
    packed = compressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    wanted = compressor.decompress(dict(packed), scheme)["weight"].float()
    config = {"quant_method": "compressed-tensors", "format": name}
    config["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": how}}
    tensors = {f"up_proj.{end}": in_numpy(tensor) for end, tensor in packed.items()}
    found = moe.linear_from_checkpoint(tensors, "up_proj", config={"quantization_config": config})
    return error(found.dequantize(), wanted)


def nvfp4() -> float:
    """Unpacked in float32: as weights are decompressed, each scale is rounded to bfloat16."""
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    weight = torch.from_numpy(np.random.default_rng(0).standard_normal((24, 96), np.float32))
    how = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    args = QuantizationArgs(**how, scale_dtype="torch.float8_e4m3fn")
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    groups, name = weight.reshape(24, -1, 16), "nvfp4-pack-quantized"
    of_all = generate_gparam(weight.amin(), weight.amax())
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args, of_all)
    state = {"weight": weight, "weight_scale": scale, "weight_global_scale": of_all}
    packed = BaseCompressor.get_value_from_registry(name).compress(state, scheme)
    numbers = unpack_fp4_from_uint8(packed["weight_packed"], 24, 96, torch.float32)
    scale = packed["weight_scale"].float()
    wanted = dequantize(numbers, scale, args=args, global_scale=of_all, dtype=torch.float32)
    config = {"quant_method": "compressed-tensors", "format": name}
    config["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": how}}
    tensors = {f"up_proj.{end}": in_numpy(tensor) for end, tensor in packed.items()}
    found = moe.linear_from_checkpoint(tensors, "up_proj", config={"quantization_config": config})
    return error(found.dequantize(), wanted)


def in_numpy(tensor) -> np.ndarray:
    import torch

    if tensor.dtype != torch.float8_e4m3fn:
        return tensor.detach().numpy()
    return tensor.detach().view(torch.uint8).numpy().view(jnp.float8_e4m3fn)


def float8() -> float:
    """transformers' float8 with scales for blocks, and what its own code makes of them."""
    import torch
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    rng = np.random.default_rng(0)
    weight = torch.from_numpy(rng.standard_normal((96, 64), np.float32)).to(torch.float8_e4m3fn)
    scale = torch.from_numpy(rng.random((3, 2), np.float32))
    wanted = Fp8Dequantize(None)._dequantize_one(weight, scale)
    arrays = {"a.weight": in_numpy(weight), "a.weight_scale_inv": scale.numpy()}
    config = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    found = moe.linear_from_checkpoint(arrays, "a", config={"quantization_config": config})
    return error(found.dequantize(), wanted)


def main():
    errors = {name: saved(names, ALSO.get(name, {})) for name, names in MODELS.items()}
    errors["MXFP4"] = mxfp4()
    errors["compressed-tensors' MXFP4"] = microscaled(4)
    errors["compressed-tensors' MXFP8"] = microscaled(8)
    errors["compressed-tensors' NVFP4"] = nvfp4()
    errors["transformers' float8 with blocks"] = float8()
    for symmetric in (True, False):
        for group in (32, None):
            name = f"compressed-tensors, {symmetric=}, {group=}"
            errors[name] = pack_quantized(symmetric, group)
    for name, found in errors.items():
        print(f"{name:50} {found:.1e}")
    if wrong := [name for name, found in errors.items() if not found <= LIMIT]:
        sys.exit(f"above {LIMIT:g}: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
