"""ragged_dot and its gradients: arrays of every float, and numbers of 8 and 4 bits with scales."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from tests.fuzz import draws
from tests.fuzz.bounds import Array, Near, exact, matmul, rounded, sum_unit
from tests.fuzz.draws import Rng, one_of
from tests.fuzz.program import Arrays, Program

FLOATS = ("float32", "bfloat16", "bfloat16", "float16")
_BF16 = np.dtype(ml_dtypes.bfloat16)
_EIGHT = ("float8_e4m3fn", "float8_e5m2")
_PACKED = ("int4", "float4_e2m1fn")


def spans(sizes: Array, num_rows: int, offset: int = 0, count: int | None = None) -> list[slice]:
    """The rows of each group: negative sizes are empty, and groups end at the last row."""
    ends = np.minimum(np.cumsum(np.clip(sizes.astype(np.int64), 0, num_rows)), num_rows)
    starts = np.concatenate([[0], ends[:-1]])
    which = range(offset, offset + (len(sizes) if count is None else count))
    there_are = range(len(sizes))
    return [slice(starts[g], ends[g]) if g in there_are else slice(0, 0) for g in which]


def zeros(*shape: int) -> Near:
    return Near(np.zeros(shape), np.zeros(shape))


def put(into: Near, at: Any, part: Near) -> None:
    into.value[at], into.error[at] = part.value, part.error


def dot(rows: Near, weights: Near, groups: list[slice], u: float, terms: int | None = None) -> Near:
    """Each row times the weights of its group; exact zeros elsewhere."""
    out = zeros(len(rows.value), weights.value.shape[2])
    for group, span in enumerate(groups):
        if span.stop > span.start:
            put(out, span, matmul(rows[span], weights[group], u, terms))
    return out


def outer(left: Near, right: Near, groups: list[slice], u: float) -> Near:
    """For each group the sum over its rows of left × right."""
    out = zeros(len(groups), left.value.shape[1], right.value.shape[1])
    for group, span in enumerate(groups):
        if span.stop > span.start:
            put(out, group, matmul(left[span].T, right[span], u))
    return out


def group_sum(rows: Near, row_weights: Near | None, groups: list[slice]) -> Near:
    """Each group's weighted sum of its rows."""
    ones = exact(np.ones(len(rows.value))) if row_weights is None else row_weights
    return outer(Near(ones.value[:, None], ones.error), rows, groups, 2.0**-24)[:, 0]


def swapped(weights: Near) -> Near:
    error = weights.error.swapaxes(1, 2) if weights.error.ndim else weights.error
    return Near(weights.value.swapaxes(1, 2), error)


def sizes_of(rng: Rng, path: str) -> tuple[int, int, int, int]:
    """Rows, depth, columns and groups."""
    if path == "interpret":
        depth, columns = one_of(rng, draws.SMALL_WIDTHS), one_of(rng, draws.SMALL_WIDTHS)
        return int(rng.integers(1, 70)), depth, columns, int(rng.integers(1, 5))
    most = one_of(rng, (4, 40, 150, 300))
    depth, columns = one_of(rng, draws.WIDTHS), one_of(rng, draws.WIDTHS)
    return int(rng.integers(1, most + 1)), depth, columns, int(rng.integers(1, 9))


def plain(rng: Rng, path: str) -> Program:
    """Arrays, with all gradients."""
    shape = sizes_of(rng, path)
    dtype = np.dtype(one_of(rng, FLOATS))
    transposed, biased, weighted, offset = (rng.random(4) < (0.5, 0.4, 0.5, 0.2)).tolist()
    others = int(rng.integers(0, 4)) if offset else None
    result = np.dtype(np.float32) if rng.random() < 0.2 else dtype
    return dense(path, shape, dtype, transposed, biased, weighted and biased, others, result)


def dense(
    path: str,
    sizes: tuple[int, int, int, int],
    dtype: np.dtype[Any],
    transposed: bool = False,
    biased: bool = False,
    weighted: bool = False,
    others: int | None = None,
    result: Any = None,
    given: tuple[int, ...] | None = None,
) -> Program:
    """Of rows, depth, columns and groups; `others` are groups that there are no weights for, and
    `given` the sizes of all groups, which else are drawn."""
    num_rows, depth, columns, num_groups = sizes
    offset, num_sizes = others is not None, num_groups + (others or 0)
    result = result or dtype
    options = {
        "bias=bias, ": biased,
        "bias_weights=bias_weights, ": weighted,
        "group_offset=group_offset, ": offset,
        "transpose_weights=True, ": transposed,
        "preferred_element_type=jnp.float32, ": result != dtype,
    }
    call = f"moe.ragged_dot(rows, weights, sizes, {''.join(o for o, on in options.items() if on)}"
    names = ("rows", "weights", *["bias"] * bool(biased), *["bias_weights"] * bool(weighted))
    shape = (num_groups, columns, depth) if transposed else (num_groups, depth, columns)
    u = sum_unit(path, dtype)

    def draw(rng: Rng) -> Arrays:
        kind = one_of(rng, draws.KINDS)
        arrays = {
            "rows": draws.values(rng, (num_rows, depth), dtype, kind),
            "weights": draws.values(rng, shape, dtype, one_of(rng, (kind, "normal"))),
            "sizes": draws.group_sizes(rng, num_sizes, num_rows),
            "g_out": draws.values(rng, (num_rows, columns), result),
        }
        if given is not None:
            arrays["sizes"] = np.array(given, np.int32)
        if biased:
            arrays["bias"] = draws.values(rng, (num_groups, columns), dtype)
        if weighted:
            arrays["bias_weights"] = draws.values(rng, (num_rows,), np.float32)
        if offset:
            arrays["group_offset"] = np.int32(rng.integers(0, num_sizes - num_groups + 1))
        poison(rng, arrays, groups_of(arrays), kind == "normal")
        return arrays

    def groups_of(arrays: Arrays) -> list[slice]:
        return spans(arrays["sizes"], num_rows, int(arrays.get("group_offset", 0)), num_groups)

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        groups = groups_of(arrays)
        rows, weights = exact(arrays["rows"]), exact(arrays["weights"])
        weights = swapped(weights) if transposed else weights
        out = dot(rows, weights, groups, u)
        gradient = exact(arrays["g_out"].astype(dtype))
        wanted: dict[str, Any] = {}
        if biased:
            bias, of_rows = (
                exact(arrays["bias"]),
                exact(arrays.get("bias_weights", np.ones(num_rows))),
            )
            for group, span in enumerate(groups):
                if span.stop > span.start:
                    added = bias[group] if not weighted else of_rows[span, None] * bias[group]
                    put(out, span, out[span] + added)
            summed = group_sum(gradient, of_rows if weighted else None, groups)
            wanted["d_bias"] = rounded(summed, arrays["bias"].dtype)
            if weighted:
                wanted["d_bias_weights"] = dot(gradient, bias[:, :, None], groups, u)[:, 0]
        d_weights = rounded(outer(rows, gradient, groups, u), dtype)
        return wanted | {
            "out": rounded(out, result),
            "d_rows": rounded(dot(gradient, swapped(weights), groups, u), dtype),
            "d_weights": swapped(d_weights) if transposed else d_weights,
        }

    return Program("ragged_dot", path, f"{call}implementation=how)", ("out",), draw, expect, names)


def poison(rng: Rng, arrays: Arrays, groups: list[slice], special: bool) -> None:
    """NaNs where no result may come from: rows outside of groups, empty groups' weights. And
    sometimes one in a group, which stays in it."""
    inside = np.zeros(len(arrays["rows"]), bool)
    for span in groups:
        inside[span] = True
    for name in ("rows", "g_out", "bias_weights"):
        if name in arrays and rng.random() < 0.5:
            arrays[name][~inside] = np.nan
    empty = [g for g, span in enumerate(groups) if span.stop <= span.start]
    for name in ("weights", "bias"):
        if name in arrays and rng.random() < 0.5:
            arrays[name][empty] = np.nan
    if special and rng.random() < 0.3:
        group = int(rng.integers(len(groups)))
        if rng.random() < 0.5:
            draws.plant(rng, arrays["rows"], groups[group])
        else:
            draws.plant(rng, arrays["weights"], group)


# --- numbers of 8 and 4 bits --------------------------------------------------------------------


def small_numbers(rng: Rng, shape: tuple[int, ...], kind: str) -> Array:
    """Numbers of a small dtype; two to a byte of those of 4 bits."""
    if kind in _PACKED:
        return rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), np.uint8)
    if kind == "int8":
        return rng.integers(-128, 128, shape, np.int8)
    numbers = rng.standard_normal(shape, np.float32) * np.exp2(rng.integers(-4, 5))
    return numbers.astype(np.dtype(getattr(ml_dtypes, kind)))


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


def scaled(rng: Rng, path: str) -> Program:
    """A `ScaledArray` of weights, and rows that are one too, or floats, with their gradient."""
    num_rows, depth, columns, num_groups = sizes_of(rng, path)
    kind = one_of(rng, (*_EIGHT, "int8", *_PACKED))
    if kind in _PACKED:
        depth, columns = depth + depth % 2, columns + columns % 2
    both = kind not in _PACKED and rng.random() < 0.5
    both &= kind != "int8" or path == "xla"  # kernels do not multiply integers
    row_kind = None if not both else kind if kind == "int8" else str(one_of(rng, _EIGHT))
    transposed, blocked, biased = (rng.random(3) < (0.75, 0.4, 0.25)).tolist()
    deep = 32 if blocked and depth >= 32 else depth
    return scaled_of(
        path,
        (num_rows, depth, columns, num_groups),
        kind,
        row_kind=row_kind,
        dtype=np.dtype(one_of(rng, ("bfloat16", "bfloat16", "float16", "float32"))),
        block=(deep, one_of(rng, (1, columns) if deep == depth else (1, 16, columns))),
        row_block=32 if deep == 32 and rng.random() < 0.5 else depth,
        transposed=transposed,
        with_zeros=bool(kind == "int4" and rng.random() < 0.5),
        e8m0="float8" in kind and bool(rng.random() < 0.2),
        biased=biased and row_kind != "int8",  # which takes none
        wide_result=bool(rng.random() < 0.2),
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
    e8m0: bool = False,
    biased: bool = False,
    wide_result: bool = False,
    given: tuple[int, ...] | None = None,
) -> Program:
    """Weights of a kind, with scales for each block of depth and columns; `dtype` is of rows that
    have no kind."""
    num_rows, depth, columns, num_groups = sizes
    packed, both = kind in _PACKED, row_kind is not None
    deep, wide = block or (depth, 1)
    row_block = row_block or depth
    stored = (num_groups, columns, depth) if transposed else (num_groups, depth, columns)
    blocks = (1, wide, deep) if transposed else (1, deep, wide)
    array = f"moe.ScaledArray(weights, scales, {blocks}, transposed={transposed}"
    array += f", packed={kind!r}" * packed + ", zeros=zeros" * with_zeros + ")"
    rows = f"moe.ScaledArray(rows, row_scales, (1, {row_block}))" if both else "rows"
    end = "bias=bias, " * biased + "preferred_element_type=jnp.float32, " * wide_result
    result = np.dtype("float32" if wide_result else "bfloat16" if both else dtype)
    call = f"moe.ragged_dot({rows}, {array}, sizes, {end}implementation=how)"
    gradients = () if both else ("rows", *["bias"] * biased)

    def draw(rng: Rng) -> Arrays:
        counts = tuple(-(-s // b) for s, b in zip(stored, blocks, strict=True))
        scales = np.exp(rng.standard_normal(counts)).astype(np.float32)
        if e8m0:
            scales = scales.astype(ml_dtypes.float8_e8m0fnu)
        arrays = {
            "weights": small_numbers(rng, stored, kind),
            "scales": scales,
            "sizes": draws.group_sizes(rng, num_groups, num_rows),
        }
        if given is not None:
            arrays["sizes"] = np.array(given, np.int32)
        if with_zeros:
            arrays["zeros"] = rng.integers(-8, 8, counts, np.int8)
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
        return arrays

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        groups = spans(arrays["sizes"], num_rows)
        numbers = numbers_of(arrays["weights"], kind)
        if with_zeros:
            numbers = numbers - spread(arrays["zeros"], stored, blocks)
        numbers = numbers * spread(arrays["scales"], stored, blocks)
        # Scales multiply the numbers or the sums, in float32; 4 bits may be rounded after that.
        weights = Near(numbers, abs(numbers) * 2.0**-23)
        if packed:
            weights = rounded(weights, dtype)
        left = exact(arrays["rows"])
        if both:
            values = left.value * spread(arrays["row_scales"], left.value.shape, (1, row_block))
            left = Near(values, abs(values) * 2.0**-23)
        weights = swapped(weights) if transposed else weights
        out = dot(left, weights, groups, sum_unit(path, arrays["rows"].dtype), 128)
        if biased:
            for group, span in enumerate(groups):
                if span.stop > span.start:
                    put(out, span, out[span] + exact(arrays["bias"][group]))
        if both:
            return {"out": rounded(out, result)}
        gradient = exact(arrays["g_out"].astype(dtype))
        # For this gradient weights are dequantized in the rows' dtype.
        back = dot(gradient, swapped(rounded(weights, dtype)), groups, sum_unit(path, dtype))
        wanted = {"out": rounded(out, result), "d_rows": rounded(back, dtype)}
        if biased:
            wanted["d_bias"] = rounded(group_sum(gradient, None, groups), np.float32)
        return wanted

    of = f"ragged_dot of {kind}" + (" and 8 bits" if both else "")
    return Program(of, path, call, ("out",), draw, expect, gradients)


def of_small_floats(rng: Rng, path: str) -> Program:
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

    return Program("ragged_dot of 8 bits", path, call, ("out",), draw, expect)


OPS = (plain, scaled, of_small_floats)
