"""The op of quantize, which has no derivative."""

from __future__ import annotations

import functools
import string
from typing import Any, NoReturn

from triax.errors import DifferentiationError
from triax.moe.quantization import launchers, reference
from triax.moe.shared.ops import Op


def _derivative(*_: Any) -> NoReturn:
    raise DifferentiationError(
        "quantize has no derivative: its result is a staircase. Stop the gradient of its argument, "
        "quantize(jax.lax.stop_gradient(x), …), also where that of its result is stopped. Or pass "
        "gradients straight through: with y = quantize(jax.lax.stop_gradient(x), …).dequantize(), "
        "take x + jax.lax.stop_gradient(y - x)."
    )


@functools.cache
def quantize(block: tuple[int, ...], transposed: bool, packed: bool) -> Op:
    """The op for blocks that may be cut over devices along the dimensions where they are one."""
    # `_` stands for a dimension of any size, which is needed whole.
    one = [of == 1 for of in block]
    if packed:  # two of the dimension that is stored last share a byte
        one[-2 if transposed else -1] = False
    letters = "".join(n if o else "_" for n, o in zip(string.ascii_lowercase, one, strict=False))
    results = letters[:-2] + letters[:-3:-1] if transposed else letters
    return Op(
        "quantize",
        arguments=(letters,),
        results=(results, results),
        cut=letters.replace("_", ""),
        kernels=launchers.quantize,
        xla=reference.quantize_reference,
        derivative=_derivative,
    )
