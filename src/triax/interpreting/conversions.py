"""Conversions between formats of numbers, as NVIDIA's GPUs do them where NumPy does otherwise."""

from __future__ import annotations

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def to_integer(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Floats as integers, toward zero and saturated: `cvt.rzi` of PTX.

    NaN becomes 0; from float64, or to 64 bits, the highest bit alone. There is no `cvt` to 8 bits:
    the compiler takes the lower half of 16.
    """
    wide = np.dtype(f"{dtype.kind}2") if dtype.itemsize == 1 else dtype
    info = np.iinfo(wide)
    top = 8 in (wide.itemsize, x.dtype.itemsize)
    nan = np.array(1 << (8 * wide.itemsize - 1) if top else 0, np.uint64).astype(wide)
    x = x.astype(np.float64)
    low, high = x <= float(info.min), x >= float(info.max)
    whole = np.where(low | high | np.isnan(x), 0, x).astype(wide)
    whole = np.where(low, wide.type(info.min), np.where(high, wide.type(info.max), whole))
    return np.where(np.isnan(x), nan, whole).astype(dtype)


def to_float(x: np.ndarray, dtype: np.dtype, toward_zero: bool = False) -> np.ndarray:
    """Numbers as floats, rounded once, to the nearest or toward zero."""
    x = x.astype(np.float32) if x.dtype.itemsize < 4 else x
    if toward_zero:
        near = x.astype(dtype)
        beyond = np.abs(near.astype(x.dtype)) > np.abs(x)
        return (near.view(f"u{dtype.itemsize}") - beyond).view(dtype)
    if dtype.itemsize == 1:  # saturates, infinities too
        limit = float(ml_dtypes.finfo(dtype).max)
        x = np.clip(x, -limit, limit)
    if dtype == BFLOAT16 and x.dtype != np.float32:
        x = _to_odd_float32(x)
    return x.astype(dtype)


def _to_odd_float32(x: np.ndarray) -> np.ndarray:
    """Rounded to odd, so that rounding again, to bfloat16, gives what rounding once would."""
    near = x.astype(np.float32)
    error = x.astype(np.longdouble) - near  # exact: 64 bits are enough for int64 as well
    inexact = np.isfinite(near) & (error != 0) & (near.view(np.uint32) & 1 == 0)
    return np.where(
        inexact, np.nextafter(near, np.copysign(np.inf, error.astype(np.float32))), near
    )
