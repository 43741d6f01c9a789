"""Runs quantized folders that transformers and GPTQModel write through "Your first model".

    python -m benchmarks.folders [FOLDER] [--only NAME …] [--output FILE]

Small models with random weights are written into FOLDER, with the tokens that transformers' model
continues a prompt with, and their logits in float32. What is there already is not written again, so
that a machine without transformers can take it from another. Qwen3-MoE's attention is quantized as
its experts are. Each folder is then read and continued by `examples/decoder.py`, exported, and
served by a process that has neither Triax nor Triton. Exits with 1 if a token differs, or a logit
by more than the limit. `make models` calls this; `benchmarks/folders.json` is of a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import record
from triax import moe

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.append(str(EXAMPLES))
decoder: Any = importlib.import_module("decoder")

EXPECTED = "expected.json"
LIMIT = 1e-4  # as `benchmarks/logits.py`
LENGTH, STEPS, TOP_K = 8, 16, 2  # of the prompt, after it, and experts of a token
SIZES = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
SIZES |= {"num_experts_per_tok": TOP_K, "max_position_embeddings": 256}
# Imports of these fail where a step is served.
ALONE = "import runpy, sys; sys.modules |= dict.fromkeys(('triax', 'triton', 'torch')); "
ALONE += "del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


def drawn(name: str, **sizes: Any) -> Any:
    """A model of transformers in bfloat16, with random weights."""
    import torch
    import transformers

    config = getattr(transformers, f"{name}Config")(**SIZES, **sizes)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16)
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for of, parameter in model.named_parameters():
            if "norm" not in of:
                depth = parameter.shape[-2 if "experts" in of else -1]
                scale = 1.0 if "embed" in of else 0.1 if "bias" in of else depth**-0.5
                parameter.normal_(std=scale, generator=rng)
    return model


def qwen3_moe(folder: Path) -> None:
    sizes = {"num_experts": 8, "moe_intermediate_size": 128, "norm_topk_prob": True}
    drawn("Qwen3Moe", **sizes).save_pretrained(folder)


def write_gptq(folder: Path) -> Any:
    """By GPTQModel, which transformers leaves GPTQ to; it reads no experts in GPTQ itself."""
    # With two cores GPTQModel asks for fewer threads than it needs.
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    import torch
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    tokens = np.random.default_rng(0).integers(0, 256, (16, 64)).tolist()
    samples = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in tokens]
    # Its logs go to the folder that is current.
    with tempfile.TemporaryDirectory() as path, contextlib.chdir(path):
        qwen3_moe(Path(path))
        model = GPTQModel.load(path, QuantizeConfig(bits=4, group_size=32), device="cpu")
        model.quantize(samples, batch_size=4)
        model.save(str(folder))
    how = {"device": "cpu", "backend": BACKEND.TORCH, "dtype": torch.float16}
    return GPTQModel.load(str(folder), **how).model.float()


def write_fp8(folder: Path) -> Any:
    """By transformers, which quantizes to float8 where there is a GPU, but does not need it."""
    import torch
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    anywhere = {"validate_environment": lambda *args, **kwargs: None}
    how = {"quantization_config": FineGrainedFP8Config(), "dtype": torch.bfloat16}
    load = AutoModelForCausalLM.from_pretrained
    with tempfile.TemporaryDirectory() as path:
        qwen3_moe(Path(path))
        with mock.patch.multiple(FineGrainedFP8HfQuantizer, **anywhere):
            quantized = load(path, **how)
        quantized.save_pretrained(folder)
        model = load(path, dtype=torch.float32)
    # transformers reads what it has just written on GPUs alone.
    state, widen = quantized.state_dict(), Fp8Dequantize(None)._dequantize_one
    for name in [name for name in state if name.endswith("_scale_inv")]:
        of = name.removesuffix("_scale_inv")
        state[of] = widen(state[of], state.pop(name), torch.float32)
    model.load_state_dict(state)
    return model


def write_mxfp4(folder: Path) -> Any:
    """By transformers, but for the numbers: it packs them by kernels that it has to download."""
    import torch
    from transformers import AutoModelForCausalLM, Mxfp4Config

    model = drawn("GptOss", num_local_experts=8, sliding_window=4)
    state, how = model.state_dict(), {"block": (1, 32, 1), "scale_dtype": "float8_e8m0fnu"}
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        weights = jnp.asarray(state.pop(name).float().numpy())
        made = moe.quantize(weights, "float4_e2m1fn", transposed=True, **how)
        values, scales = (np.array(of).view(np.uint8) for of in (made.values, made.scales))
        state[f"{name}_blocks"] = torch.from_numpy(values.reshape(*scales.shape, 16))
        state[f"{name}_scales"] = torch.from_numpy(scales)
    model.config.quantization_config = Mxfp4Config()
    model.save_pretrained(folder, state_dict=state)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).float()


WRITERS: dict[str, Callable[[Path], Any]] = {
    "Qwen3-MoE in float8": write_fp8,
    "gpt-oss in MXFP4": write_mxfp4,
    "Qwen3-MoE in GPTQ": write_gptq,  # last, because GPTQModel changes transformers' classes
}


def expected(model: Any) -> dict[str, Any]:
    """The tokens of a prompt and what it continues with, and their logits.

    Of 1,024 prompts it is the one with the clearest choices, of tokens and of experts: activations
    are in bfloat16 where these are in float32.
    """
    import torch

    of_routers: list[Any] = []
    for module in model.eval().modules():
        if type(module).__name__.endswith("Router"):
            module.register_forward_hook(lambda _, __, out: of_routers.append(out[0]))
    tokens = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (1024, LENGTH)))
    with torch.no_grad():
        for _ in range(STEPS):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
        of_routers.clear()
        logits = model(tokens).logits
    choices = [(1, logits[:, LENGTH - 1 : -1])]
    choices += [(TOP_K, of.reshape(*tokens.shape, -1)) for of in of_routers]
    gaps = []
    for count, scores in choices:
        best = scores.topk(count + 1).values
        gaps.append((best[..., -2] - best[..., -1]).amin(1))
    gap, chosen = torch.stack(gaps).amin(0).max(0)
    found = {"gap": gap, "tokens": tokens[chosen], "logits": logits[chosen]}
    return {name: array.tolist() for name, array in found.items()}


def logits(folder: Path, tokens: list[int]) -> np.ndarray:
    """The decoder's logits [tokens, vocabulary], in float32."""
    checkpoint, name = moe.Checkpoint(folder), "model.embed_tokens.weight"
    wide = {**checkpoint, name: checkpoint[name].astype(np.float32)}
    config, params = decoder.load(wide, checkpoint.config)
    cache = decoder.make_cache(config, params, 1, len(tokens))
    with jax.default_matmul_precision("float32"):
        forward = jax.jit(decoder.forward, static_argnums=0)
        _, x = forward(config, params, cache, jnp.array([tokens]))
        return np.asarray(decoder.logits(params, x[0]))


def ran(*command: Any) -> list[str]:
    """What a program prints."""
    line = [sys.executable, *map(str, command)]
    return subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()


def check(folder: Path) -> tuple[float, int, int]:
    """The largest difference from the logits that are expected, and how many of the tokens are
    those of `examples/decoder.py`, and of a process that has JAX alone."""
    wanted = json.loads((folder / EXPECTED).read_text(encoding="utf-8"))
    tokens, serving = wanted["tokens"], EXAMPLES / "serving"
    how = "--steps", STEPS, "--prompt", *tokens[:LENGTH]
    with tempfile.TemporaryDirectory() as path:
        files = Path(path) / "step.bin", Path(path) / "weights.bin"
        platform = "cpu" if jax.default_backend() == "cpu" else "cuda"
        sizes = "--length", len(tokens), "--platforms", platform
        ran(serving / "export_decoder.py", folder, *files, *sizes)
        lines = [ran(EXAMPLES / "decoder.py", folder, *how)]
        lines += [ran("-c", ALONE, serving / "serve_decoder.py", *files, *how)]
    same = []
    for printed in lines:
        found = next(line for line in printed if line.startswith("next tokens: ")).split()[2:]
        same.append(sum(int(a) == b for a, b in zip(found, tokens[LENGTH:], strict=True)))
    off = np.abs(logits(folder, tokens) - np.array(wanted["logits"])).max()
    return float(off), *same


def run(folder: Path, names: list[str]) -> dict[str, Any]:
    """Checks the folders by their names, within a folder; exits with 1 if one is wrong."""
    folders = [folder / name.replace(" ", "-") for name in names]
    for name, of in zip(names, folders, strict=True):
        if not (of / EXPECTED).exists():
            of.mkdir(parents=True, exist_ok=True)
            (of / EXPECTED).write_text(json.dumps(expected(WRITERS[name](of))), encoding="utf-8")
    with ThreadPoolExecutor() as pool:
        checked = list(pool.map(check, folders))
    results, wrong = {}, []
    for name, (off, decoded, served) in zip(names, checked, strict=True):
        print(f"{name:20} logits {off:.1e}, tokens {decoded} and served {served} of {STEPS}")
        results[name] = {"difference": off, "decoded": decoded, "served": served}
        wrong += [] if off <= LIMIT and decoded == served == STEPS else [name]
    if wrong:
        sys.exit(f"wrong: {', '.join(wrong)}")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--only", nargs="+", choices=WRITERS, default=[*WRITERS])
    parser.add_argument("--output", type=Path, help="a record, which is written if all is right")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as path:
        results = run((options.folder or Path(path)).resolve(), options.only)
    if options.output:
        record.write(options.output, limit=LIMIT, steps=STEPS, results=results)


if __name__ == "__main__":
    main()
