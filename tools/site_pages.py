"""A hook of MkDocs: what a page of the repository needs to be a page of the site.

Pages that are files of the repository's root, links to files outside of `docs/`, the entries of the
reference, and words to search by.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

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
    "quantized-checkpoints": "mxfp4, fp4, nvfp4, GPTQ, AWQ, int4",
    "reference/command-line": "cli, doctor",
    "router": "top_k, gating, load balancing, sigmoid",
    "serving": "inference, decode, deploy, docker, aot, jax.export",
    "sharding": "sharding, sharded, NamedSharding, explicit axes",
    "start/first-kernel": "getting started, tutorial, quickstart, hello world",
    "start/install": "offline, pip, wheel, cuda, rocm, windows, macos",
    "tuning": "autotune, do_bench, key",
    "versions": "support, deprecation, upgrade, pytorch, ptx",
}


# A link out of `docs/`, and a directive of mkdocstrings, which is a comment in the repository.
OUTSIDE = re.compile(r"\[([^][]*)\]\(((?:\.\./)+)([\w./-]+)\)")
ENTRY = re.compile(r"<!-- (::: (\S+).*?)\s*-->", re.DOTALL)
HEADING = re.compile(r"^<!-- ::: (\S+)\n.*\n +heading: (\S+)", re.MULTILINE)
NOTEBOOK = "examples/quickstart.ipynb"


def on_files(files: Any, *, config: Any, **_: Any) -> None:
    from mkdocs.structure.files import File

    notebook = ROOT / NOTEBOOK
    files.append(File.generated(config, notebook.name, abs_src_path=str(notebook)))


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    uri = page.file.src_uri
    if words := WORDS.get(uri.removesuffix(".md")):
        page.meta["tags"] = words.split(", ")
    if name := PAGES.get(uri):
        page.meta["search"] = {"boost": 0.1}
        markdown = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
    return linked(entered(markdown), uri, config.repo_url)


def entered(markdown: str) -> str:
    """A page of the reference with its entries, and links to them from the table of names."""
    if found := ENTRY.search(markdown):
        module = found[2]
        hidden = {heading: name for name, heading in HEADING.findall(markdown)}  # by the heading
        whole = lambda name: name if name.startswith("triax.") else f"{module}.{name}"
        link = lambda name: hidden.get(name, whole(name))
        row = re.compile(r"^\| `([\w.]+)`(?= \|.*src/triax/)", re.MULTILINE)
        markdown = row.sub(lambda of: f"| [`{of[1]}`](#{link(of[1])})", markdown)
    return ENTRY.sub(r"\1", markdown)


def linked(markdown: str, uri: str, repository: str | None) -> str:
    """A page whose links out of `docs/` lead to the repository, or are text without one."""

    def link(found: re.Match[str]) -> str:
        text, up, path = found.groups()
        if up.count("/") <= uri.count("/"):
            return found[0]
        if path == NOTEBOOK:
            return f"[{text}]({'../' * uri.count('/')}{Path(path).name})"
        return f"[{text}]({repository.rstrip('/')}/blob/HEAD/{path})" if repository else text

    return OUTSIDE.sub(link, markdown)
