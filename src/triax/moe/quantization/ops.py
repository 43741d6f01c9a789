"""The op of quantize, which has no derivative."""

from __future__ import annotations

import string
from typing import Any

import jax
import numpy as np

from triax.moe.quantization import launchers, reference
from triax.moe.quantization.packing import PACKED
from triax.moe.quantization.scaled import swapped
from triax.moe.shared.ops import Op, not_differentiable

_derivative = not_differentiable(
    "quantize is not differentiable; wrap its input in stop_gradient: "
    "quantize(jax.lax.stop_gradient(x), …), even if you stop the gradient of its result. To "
    "pass gradients straight through, let y = quantize(jax.lax.stop_gradient(x), …)"
    ".dequantize(), and use x + jax.lax.stop_gradient(y - x)."
)


def _dims(
    array: jax.Array, *, block: tuple[int, ...], transposed: bool, dtype: np.dtype, **_: Any
) -> Any:
    """Allows shards along the dimensions where blocks have size one."""
    # `_` stands for a dimension that every device needs whole.
    one = [of == 1 for of in block]
    if dtype in PACKED:  # pairs along the last stored dimension share a byte
        one[-2 if transposed else -1] = False
    dims = "".join(n if o else "_" for n, o in zip(string.ascii_lowercase, one, strict=False))
    results = "".join(swapped(dims)) if transposed else dims
    return (dims,), (results, results), dims.replace("_", "")


quantize = Op(
    "quantize",
    dims=_dims,
    kernels=launchers.quantize,
    xla=reference.quantize_reference,
    derivative=_derivative,
)
