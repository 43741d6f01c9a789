"""quantize, whose values and scales are exact; and products of what it made, as recipes have."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from tests.fuzz.products import put, sizes_of, zeros
from tests.moe import draws
from tests.moe.bounds import Array, Near, Numbers, matmul, rounded, sum_unit
from tests.moe.case import Arrays, Case
from tests.moe.draws import Rng, one_of
from tests.moe.plans.case import spans
from triax.moe.products.quantized_outer_ops import outer_in_8_bits

_INTEGERS = {"int8": 127, "int4": 7}
_PACKED = ("int4", "float4_e2m1fn")
_F32 = np.float32


def blocks_of(x: Array, block: tuple[int, ...]) -> Array:
    """The numbers of each block in the last dimension; zeros where one is partial."""
    edges = [(0, -s % b) for s, b in zip(x.shape, block, strict=True)]
    parts = [n for s, b in zip(x.shape, block, strict=True) for n in (-(-s // b), b)]
    ndim = x.ndim
    order = [*range(0, 2 * ndim, 2), *range(1, 2 * ndim, 2)]
    return np.pad(x, edges).reshape(parts).transpose(order).reshape(*parts[::2], math.prod(block))


def array_of(blocks: Array, block: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    ndim = len(shape)
    parts = blocks.reshape(*blocks.shape[:-1], *block)
    order = [axis for i in range(ndim) for axis in (i, ndim + i)]
    whole = parts.transpose(order).reshape(
        [n * b for n, b in zip(blocks.shape, block, strict=False)]
    )
    return whole[tuple(map(slice, shape))]


def quantized(x: Array, kind: str, block: tuple[int, ...], e8m0: bool) -> tuple[Array, Array]:
    """Values and scales by their definition, with float32's operations and ml_dtypes' casts."""
    dtype = np.dtype(getattr(ml_dtypes, kind, kind))
    x = blocks_of(x.astype(_F32), block)
    top = _F32(_INTEGERS.get(kind) or ml_dtypes.finfo(dtype).max)
    finite = np.isfinite(x)
    largest = np.max(abs(x), axis=-1, initial=0, where=finite)
    scales = np.maximum(largest / top, _F32(2.0**-126))
    if e8m0:
        wide = largest.astype(np.float64)
        power = np.frexp(wide)[1] - np.frexp(np.float64(top))[1]
        scales = np.ldexp(1.0, np.where(wide > 0, np.maximum(power, -127), -127))
        numbers = np.clip(x / scales[..., None], -top, top).astype(_F32)
    else:
        numbers = np.clip(x * (_F32(1) / scales)[..., None], -top, top)
    if kind in (*_INTEGERS, "float4_e2m1fn"):
        fine = np.asarray(finite.all(-1))
        scales = np.where(fine, scales, np.nan)
        numbers = np.where(fine[..., None], numbers, 0)
        values = (np.rint(numbers) if kind in _INTEGERS else numbers).astype(dtype)
    else:
        numbers = np.where(finite, numbers, np.where(np.isnan(x), np.nan, x))
        if kind == "float8_e4m3fn":
            numbers = np.where(finite, numbers, _F32(np.nan))
        values = np.where(np.isnan(numbers), _F32(np.nan), numbers).astype(dtype)
    return values, scales.astype(ml_dtypes.float8_e8m0fnu if e8m0 else _F32)


def quantize(rng: Rng, path: str) -> Case:
    kind = one_of(rng, ("float8_e4m3fn", "float8_e5m2", "int8", *_PACKED))
    packed = kind in _PACKED
    transposed, e8m0 = (rng.random(2) < (0.5, 0.3)).tolist()
    e8m0 &= kind not in _INTEGERS
    widths = draws.SMALL_WIDTHS if path == "interpret" else draws.WIDTHS
    shape = tuple(one_of(rng, widths) for _ in range(2))
    if packed:
        shape = tuple(size + size % 2 for size in shape)
    if rng.random() < 0.4:
        shape = (int(rng.integers(1, 5)), *shape)
    kernels = not (packed or e8m0)
    blocks: Any = ((1, None), (1, 32), (1, 128)) if not transposed else ((None, 1), (128, 128))
    if path == "xla" or not kernels:
        blocks = (*blocks, (None, None), (7, 1), (3, 50), (32, 1))
    block = (1,) * (len(shape) - 2) + one_of(rng, blocks)
    sizes = tuple(b or s for b, s in zip(block, shape, strict=True))
    dtype = np.dtype(one_of(rng, ("float32", "bfloat16", "float16")))
    how = "how" if kernels else "'xla'"
    scale = "scale_dtype='float8_e8m0fnu', " * e8m0
    call = f"moe.quantize(x, '{kind}', block={block}, transposed={transposed}, {scale}"
    call += f"implementation={how})"

    def draw(rng: Rng) -> Arrays:
        value_kind = one_of(rng, draws.KINDS)
        x = draws.values(rng, shape, dtype, value_kind)
        if rng.random() < 0.3:
            draws.plant(rng, x, slice(None))
        return {"x": x}

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        values, scales = quantized(arrays["x"], kind, sizes, e8m0)
        values = array_of(values, sizes, shape)
        if transposed:
            values, scales = values.swapaxes(-1, -2), scales.swapaxes(-1, -2)
        if packed:
            codes = np.ascontiguousarray(values).view(np.uint8) & 15
            values = codes[..., ::2] + 16 * codes[..., 1::2]
        return {"values": Numbers(values), "scales": scales}

    return Case("quantize", path, call, ("values", "scales"), draw, expect)


def quantized_outer(rng: Rng, path: str) -> Case:
    """A gradient of weights in 8 bits."""
    num_rows, left, right, num_groups = sizes_of(rng, path)
    dtype = np.dtype(one_of(rng, ("float32", "bfloat16", "bfloat16")))
    kinds = [one_of(rng, ("float8_e4m3fn", "float8_e5m2")) for _ in range(2)]
    return outer_of(path, (num_rows, left, right, num_groups), dtype, kinds)


def outer_of(
    path: str,
    sizes: tuple[int, int, int, int],
    dtype: np.dtype[Any],
    kinds: list[str],
    given: tuple[tuple[int, ...], ...] = (),
) -> Case:
    """Of rows, both sides' columns and groups; `given` are sizes of all groups."""
    num_rows, left, right, num_groups = sizes
    call = (
        f"quantized_outer(left, right, sizes, dtypes={tuple(kinds)}, result_dtype='{dtype}', "
        "fast_sums=False, implementation=how)"
    )

    def draw(rng: Rng) -> Arrays:
        value_kind = one_of(rng, ("normal", "normal", "zeros", "rows"))
        arrays = {
            "left": draws.values(rng, (num_rows, left), dtype, value_kind),
            "right": draws.values(rng, (num_rows, right), dtype),
            "sizes": draws.group_sizes(rng, num_groups, num_rows),
        }
        if given:
            arrays["sizes"] = np.array(one_of(rng, given), np.int32)
        arrays["left"][:, rng.integers(left)] = 0
        return arrays

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        out = zeros(num_groups, left, right)
        for group, span in enumerate(spans(arrays["sizes"], num_rows)):
            count = span.stop - span.start
            if count > 0:
                sides = []
                for name, kind in zip(("left", "right"), kinds, strict=True):
                    part = arrays[name][span]
                    values, scales = quantized(part, kind, (count, 1), False)
                    numbers = array_of(values, (count, 1), part.shape).astype(np.float64) * scales
                    sides.append(Near(numbers, abs(numbers) * 2.0**-23))
                u = sum_unit(path, ml_dtypes.float8_e5m2)
                put(out, group, matmul(sides[0].T, sides[1], u, 128))
        return {"out": rounded(out, dtype)}

    names = {"quantized_outer": outer_in_8_bits}
    return Case("quantized_outer", path, call, ("out",), draw, expect, names=names)


OPS = (quantize, quantized_outer)
