"""JAX dtypes and Triton's names for them."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from triax.errors import ArgumentTypeError, ArgumentValueError

FLOAT8 = {
    np.dtype(ml_dtypes.float8_e4m3fn): "fp8e4nv",
    np.dtype(ml_dtypes.float8_e5m2): "fp8e5",
    np.dtype(ml_dtypes.float8_e4m3fnuz): "fp8e4b8",
    np.dtype(ml_dtypes.float8_e5m2fnuz): "fp8e5b16",
}
TRITON_NAMES: dict[np.dtype, str] = {
    np.dtype(np.bool_): "i1",
    **{np.dtype(f"int{bits}"): f"i{bits}" for bits in (8, 16, 32, 64)},
    **{np.dtype(f"uint{bits}"): f"u{bits}" for bits in (8, 16, 32, 64)},
    np.dtype(np.float16): "fp16",
    np.dtype(ml_dtypes.bfloat16): "bf16",
    np.dtype(np.float32): "fp32",
    np.dtype(np.float64): "fp64",
    **FLOAT8,
}
"""The dtypes that kernels support, with Triton's names."""
SUPPORTED = tuple(dtype.name for dtype in TRITON_NAMES)


def triton_name(dtype: np.dtype) -> str:
    """Triton's name for an element type that passed `check`: "fp32" for float32."""
    return TRITON_NAMES[np.dtype(dtype)]


def is_supported(dtype: object) -> bool:
    """Whether Triton has an element type for `dtype`."""
    try:
        return np.dtype(dtype) in TRITON_NAMES  # type: ignore[call-overload]
    except TypeError:  # extended dtypes such as PRNG keys
        return False


def check(dtype: object, argument: str) -> None:
    """Raises `ArgumentTypeError` if Triton has no element type for `dtype`."""
    if not is_supported(dtype):
        raise ArgumentTypeError(
            f"Argument `{argument}` has dtype {dtype}, which Triton kernels do not support. "
            f"Cast it to one of: {', '.join(SUPPORTED)}."
        )


def launch_scalar(name: str, value: bool | int | float, type_name: str) -> tuple[float, str]:
    """Converts a scalar to a type that launchers know: a bool, or a number of 32 or 64 bits.

    A narrower number is passed in the low bytes of a wider one: a kernel reads only as many bytes
    as its parameter has.

    Args:
      name: the parameter, for messages.
      value: the caller's scalar.
      type_name: Triton's type of the parameter: "u1", "i16", "bf16", …

    Returns:
      The value and its type: "i1", "i32", "u32", "i64", "u64", "fp32" or "fp64".

    Raises:
      ArgumentTypeError, ArgumentValueError: the type cannot hold this value.
    """
    if type_name in ("i1", "u1"):
        return bool(value), "i1"
    if type_name in ("fp32", "fp64"):
        return float(value), type_name
    refused = (
        f"Argument `{name}` is {value!r}, which its type in the kernel, {type_name}, cannot hold."
    )
    if type_name in ("fp16", "bf16"):
        dtype = np.float16 if type_name == "fp16" else ml_dtypes.bfloat16
        with np.errstate(over="ignore"):
            narrow = np.array(value, np.float64).astype(dtype)
        if math.isfinite(value) and not np.isfinite(narrow):
            raise ArgumentValueError(refused)
        return int(narrow.view(np.uint16)), "u32"
    if isinstance(value, float):
        raise ArgumentTypeError(f"{refused} Pass an int.")
    bits = int(type_name[1:])
    low = 0 if type_name.startswith("u") else -(1 << bits - 1)
    if not low <= value < low + (1 << bits):
        raise ArgumentValueError(refused)
    return (int(value), type_name) if bits >= 32 else (value & 0xFFFF_FFFF, "u32")
