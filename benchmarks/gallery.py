"""How long the ops of the gallery's examples take beside plain JAX, as the examples print it.

python -m benchmarks.gallery [--output FILE]
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from benchmarks.harness import record

EXAMPLES = (
    *("vector_add", "softmax", "matmul", "tma_matmul", "gluon_transpose", "layer_norm"),
    *("flash_attention", "adam_in_place", "own_op"),
)


def measure():
    """The comparisons of all examples, one after the other."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
    compared = importlib.import_module("comparing").COMPARED
    for example in EXAMPLES:
        compared.clear()
        importlib.import_module(example).main()
        yield from ({"example": example, **found} for found in compared)


if __name__ == "__main__":
    output = record.parse(record.parser(__file__, __doc__)).output
    record.write(output, results=[*measure()])
