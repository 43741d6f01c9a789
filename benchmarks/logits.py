"""Records the logits of transformers' models for small checkpoints, in float32 on the CPU.

Weights are drawn by a seed (`examples/random_checkpoint.py`) and written as a checkpoint, which
transformers and `examples/decoder.py` load. Prints how far the decoder's logits are off, writes
`benchmarks/logits.json`, with which tests compare the decoder where there is no torch, and exits
with 1 if a logit is off by more than the limit. `make models` makes the environment and calls this.

    python -m benchmarks.logits [--output FILE]
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.harness import record
from triax import moe

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
decoder, random_checkpoint = map(importlib.import_module, ("decoder", "random_checkpoint"))

LIMIT = 1e-4
LENGTH, STEPS = 24, 8  # of the prompt, which is three sliding windows long, and after it
PROMPT = np.random.default_rng(1).integers(0, 32, LENGTH, np.int32)
IN_FLOATS = {k: v for k, v in random_checkpoint.TINY_GPT_OSS.items() if k != "quantization_config"}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt-oss": IN_FLOATS,
    "gpt-oss in MXFP4": random_checkpoint.TINY_GPT_OSS,
    "Qwen3-MoE": random_checkpoint.TINY_QWEN3_MOE,
    "Qwen3-MoE in float8": random_checkpoint.TINY_QWEN3_MOE_FP8,
    "Qwen3-MoE with all options": random_checkpoint.TINY_QWEN3_MOE_ALL,
}


def write(folder: Path, config: dict[str, Any]) -> None:
    """Writes a checkpoint with random weights, as Hugging Face has it."""
    from safetensors.numpy import save_file

    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(random_checkpoint.draw(config), folder / "model.safetensors", {"format": "pt"})


def of_transformers(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """The logits [tokens, vocabulary] of the prompt, and the tokens that it continues with."""
    import torch
    from transformers import AutoModelForCausalLM

    how = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, **how).float().eval()
    given = torch.from_numpy(PROMPT.astype(np.int64))[None]
    with torch.no_grad():
        logits = model(given).logits[0].numpy()
        how = {"max_new_tokens": STEPS, "do_sample": False}
        found = model.generate(given, attention_mask=torch.ones_like(given), **how)
    return logits, found[0, LENGTH:].numpy()


def of_decoder(folder: Path) -> np.ndarray:
    config, params = decoder.load(moe.Checkpoint(folder))
    cache = decoder.make_cache(config, params, 1, LENGTH)
    _, x = jax.jit(decoder.forward, static_argnums=0)(config, params, cache, PROMPT[None])
    return np.asarray(decoder.logits(params, x[0]))


def main() -> None:
    output = record.parser(__file__, __doc__).parse_args().output
    results, wrong = {}, []
    for name, config in CONFIGS.items():
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), config)
            logits, continued = of_transformers(Path(folder))
            off = float(np.abs(of_decoder(Path(folder)) - logits).max())
        print(f"{name:30} {off:.1e}")
        wrong += [] if off <= LIMIT else [name]
        rows = [" ".join(f"{logit:.6f}" for logit in row) for row in logits]
        next_tokens = " ".join(map(str, continued))
        largest = float(np.abs(logits).max())
        results[name] = {"difference": off, "largest": largest, "next_tokens": next_tokens}
        results[name]["logits"] = rows
    if wrong:
        sys.exit(f"above {LIMIT:g}: {', '.join(wrong)}")
    record.write(output, limit=LIMIT, results=results)


if __name__ == "__main__":
    main()
