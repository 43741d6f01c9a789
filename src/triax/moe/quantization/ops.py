"""The op of quantize, which has no derivative."""

from __future__ import annotations

import string
from typing import Any, NoReturn

import jax
import numpy as np

from triax.errors import DifferentiationError
from triax.moe.quantization import launchers, reference
from triax.moe.quantization.packing import PACKED
from triax.moe.quantization.scaled import swapped
from triax.moe.shared.ops import Op


def _derivative(*_: Any) -> NoReturn:
    raise DifferentiationError(
        "quantize has no derivative: its result is a staircase. Stop the gradient of its argument, "
        "quantize(jax.lax.stop_gradient(x), …), also where that of its result is stopped. Or pass "
        "gradients straight through: with y = quantize(jax.lax.stop_gradient(x), …).dequantize(), "
        "take x + jax.lax.stop_gradient(y - x)."
    )


def _letters(
    array: jax.Array, *, block: tuple[int, ...], transposed: bool, dtype: np.dtype, **_: Any
) -> Any:
    """An array may be cut along the dimensions where its blocks are one."""
    # `_` stands for a dimension of any size, which is needed whole.
    one = [of == 1 for of in block]
    if dtype in PACKED:  # two of the dimension that is stored last share a byte
        one[-2 if transposed else -1] = False
    letters = "".join(n if o else "_" for n, o in zip(string.ascii_lowercase, one, strict=False))
    results = "".join(swapped(letters)) if transposed else letters
    return (letters,), (results, results), letters.replace("_", "")


quantize = Op(
    "quantize",
    letters=_letters,
    kernels=launchers.quantize,
    xla=reference.quantize_reference,
    derivative=_derivative,
)
