"""Quantization in NumPy, block by block, with the casts of ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np

DTYPES = ["float8_e4m3fn", "float8_e5m2", "int8"]


def whole(block, shape):
    """The block with the array's sizes where it has None."""
    return tuple(max(s, 1) if b is None else b for b, s in zip(block, shape, strict=True))


@np.errstate(all="ignore")
def expected(array, dtype, block, transposed=False):
    """The values and the scales, in memory order; `block` is along `array`."""
    x, dtype = np.asarray(array).astype(np.float32), np.dtype(dtype)
    block = whole(block, x.shape)
    top = np.float32(127 if dtype == np.int8 else ml_dtypes.finfo(dtype).max)
    scales = np.empty([-(-s // b) for s, b in zip(x.shape, block, strict=True)], np.float32)
    values = np.empty(x.shape, dtype)
    for at in np.ndindex(*scales.shape):
        here = tuple(slice(i * b, (i + 1) * b) for i, b in zip(at, block, strict=True))
        part = x[here]
        finite = np.isfinite(part)
        scale = np.maximum(np.abs(part[finite]).max(initial=0) / top, np.float32(2**-126))
        quotient = np.clip(part * (np.float32(1) / np.float32(scale)), -top, top)
        if dtype == np.int8:
            scale = scale if finite.all() else np.nan
            quotient = np.rint(quotient) * finite.all()
        elif dtype.name == "float8_e5m2":
            quotient = np.where(np.isinf(part), part, quotient)
        else:
            quotient = np.where(finite, quotient, np.float32(np.nan))
        # All NaNs have one sign.
        values[here] = np.where(np.isnan(quotient), 0 if dtype == np.int8 else np.nan, quotient)
        scales[at] = scale
    return tuple(a.swapaxes(-1, -2) for a in (values, scales)) if transposed else (values, scales)


def draw(shape, dtype, seed=0, special=True):
    """Rows of very different sizes, with signed zeros, subnormals and what is not finite."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.uniform(-20, 20, (*shape[:-1], 1)))
    with np.errstate(over="ignore"):
        array = (rng.standard_normal(shape) * sizes).astype(np.float32).astype(dtype)
    found = [0.0, -0.0, 1e-40, -1e-45, 6e-8]
    if special:
        found += [np.nan, -np.nan, np.inf, -np.inf, 3.4028235e38]
    flat = array.reshape(-1)
    with np.errstate(over="ignore"):
        for value in found:
            flat[rng.choice(flat.size, flat.size // 300 + 1)] = np.float32(value).astype(dtype)
    if array.shape[0] > 2 and array.ndim > 1:
        flat.reshape(array.shape)[1] = np.float32(-3e-41).astype(dtype)
        flat.reshape(array.shape)[2] = 0
    return array
