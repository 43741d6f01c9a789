"""A hook of MkDocs: pages that are files of the repository's root, and words to search by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}

# Words that people look for, which bring the page to the top; `tools/check_site.py` tries some.
WORDS = {
    "coming-from/argsort": "argsort, jax.lax.ragged_dot, megablox, megablocks",
    "coming-from/jax-triton": "jax_triton, jt",
    "coming-from/pallas": "pallas, plgpu",
    "coming-from/torch-triton": "torch, pytorch, heuristics, strides, views",
    "eight-bits": "fp8, float8, e4m3, e5m2, int8, quantization",
    "expert-parallel": "all_to_all, ep, expert parallel, all-to-all, nccl",
    "from-a-checkpoint": "safetensors, hugging face, load_file, weights, from_pretrained",
    "gallery": "examples, notebook, flash attention, softmax, layer norm, matmul",
    "guides/debugging": "pdb, breakpoint, print, out of bounds, illegal address, nan",
    "faq": "tpu, amd, deterministic",
    "guides/flax-and-equinox": "flax, nnx, equinox",
    "guides/grids": "grid, program_id, launch",
    "guides/in-place": "donate, inplace, alias, Ref",
    "guides/packaging-kernels": "publish, package, rmsnorm, entry point",
    "guides/profiling": "nsight, xprof, cost_estimate, CUDA graphs, command buffers",
    "guides/testing": "pytest, hypothesis, unit tests, races",
    "guides/tma-and-gluon": "tma, gluon, descriptor",
    "guides/transformations": "custom_vjp, gradient, backward, vmap, shard_map, primitive",
    "models": "mixtral, deepseek, qwen, llama, gpt-oss, transformers",
    "moe": "moe, mixture of experts, capacity, dropping, dropless, memory, oom, remat, swiglu",
    "parallel": "fsdp, tensor parallel, data parallel, multi-host, shared expert, optimizer",
    "performance-notes": "performance, speed, roofline, bandwidth",
    "quantized-checkpoints": "mxfp4, fp4, nvfp4, GPTQ, AWQ, int4, compressed-tensors",
    "reference/command-line": "cli, doctor",
    "router": "top_k, gating, load balancing, sigmoid",
    "serving": "inference, decode, deploy, docker, aot, jax.export",
    "sharding": "sharding, sharded, NamedSharding, explicit axes",
    "start/first-kernel": "getting started, tutorial, quickstart, hello world",
    "start/first-model": "decoder, llm, gpt-oss, qwen3, kv cache, generate, yarn, sinks",
    "start/install": "offline, pip, wheel, cuda, rocm, windows, macos",
    "tuning": "autotune, do_bench, key",
    "versions": "support, deprecation, upgrade, pytorch, ptx",
}


def on_files(files: Any, *, config: Any, **_: Any) -> None:
    notebook = ROOT / "examples" / "quickstart.ipynb"
    files.append(File.generated(config, notebook.name, abs_src_path=str(notebook)))


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    if words := WORDS.get(page.file.src_uri.removesuffix(".md")):
        page.meta["tags"] = words.split(", ")
    if (name := PAGES.get(page.file.src_uri)) is None:
        return markdown
    page.meta["search"] = {"boost": 0.1}
    return (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
