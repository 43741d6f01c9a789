"""Quantization in NumPy, block by block, with the casts of ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from triax import moe

DTYPES = ["float8_e4m3fn", "float8_e5m2", "int8"]
PACKED = ["float4_e2m1fn", "int4"]
E8M0, E4M3 = "float8_e8m0fnu", "float8_e4m3fn"


def whole(block, shape):
    """The block with the array's sizes where it has None."""
    return tuple(max(s, 1) if b is None else b for b, s in zip(block, shape, strict=True))


@np.errstate(all="ignore")
def expected(array, dtype, block, transposed=False, scale_dtype="float32"):
    """The values and the scales, in memory order; `block` is along `array`."""
    x, dtype = np.asarray(array).astype(np.float32), np.dtype(getattr(ml_dtypes, dtype, dtype))
    block = whole(block, x.shape)
    integers = {"int8": 127, "int4": 7}
    top = np.float32(integers.get(dtype.name) or ml_dtypes.finfo(dtype).max)
    scales = np.empty([-(-s // b) for s, b in zip(x.shape, block, strict=True)], np.float32)
    values = np.empty(x.shape, dtype)
    for at in np.ndindex(*scales.shape):
        here = tuple(slice(i * b, (i + 1) * b) for i, b in zip(at, block, strict=True))
        part = x[here]
        finite = np.isfinite(part)
        scale = np.maximum(np.abs(part[finite]).max(initial=0) / top, np.float32(2**-126))
        if scale_dtype == E8M0:
            largest = np.abs(part[finite]).max(initial=0).astype(np.float64)
            power = np.frexp(largest)[1] - np.frexp(np.float64(top))[1]
            scale = np.ldexp(1.0, max(power, -127) if largest else -127)
            quotient = np.clip(part / scale, -top, top).astype(np.float32)
        else:
            quotient = np.clip(part * (np.float32(1) / np.float32(scale)), -top, top)
        if dtype.name in (*integers, "float4_e2m1fn"):
            scale = scale if finite.all() else np.nan
            quotient = np.rint(quotient) if dtype.name in integers else quotient
            quotient = np.where(finite.all(), quotient, 0)
        elif dtype.name == "float8_e5m2":
            quotient = np.where(np.isinf(part), part, quotient)
        else:
            quotient = np.where(finite, quotient, np.float32(np.nan))
        # All NaNs have one sign.
        missing = 0 if dtype.name in integers else np.nan
        values[here] = np.where(np.isnan(quotient), missing, quotient)
        scales[at] = scale
    scales = scales.astype(scale_dtype)
    if transposed:
        values, scales = values.swapaxes(-1, -2), scales.swapaxes(-1, -2)
    return (packed(values) if dtype.name in PACKED else values), scales


def packed(values):
    """Numbers of 4 bits, two to a byte."""
    codes = np.ascontiguousarray(values).view(np.uint8) & 15
    return codes[..., ::2] + 16 * codes[..., 1::2]


def nvfp4(shape, seed=0):
    """Weights [..., depth, columns] of NVFP4, whose columns have global scales of their own."""
    *lead, depth, columns = shape
    draw = np.random.default_rng(seed)
    scales = np.exp(draw.standard_normal((*lead, columns, -(-depth // 16))))
    return moe.ScaledArray(
        draw.integers(0, 256, (*lead, columns, depth // 2), np.uint8),
        scales.astype(ml_dtypes.float8_e4m3fn),
        block=(*(1 for _ in lead), 16, 1),
        transposed=True,
        packed="float4_e2m1fn",
        global_scales=np.exp(draw.standard_normal((*lead, columns, 1))).astype(np.float32),
    )


def numbers(scaled):
    """The numbers in the values of a `ScaledArray`, in float64."""
    values = np.asarray(scaled.values)
    if scaled.packed is None:
        return values.astype(np.float64)
    codes = np.stack([values % 16, values // 16], axis=-1).reshape(*values.shape[:-1], -1)
    if scaled.packed == "int4":
        return np.where(codes < 8, codes, codes - 16.0)
    halves = np.array([0, 1, 2, 3, 4, 6, 8, 12]) / 2
    return np.concatenate([halves, -halves])[codes]


def exactly(scaled):
    """What a `ScaledArray` stands for, in float64."""
    scaled = scaled.untile()
    values = numbers(scaled)
    block = whole(scaled.block, scaled.shape)
    block = (*block[:-2], *block[:-3:-1]) if scaled.transposed else block

    def spread(array):
        for axis, (size, of) in enumerate(zip(values.shape, block, strict=True)):
            array = np.take(array, np.arange(size) // of, axis)
        return array

    if scaled.zeros is not None:
        values = values - spread(np.asarray(scaled.zeros, np.float64))
    values = values * spread(np.asarray(scaled.scales, np.float64))
    if scaled.global_scales is not None:
        values = values * np.asarray(scaled.global_scales, np.float64)
    return np.swapaxes(values, -1, -2) if scaled.transposed else values


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
