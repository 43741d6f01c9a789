"""The inline assembly that the interpreter has, in NumPy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from triax.interpreting import libdevice
from triax.interpreting.conversions import BFLOAT16

Instruction = Callable[..., np.ndarray]


def find(assembly: str) -> Instruction | None:
    """Returns the function for some assembly, or None if it is missing."""
    return _INSTRUCTIONS.get(" ".join(assembly.split()))


def _fma_of_pairs(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Returns ``x * y + z`` of two bfloat16 in each word, each rounded once."""
    pairs = (np.ascontiguousarray(word)[..., None].view(BFLOAT16) for word in (x, y, z))
    return libdevice.fma(*pairs).view(x.dtype)[..., 0]


def _twice(half: int) -> Instruction:
    """Returns a function that gives words with the lower or the upper half of each word twice."""

    def run(x: np.ndarray) -> np.ndarray:
        halves = np.ascontiguousarray(x)[..., None].view(np.int16)[..., half : half + 1]
        return np.repeat(halves, 2, -1).view(x.dtype)[..., 0]

    return run


_INSTRUCTIONS = {
    "fma.rn.bf16x2 $0, $1, $2, $3;": _fma_of_pairs,
    "{.reg .b16 l, h; mov.b32 {l, h}, $1; mov.b32 $0, {l, l};}": _twice(0),
    "{.reg .b16 l, h; mov.b32 {l, h}, $1; mov.b32 $0, {h, h};}": _twice(1),
}
