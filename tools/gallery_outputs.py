"""Writes what the gallery's examples print on a CPU to `docs/outputs/`, by running them.

    python tools/gallery_outputs.py [NAME …]
    python tools/pages.py                        # writes them into the page

`tests/examples` compares what they print with these files, digits aside, which differ by version.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUTPUTS = ROOT / "docs" / "outputs"
EXAMPLES = (
    "vector_add",
    "softmax",
    "matmul",
    "tma_matmul",
    "layer_norm",
    "flash_attention",
    "adam_in_place",
    "debugging",
    "own_op",
    "fp8_dispatch",
    "moe_equinox",
    "moe_nnx",
    "expert_parallel",
    "decoder",
    "same_bits",
)


def main() -> None:
    """Runs the examples that are named, or all."""
    on_cpu = {"JAX_PLATFORMS": "cpu", "TRIAX_CUDA_ARCH": "90"}
    OUTPUTS.mkdir(exist_ok=True)
    for name in sys.argv[1:] or EXAMPLES:
        command = [sys.executable, f"{name}.py"]
        done = subprocess.run(
            command,
            cwd=ROOT / "examples",
            env={**os.environ, **on_cpu},
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        (OUTPUTS / f"{name}.txt").write_text(done.stdout, encoding="utf-8")


if __name__ == "__main__":
    main()
