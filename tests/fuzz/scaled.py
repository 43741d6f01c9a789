"""ragged_dot of numbers of 8 and 4 bits, with scales and without."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from tests.fuzz.products import dot, group_sum, sizes_of, swapped, with_bias
from tests.moe import draws
from tests.moe.bounds import Array, Near, Some, exact, rounded, sum_unit
from tests.moe.case import Arrays, Case
from tests.moe.draws import Rng, one_of
from tests.moe.plans.case import spans

_BF16 = np.dtype(ml_dtypes.bfloat16)
_EIGHT = ("float8_e4m3fn", "float8_e5m2")
_PACKED = ("int4", "float4_e2m1fn")
_SCALES = {"int8": ("float32",), "int4": ("float32", "bfloat16", "float16", "float8_e8m0fnu")}
_SCALES |= {"float4_e2m1fn": (*_SCALES["int4"], *("float8_e4m3fn",) * 3)}
_SCALES |= dict.fromkeys(_EIGHT, ("float32",) * 4 + ("float8_e8m0fnu",))


def small_numbers(rng: Rng, shape: tuple[int, ...], kind: str) -> Array:
    """Numbers of a small dtype; two to a byte of those of 4 bits."""
    if kind in _PACKED:
        return rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), np.uint8)
    if kind == "int8":
        return rng.integers(-128, 128, shape, np.int8)
    numbers: Array = rng.standard_normal(shape, np.float32) * np.exp2(rng.integers(-4, 5))
    return np.asarray(numbers.astype(getattr(ml_dtypes, kind)))


def numbers_of(values: Array, kind: str) -> Array:
    if kind not in _PACKED:
        return values.astype(np.float64)
    codes = np.stack([values & 15, values >> 4], -1).reshape(*values.shape[:-1], -1)
    if kind == "int4":
        return np.where(codes < 8, codes, codes - 16.0)
    sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    return np.concatenate([sizes, -sizes])[codes]


def spread(scales: Array, shape: tuple[int, ...], block: tuple[int, ...]) -> Array:
    for axis, (size, of) in enumerate(zip(shape, block, strict=True)):
        scales = np.take(scales, np.arange(size) // of, axis)
    return scales.astype(np.float64)


def scaled(rng: Rng, path: str) -> Case:
    """A `ScaledArray` of weights, and rows that are one too, or floats, with their gradient."""
    num_rows, depth, columns, num_groups = sizes_of(rng, path)
    kind = one_of(rng, (*_EIGHT, "int8", *_PACKED))
    tiled = kind != "float8_e5m2" and rng.random() < 0.3
    if kind in _PACKED or tiled:
        of = 64 if tiled else 2
        depth, columns = depth + -depth % of, columns + -columns % of
    both = not (kind in _PACKED or tiled) and rng.random() < 0.5
    both &= kind != "int8" or path == "xla"  # kernels do not multiply integers
    row_kind = None if not both else kind if kind == "int8" else str(one_of(rng, _EIGHT))
    transposed, blocked, biased = (rng.random(3) < (0.75, 0.4, 0.25)).tolist()
    deep = 32 if blocked and depth >= 32 else depth
    scale_dtype = one_of(rng, _SCALES[kind])
    if scale_dtype == "float8_e4m3fn" and depth >= 16:
        deep = 16
    floats: tuple[str, ...] = ("bfloat16", "bfloat16", "float16", "float32")
    if tiled and kind not in _PACKED:  # float16 is refused with scales of blocks
        floats = ("bfloat16", "float32")
    return scaled_of(
        path,
        (num_rows, depth, columns, num_groups),
        kind,
        row_kind=row_kind,
        dtype=np.dtype(one_of(rng, floats)),
        block=(deep, one_of(rng, (1, columns) if deep == depth else (1, 16, columns))),
        row_block=32 if deep == 32 and rng.random() < 0.5 else depth,
        transposed=transposed,
        with_zeros=bool(kind == "int4" and rng.random() < 0.5),
        scale_dtype=scale_dtype,
        with_global_scales=scale_dtype == "float8_e4m3fn" and bool(rng.random() < 0.8),
        biased=biased and row_kind != "int8",  # which takes none
        wide_result=bool(rng.random() < 0.2),
        tiled=bool(tiled),
    )


def scaled_of(
    path: str,
    sizes: tuple[int, int, int, int],
    kind: str,
    *,
    row_kind: str | None,
    dtype: Any = _BF16,
    block: tuple[int, int] | None = None,
    row_block: int | None = None,
    transposed: bool = True,
    with_zeros: bool = False,
    scale_dtype: Any = np.float32,
    with_global_scales: bool = False,
    biased: bool = False,
    wide_result: bool = False,
    tiled: bool = False,
    given: tuple[tuple[int, ...], ...] = (),
) -> Case:
    """Weights of a kind, with scales for each block of depth and columns; `dtype` is of rows that
    have no kind."""
    num_rows, depth, columns, num_groups = sizes
    packed, both = kind in _PACKED, row_kind is not None
    deep, wide = block or (depth, 1)
    row_block = row_block or depth
    stored = (num_groups, columns, depth) if transposed else (num_groups, depth, columns)
    blocks = (1, wide, deep) if transposed else (1, deep, wide)
    array = f"moe.ScaledArray(weights, scales, {(1, deep, wide)}, transposed={transposed}"
    array += f", packed={kind!r}" * packed + ", zeros=zeros" * with_zeros
    array += ", global_scales=global_scales" * with_global_scales + ")"
    array += ".tile()" * tiled
    rows = f"moe.ScaledArray(rows, row_scales, (1, {row_block}))" if both else "rows"
    end = "bias=bias, " * biased + "preferred_element_type=jnp.float32, " * wide_result
    result = np.dtype("float32" if wide_result else "bfloat16" if both else dtype)
    call = f"moe.ragged_dot({rows}, {array}, sizes, {end}implementation=how)"
    gradients = () if both else ("rows", *["bias"] * biased)

    def draw(rng: Rng) -> Arrays:
        counts = tuple(-(-s // b) for s, b in zip(stored, blocks, strict=True))
        arrays = {
            "weights": small_numbers(rng, stored, kind),
            "scales": np.exp(rng.standard_normal(counts, np.float32)).astype(scale_dtype),
            "sizes": draws.group_sizes(rng, num_groups, num_rows),
        }
        if given:
            arrays["sizes"] = np.array(one_of(rng, given), np.int32)
        if with_zeros:
            arrays["zeros"] = rng.integers(-8, 8, counts, np.int8)
        if with_global_scales:
            of_all = *counts[:-1], 1
            arrays["global_scales"] = np.exp(rng.standard_normal(of_all)).astype(np.float32)
        if biased:
            arrays["bias"] = draws.values(rng, (num_groups, columns), np.float32)
        if row_kind is not None:
            of_rows = (num_rows, -(-depth // row_block))
            arrays["rows"] = small_numbers(rng, (num_rows, depth), row_kind)
            arrays["row_scales"] = np.exp(rng.standard_normal(of_rows)).astype(np.float32)
            return arrays
        arrays["rows"] = draws.values(rng, (num_rows, depth), dtype)
        arrays["g_out"] = draws.values(rng, (num_rows, columns), result)
        inside = np.zeros(num_rows, bool)
        for span in spans(arrays["sizes"], num_rows):
            inside[span] = True
        arrays["rows"][~inside] = np.nan
        arrays["g_out"][~inside] = np.nan
        if rng.random() < 0.2:
            draws.plant(rng, arrays["rows"], slice(None))
        return arrays

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        groups = spans(arrays["sizes"], num_rows)
        numbers = numbers_of(arrays["weights"], kind)
        if with_zeros:
            numbers = numbers - spread(arrays["zeros"], stored, blocks)
        numbers = numbers * spread(arrays["scales"], stored, blocks)
        if with_global_scales:
            of_all = (*blocks[:-1], stored[-1])
            numbers = numbers * spread(arrays["global_scales"], stored, of_all)
        # Scales multiply the numbers or the sums, in float32. 4 bits may be rounded after that,
        # and so may blocks in 8 bits.
        weights = Near(numbers, abs(numbers) * 2.0**-23)
        if packed or (deep < depth and not both):
            weights = rounded(weights, dtype)
        left = exact(arrays["rows"])
        if both:
            values = left.value * spread(arrays["row_scales"], left.value.shape, (1, row_block))
            left = Near(values, abs(values) * 2.0**-23)
        weights = swapped(weights) if transposed else weights
        out = dot(left, weights, groups, sum_unit(path, arrays["rows"].dtype), 128)
        out = with_bias(out, arrays.get("bias"), None, groups)
        wanted: dict[str, Any] = {"out": rounded(out, result)}
        if both:
            return wanted
        if kind == "float8_e4m3fn":  # an infinity in a row may become NaN
            wanted["out"] = Some(wanted["out"], ~np.isinf(out.value))
        gradient = exact(arrays["g_out"].astype(dtype))
        # For this gradient weights are dequantized in the rows' dtype.
        back = dot(gradient, swapped(rounded(weights, dtype)), groups, sum_unit(path, dtype))
        wanted["d_rows"] = rounded(back, dtype)
        if biased:
            wanted["d_bias"] = rounded(group_sum(gradient, None, groups), np.float32)
        return wanted

    of = f"ragged_dot of {kind}" + (" and 8 bits" if both else "")
    return Case(of, path, call, ("out",), draw, expect, gradients)


def of_small_floats(rng: Rng, path: str) -> Case:
    """Arrays of 8 bits without scales; integers are exact, and multiplied by plain JAX alone."""
    num_rows, depth, columns, num_groups = sizes_of(rng, path)
    kinds = [one_of(rng, _EIGHT), one_of(rng, _EIGHT)]
    if path == "xla" and rng.random() < 0.3:
        kinds = ["int8", "int8"]
    result = np.dtype("int32" if kinds[0] == "int8" else one_of(rng, ("float32", "bfloat16")))
    transposed = bool(rng.random() < 0.5)
    shape = (num_groups, columns, depth) if transposed else (num_groups, depth, columns)
    call = (
        f"moe.ragged_dot(rows, weights, sizes, transpose_weights={transposed}, "
        f"preferred_element_type=jnp.{result}, implementation=how)"
    )

    def draw(rng: Rng) -> Arrays:
        return {
            "rows": small_numbers(rng, (num_rows, depth), kinds[0]),
            "weights": small_numbers(rng, shape, kinds[1]),
            "sizes": draws.group_sizes(rng, num_groups, num_rows),
        }

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        weights = exact(arrays["weights"])
        weights = swapped(weights) if transposed else weights
        u = sum_unit(path, arrays["rows"].dtype)
        groups = spans(arrays["sizes"], num_rows)
        out = dot(exact(arrays["rows"]), weights, groups, u, 128)
        return {"out": out.value.astype(np.int32) if result == np.int32 else rounded(out, result)}

    return Case("ragged_dot of 8 bits", path, call, ("out",), draw, expect)


OPS = (scaled, of_small_floats)
