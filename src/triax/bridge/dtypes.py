"""JAX dtypes and Triton's names for them."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from triax.bridge.errors import ArgumentTypeError

_TRITON_NAMES: dict[np.dtype, str] = {
    np.dtype(dtype): name
    for dtype, name in {
        np.bool_: "i1",
        np.int8: "i8",
        np.int16: "i16",
        np.int32: "i32",
        np.int64: "i64",
        np.uint8: "u8",
        np.uint16: "u16",
        np.uint32: "u32",
        np.uint64: "u64",
        np.float16: "fp16",
        ml_dtypes.bfloat16: "bf16",
        np.float32: "fp32",
        np.float64: "fp64",
        ml_dtypes.float8_e4m3fn: "fp8e4nv",
        ml_dtypes.float8_e5m2: "fp8e5",
        ml_dtypes.float8_e4m3fnuz: "fp8e4b8",
        ml_dtypes.float8_e5m2fnuz: "fp8e5b16",
    }.items()
}

SUPPORTED = tuple(dtype.name for dtype in _TRITON_NAMES)


def triton_name(dtype: np.dtype) -> str:
    """Triton's name for an element type that passed `check`: "fp32" for float32."""
    return _TRITON_NAMES[np.dtype(dtype)]


def check(dtype: object, argument: str) -> None:
    """Raises `ArgumentTypeError` if Triton has no element type for `dtype`."""
    try:
        known = np.dtype(dtype) in _TRITON_NAMES  # type: ignore[call-overload]
    except TypeError:  # extended dtypes such as PRNG keys
        known = False
    if not known:
        raise ArgumentTypeError(
            f"Argument `{argument}` has dtype {dtype}, which Triton kernels cannot take. "
            f"Cast it to one of: {', '.join(SUPPORTED)}."
        )
