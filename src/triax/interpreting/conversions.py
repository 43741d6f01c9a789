"""Converts between number formats as NVIDIA's GPUs do, where NumPy differs."""

from __future__ import annotations

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def to_integer(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Converts floats to integers, toward zero and saturating, as `cvt.rzi` of PTX does.

    NaN becomes 0; from float64, or to 64 bits, it becomes the highest bit alone. There is no `cvt`
    to 8 bits: the compiler converts to 16 bits and keeps the lower half.
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
    """Converts numbers to floats, rounded once, to the nearest or toward zero."""
    x = x.astype(np.float32) if x.dtype.itemsize < 4 else x
    if toward_zero:
        near = x.astype(dtype)
        beyond = np.abs(near.astype(x.dtype)) > np.abs(x)
        return (near.view(f"u{dtype.itemsize}") - beyond).view(dtype)
    if dtype.itemsize == 1:  # saturates, infinities too
        limit = float(ml_dtypes.finfo(dtype).max)
        x = np.clip(x, -limit, limit)
    if dtype == BFLOAT16 and x.dtype != np.float32:
        near = x.astype(np.float32)
        # The error is exact: the 64 bits of a longdouble's significand hold an int64 too.
        x = to_odd(near, x.astype(np.longdouble) - near)
    return x.astype(dtype)


def to_odd(near: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Rounds `near + error` to odd, so that rounding the result again is like rounding once.

    `near + error` is the exact number. Where `error` is not 0, the result is the neighbour of the
    exact number whose last bit is 1.
    """
    is_even = near.view(f"u{near.itemsize}") & 1 == 0
    inexact = np.isfinite(near) & (error != 0) & is_even
    toward = np.copysign(np.inf, error).astype(near.dtype)
    return np.where(inexact, np.nextafter(near, toward), near)
