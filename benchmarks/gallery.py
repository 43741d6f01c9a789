"""How long the ops of the gallery's examples take beside plain JAX.

    python benchmarks/gallery.py [--output FILE]

Runs the examples one after the other, and writes what they print to `benchmarks/gallery.json`.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import gpu_record

EXAMPLES = (
    "vector_add",
    "softmax",
    "matmul",
    "tma_matmul",
    "gluon_transpose",
    "layer_norm",
    "flash_attention",
    "adam_in_place",
    "own_op",
)


def main() -> None:
    output = gpu_record.output(__doc__, __file__)
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
    compared = importlib.import_module("comparing").COMPARED
    results = []
    for example in EXAMPLES:
        compared.clear()
        importlib.import_module(example).main()
        results += [{"example": example, **found} for found in compared]
    gpu_record.write(output, results=results)


if __name__ == "__main__":
    main()
