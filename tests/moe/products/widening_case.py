"""Weights that are dequantized in memory, for many rows and for the rows' gradient: bit for bit."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.moe.bounds import Near, Numbers, rounded
from tests.moe.case import Arrays, Case
from tests.moe.draws import Rng
from tests.moe.products.case import Shape
from tests.moe.products.scaled_case import E4M3, E8M0, QUICK, TILED, Weights
from triax.moe.products import few_rows, ops


def widened(weights: Any, dtype: str, implementation: Any) -> Any:
    """As products of many rows do, but for scales of the whole depth, which they multiply later."""
    if weights.tiled:
        return ops.dequantize_tiles(weights, dtype=jnp.dtype(dtype), implementation=implementation)
    if implementation == "xla":
        return weights.dequantize(dtype).swapaxes(1, 2)

    how = {"implementation": implementation, "scaled": True}
    return few_rows.widen(weights, dtype, **how).values


def widen(path: str, shape: Shape, kind: str, dtype: str = "bfloat16", **options: Any) -> Case:
    """Of no rows, depth, columns and groups; `options` are those of `Weights`."""
    weights = Weights(shape, kind, **options)
    call = f"widened({weights.source}, {dtype!r}, how)"

    def draw(rng: Rng) -> Arrays:
        arrays = weights.draw(rng)
        if weights.scales in (E8M0, E4M3):  # all codes, of which some are no number
            codes = rng.integers(0, 256, arrays["scales"].shape, np.uint8)
            arrays["scales"] = codes.view(weights.scales)
        weights.plant(rng, arrays)
        return arrays

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        numbers = weights.numbers(arrays).swapaxes(1, 2)
        if path == "xla":  # which may take subnormal numbers for zeros
            return {"out": rounded(rounded(Near(numbers), np.float32), dtype)}
        return {"out": Numbers(numbers.astype(np.float32).astype(dtype))}

    return Case("widen", path, call, ("out",), draw, expect, names={"widened": widened})


_STORED = {
    **TILED,
    "int4, zeros in float32": {"kind": "int4", "block": (64, 1), "zeros": "float32"},
}
NAMED: dict[str, functools.partial[Case]] = {
    f"widen, {way}, {'tiles, ' * tiled}{dtype}": functools.partial(
        widen,
        shape=(0, 320, 192, 3) if tiled else (0, 352, 176, 3),
        dtype=dtype,
        tiles=(1, 1) if tiled else None,
        **_STORED[way],
    )
    for i, way in enumerate(_STORED)
    for tiled in (True, False)[: 1 + (i % 4 == 0)]
    for dtype in (("bfloat16", "float16", "float32")[i % 3],)
}
SLOW = [name for name in NAMED if not any(f"widen, {way}, " in name for way in QUICK)]
