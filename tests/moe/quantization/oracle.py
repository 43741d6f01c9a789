"""What a `ScaledArray` stands for, in NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tests.moe.products.scaled_case import numbers_of
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


def exactly(scaled):
    """What a `ScaledArray` stands for, in float64."""
    scaled = scaled.untile()
    values = numbers_of(np.asarray(scaled.values), scaled.packed)
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
