"""Matrix products, with and without scales."""

from __future__ import annotations

from typing import Any

import numpy as np

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])


def dot(a: np.ndarray, b: np.ndarray, d: np.ndarray) -> np.ndarray:
    """Returns ``a @ b + d`` in `d`'s dtype, computed in float32 if that is a narrower float."""
    wide = d.dtype if d.dtype.kind in "iu" or d.dtype.itemsize > 4 else np.dtype(np.float32)
    product = np.matmul(a.astype(wide, copy=False), b.astype(wide, copy=False))
    return (product + d.astype(wide)).astype(d.dtype)


def scaled(values: Any, scale: Any, format: str, packs_depth: bool, dtype: np.dtype) -> np.ndarray:
    """Multiplies an operand of `tl.dot_scaled`, ``[..., depth]``, by its scales.

    The scales are ``[..., depth / n]``. Two 4-bit numbers share a byte, the first in its lower
    half: neighbours along the depth if `packs_depth`, else along the axis before it. The product
    is computed in `dtype`, as compiled code does where the hardware does not apply scales.
    """
    data = values.data
    if format == "E2M1":
        axis = -1 if packs_depth else -2
        data = np.moveaxis(data, axis, -1)
        halves = np.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], -1)
        data = np.moveaxis(_E2M1[halves], -1, axis)
    data = data.astype(dtype)
    if scale is None:
        return data
    factors = scale.data
    if factors.dtype.itemsize == 1 and factors.dtype.kind in "iu":  # powers of two: e8m0
        bits = factors.view(np.uint8)
        factors = np.where(
            bits == 255, np.nan, np.ldexp(np.float32(1), bits.astype(np.int32) - 127)
        )
    factors = factors.astype(np.float32).astype(dtype)
    return data * np.repeat(factors, data.shape[-1] // factors.shape[-1], axis=-1)
