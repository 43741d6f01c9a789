"""What a `ScaledArray` stands for, in NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from triax import moe

E8M0, E4M3 = "float8_e8m0fnu", "float8_e4m3fn"


def whole(block, shape):
    """The block with the array's sizes where it has None."""
    return tuple(max(s, 1) if b is None else b for b, s in zip(block, shape, strict=True))


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
