"""The op of quantize, which has no derivative.

`quantized` calls it with checked arguments, for the public `quantize` and for what is made of it.
"""

from __future__ import annotations

import string
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from triax.errors import ArgumentValueError
from triax.moe.quantization import configs, launchers, reference
from triax.moe.quantization.packing import E8M0, PACKED
from triax.moe.quantization.scaled import ScaledArray, swapped
from triax.moe.shared import implementation as implementations
from triax.moe.shared.implementation import Implementation
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


def quantized(
    array: jax.Array,
    dtype: DTypeLike,
    *,
    block: tuple[int | None, ...],
    transposed: bool = False,
    scale_dtype: DTypeLike = "float32",
    implementation: Implementation | None,
) -> ScaledArray:
    """Rounds an array to 8 or 4 bits.

    Raises:
      ArgumentValueError: kernels were requested, and there is none for these blocks or dtypes.
    """
    dtype, scale_dtype = np.dtype(dtype), np.dtype(scale_dtype)
    packed = dtype in PACKED
    # An empty dimension has blocks of one.
    sizes = tuple(max(n, 1) if of is None else of for of, n in zip(block, array.shape, strict=True))
    options: dict[str, Any] = {"block": sizes, "dtype": dtype, "transposed": transposed}
    kernel, reason = None, f"Argument `implementation` is {implementation!r}, and no kernel rounds"
    if packed or scale_dtype == E8M0:
        reason += f" to {dtype.name} with scales of {scale_dtype.name}. Let it be None or 'xla'."
    elif implementation != "xla":
        kernel = configs.kernel_of(array.shape, sizes, transposed)
        reason = (
            f"Argument `block` must suit the kernels: {configs.KERNELS}; got {sizes}"
            f"{' transposed' * transposed} for shape {array.shape}. Let `implementation` be None "
            "or 'xla'."
        )
    if kernel is None and implementation in ("triton", "interpret"):
        raise ArgumentValueError(reason)
    if kernel is None or not array.size:
        implementation = "xla"
        options["scale_dtype"] = scale_dtype
    else:
        implementation = implementations.fit(implementation, array)
    values, scales = quantize(array, implementation=implementation, kernel=kernel, **options)
    return ScaledArray(values, scales, block, transposed, dtype.name if packed else None)
