"""ragged_dot of arrays and its gradients: calls, hostile inputs, and what results must be."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np

from tests.moe import draws
from tests.moe.bounds import Array, Near, exact, matmul, rounded, sum_unit
from tests.moe.case import Arrays, Case, ModelSizes, Sized
from tests.moe.draws import Rng, one_of
from tests.moe.plans.case import spans
from triax.moe.shared import target

FLOATS = ("float32", "bfloat16", "bfloat16", "float16")
EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2")
PACKED = ("int4", "float4_e2m1fn")
Shape = tuple[int, ...]  # rows, depth, columns and groups


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


def with_bias(out: Near, bias: Any, row_weights: Near | None, groups: list[slice]) -> Near:
    """Rows and the biases of their groups, times their weights."""
    for group, span in enumerate(groups if bias is not None else ()):
        if span.stop > span.start:
            one = exact(bias[group])
            added = one if row_weights is None else row_weights[span, None] * one
            put(out, span, out[span] + added)
    return out


def swapped(weights: Near) -> Near:
    error = weights.error.swapaxes(1, 2) if weights.error.ndim else weights.error
    return Near(weights.value.swapaxes(1, 2), error)


def small_numbers(rng: Rng, shape: tuple[int, ...], kind: str) -> Array:
    """Numbers of a small dtype; two to a byte of those of 4 bits."""
    if kind in PACKED:
        return rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), np.uint8)
    if kind == "int8":
        return rng.integers(-128, 128, shape, np.int8)
    dtype = np.dtype(getattr(ml_dtypes, kind))
    if kind == "float8_e4m3fn" and rng.random() < 0.5:  # all that are finite
        found = rng.integers(0, 256, shape, np.uint8).view(dtype)
        return np.asarray(np.where(np.isfinite(found.astype(np.float32)), found, dtype.type(1)))
    numbers: Array = rng.standard_normal(shape, np.float32) * np.exp2(rng.integers(-4, 5))
    return np.asarray(numbers.astype(dtype))


def interpreted_as(**gpu: Any) -> Callable[[], Any]:
    """A context in which the interpreter's GPU has other properties."""
    other = dataclasses.replace(target.INTERPRETER, **gpu)
    return functools.partial(mock.patch.object, target, "INTERPRETER", other)


@dataclasses.dataclass(frozen=True)
class Grouped:
    """The groups of rows, and their biases, of a product.

    Attributes:
      rows, columns, count: of the result, and of groups that have weights.
      bias: the dtype of a bias, or "" for none; `weighted`: whether rows have weights for it.
      others: the number of groups without weights, if any may have none.
      given: sizes of all groups to choose from, which else are drawn.
    """

    rows: int
    columns: int
    count: int
    bias: Any = ""
    weighted: bool = False
    others: int | None = None
    given: tuple[tuple[int, ...], ...] = ()

    @property
    def source(self) -> str:
        found = "sizes, " + "bias=bias, " * bool(self.bias)
        found += "bias_weights=bias_weights, " * self.weighted
        return found + "group_offset=group_offset, " * (self.others is not None)

    @property
    def gradients(self) -> tuple[str, ...]:
        return ("bias",) * bool(self.bias) + ("bias_weights",) * self.weighted

    def draw(self, rng: Rng) -> Arrays:
        num_sizes = self.count + (self.others or 0)
        given = one_of(rng, self.given) if self.given else None
        drawn = draws.group_sizes(rng, num_sizes, self.rows) if given is None else given
        arrays = {"sizes": np.array(drawn, np.int64).astype(np.int32)}
        if self.bias:
            arrays["bias"] = draws.values(rng, (self.count, self.columns), self.bias)
        if self.weighted:
            arrays["bias_weights"] = draws.values(rng, (self.rows,), np.float32)
        if self.others is not None:
            first = int(rng.integers(num_sizes + 1))
            wild = one_of(rng, (-1, -self.count, -(2**31), num_sizes - 1, 2**31 - 1))
            arrays["group_offset"] = np.array(wild if rng.random() < 0.2 else first, np.int32)
        return arrays

    def spans(self, arrays: Arrays) -> list[slice]:
        """The rows of each group that has weights."""
        return spans(arrays["sizes"], self.rows, int(arrays.get("group_offset", 0)), self.count)

    def poison(self, arrays: Arrays, rows: tuple[str, ...], groups: tuple[str, ...]) -> None:
        """NaN where no result may come from: in rows of no group, and in groups without rows."""
        inside = np.zeros(self.rows, bool)
        for span in self.spans(arrays):
            inside[span] = True
        empty = [g for g, span in enumerate(self.spans(arrays)) if span.stop <= span.start]
        for name in (*rows, *["bias_weights"] * self.weighted):
            arrays[name][~inside] = np.nan
        for name in (*groups, *["bias"] * bool(self.bias)):
            arrays[name][empty] = np.nan

    def biased(self, out: Near, arrays: Arrays) -> Near:
        by_row = exact(arrays["bias_weights"]) if self.weighted else None
        return with_bias(out, arrays.get("bias"), by_row, self.spans(arrays))

    def bias_gradients(self, arrays: Arrays, dtype: Any, u: float) -> dict[str, Any]:
        """Of a gradient that is rounded to a dtype."""
        wanted: dict[str, Any] = {}
        groups, gradient = self.spans(arrays), exact(arrays["g_out"].astype(dtype))
        if self.bias:
            by_row = exact(arrays["bias_weights"]) if self.weighted else None
            wanted["d_bias"] = rounded(group_sum(gradient, by_row, groups), self.bias)
        if self.weighted:
            bias = exact(arrays["bias"])[:, :, None]
            # XLA may leave a gradient that no kernel reads as it came, or round it first.
            either = rounded(exact(arrays["g_out"]), dtype)
            wanted["d_bias_weights"] = dot(either, bias, groups, u)[:, 0]
        return wanted


def ragged_dot(
    path: str,
    shape: Shape,
    dtype: Any = "float32",
    *,
    transposed: bool = False,
    result: Any = "",
    precision: str = "",
    by: tuple[str, ...] = (),
    tma: bool = True,
    **grouped: Any,
) -> Case:
    """`by` are the arrays to differentiate by, all by default; `grouped` is as in `Grouped`."""
    num_rows, depth, columns, num_groups = shape
    of = Grouped(num_rows, columns, num_groups, **grouped)
    dtype, result = np.dtype(dtype), np.dtype(result or dtype)
    call = f"moe.ragged_dot(rows, weights, {of.source}" + "transpose_weights=True, " * transposed
    call += f"precision={precision!r}, " * bool(precision)
    call += f"preferred_element_type=jnp.{result}, " * (result != dtype) + "implementation=how)"
    stored = (num_groups, columns, depth) if transposed else (num_groups, depth, columns)
    u = sum_unit(path, dtype)
    by = by or ("rows", "weights", *of.gradients)

    def draw(rng: Rng) -> Arrays:
        kind = one_of(rng, draws.KINDS)
        arrays = {
            "rows": draws.values(rng, (num_rows, depth), dtype, kind),
            "weights": draws.values(rng, stored, dtype, one_of(rng, (kind, "normal"))),
            "g_out": draws.values(rng, (num_rows, columns), result),
        }
        arrays |= of.draw(rng)
        of.poison(arrays, ("rows", "g_out"), ("weights",))
        if kind == "normal" and num_groups and rng.random() < 0.5:  # which stays in its group
            group = int(rng.integers(num_groups))
            name = one_of(rng, ("rows", "weights", "g_out"))
            draws.plant(rng, arrays[name], group if name == "weights" else of.spans(arrays)[group])
        return arrays

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        groups, gradient = of.spans(arrays), exact(arrays["g_out"].astype(dtype))
        rows, weights = exact(arrays["rows"]), exact(arrays["weights"])
        weights = swapped(weights) if transposed else weights
        wanted = {"out": rounded(of.biased(dot(rows, weights, groups, u), arrays), result)}
        wanted |= of.bias_gradients(arrays, dtype, u)
        wanted["d_rows"] = rounded(dot(gradient, swapped(weights), groups, u), dtype)
        d_weights = rounded(outer(rows, gradient, groups, u), dtype)
        wanted["d_weights"] = swapped(d_weights) if transposed else d_weights
        return {name: of for name, of in wanted.items() if name == "out" or name[2:] in by}

    case = Case("ragged_dot", path, call, ("out",), draw, expect, by)
    case.widest = "float32"
    case.within = contextlib.nullcontext if tma else interpreted_as(tensor_maps=False)
    case.kernels = ("ragged_dot", "ragged_dot_transposed", "group_outer")
    case.kernels += ("group_sum",) * bool(of.bias) + ("ragged_dot_schedule",) * 3
    return case


def small_floats(
    path: str, shape: Shape, kinds: tuple[str, str], result: str, transposed: bool = False
) -> Case:
    """Arrays of 8 bits without scales; integers are exact, and multiplied by plain JAX alone."""
    num_rows, depth, columns, num_groups = shape
    of = Grouped(num_rows, columns, num_groups)
    stored = (num_groups, columns, depth) if transposed else (num_groups, depth, columns)
    call = (
        f"moe.ragged_dot(rows, weights, sizes, transpose_weights={transposed}, "
        f"preferred_element_type=jnp.{result}, implementation=how)"
    )

    def draw(rng: Rng) -> Arrays:
        arrays = {
            "rows": small_numbers(rng, (num_rows, depth), kinds[0]),
            "weights": small_numbers(rng, stored, kinds[1]),
        }
        return arrays | of.draw(rng)

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        weights = exact(arrays["weights"])
        weights = swapped(weights) if transposed else weights
        u = sum_unit(path, arrays["rows"].dtype)
        out = dot(exact(arrays["rows"]), weights, of.spans(arrays), u, 128)
        return {"out": out.value.astype(np.int32) if result == "int32" else rounded(out, result)}

    return Case("ragged_dot of 8 bits", path, call, ("out",), draw, expect)


def draw_shape(rng: Rng, path: str) -> Shape:
    if path == "interpret":
        depth, columns = one_of(rng, draws.SMALL_WIDTHS), one_of(rng, draws.SMALL_WIDTHS)
        return int(rng.integers(1, 70)), depth, columns, int(rng.integers(1, 5))
    most = one_of(rng, (4, 40, 150, 300))
    depth, columns = one_of(rng, draws.WIDTHS), one_of(rng, draws.WIDTHS)
    return int(rng.integers(1, most + 1)), depth, columns, int(rng.integers(1, 9))


def draw_ragged_dot(rng: Rng, path: str) -> Case:
    shape, dtype = draw_shape(rng, path), one_of(rng, FLOATS)
    transposed, biased, weighted, offset = (rng.random(4) < (0.5, 0.4, 0.5, 0.2)).tolist()
    return ragged_dot(
        path,
        shape,
        dtype,
        transposed=transposed,
        bias=dtype if biased else "",
        weighted=biased and weighted,
        others=int(rng.integers(0, 4)) if offset else None,
        result="float32" if rng.random() < 0.2 else "",
    )


def draw_small_floats(rng: Rng, path: str) -> Case:
    kinds = one_of(rng, EIGHT_BITS), one_of(rng, EIGHT_BITS)
    if path == "xla" and rng.random() < 0.3:
        kinds = "int8", "int8"
    result = "int32" if kinds[0] == "int8" else one_of(rng, ("float32", "bfloat16"))
    return small_floats(path, draw_shape(rng, path), kinds, result, bool(rng.random() < 0.5))


RANDOM = (draw_ragged_dot, draw_small_floats)


def _dot(*shape: int, **settings: Any) -> functools.partial[Case]:
    """Of rows, depth, columns and groups."""
    return functools.partial(ragged_dot, shape=shape, **settings)


def _small(*shape: int, **settings: Any) -> functools.partial[Case]:
    return functools.partial(small_floats, shape=shape, **settings)


_BIASED: dict[str, Any] = {"bias": "float32", "weighted": True}
_SIZES = {
    "even": (30,) * 4,
    "uneven": (0, 1, 64, 40),  # 64 are whole tiles
    "one": (0, 0, 120, 0),
    "only empty": (0, 0, 0, 0),
    "too many": (100, 50, 2**31 - 1, 2**31 - 1),
    "negative": (-7, 60, -(2**31), 33),
}
# Whether descriptors can address the arrays: rows of multiples of 16 bytes.
_WIDTHS = {"descriptors": (64, 48), "pointers": (33, 21)}
_SOME: dict[str, Any] = {"given": ((20, 0, 37, 30, -4, 9),), "others": 4, **_BIASED}
_EMPTY: dict[str, Any] = {"given": ((2, 0, 1),), **_BIASED}
_HALF = "bfloat16"
_CASES = {
    **{
        f"{sizes} groups, {widths}": _dot(
            *(125, *_WIDTHS[widths], 4),
            dtype=("float32", _HALF, "float16")[(i + j) % 3],
            given=(given,),
        )
        for i, (sizes, given) in enumerate(_SIZES.items())
        for j, widths in enumerate(_WIDTHS)
    },
    "some groups": _dot(124, 64, 48, 2, dtype=_HALF, **_SOME),
    "some groups, pointers": _dot(124, 33, 21, 2, **_SOME),
    "one of each": _dot(1, 16, 16, 1, dtype=_HALF),
    "several tiles": _dot(300, 16, 264, 2, dtype=_HALF, given=((9, 285),)),
    "many groups": _dot(9, 16, 16, 260, dtype=_HALF),
    "no width": _dot(40, 1, 1, 5, dtype=_HALF),
    "deep": _dot(20, 130, 24, 1, dtype=_HALF),
    "transposed": _dot(90, 16, 24, 4, transposed=True),
    "transposed, pointers": _dot(60, 33, 21, 3, dtype="float16", transposed=True),
    "no TMA": _dot(60, 64, 48, 3, dtype=_HALF, tma=False, **_BIASED),
    "in float32": _dot(60, 64, 48, 4, dtype=_HALF, result="float32"),
    "a precision that is not float16's": _dot(
        5, 64, 7, 1, dtype="float16", result="float32", precision="BF16_BF16_F32"
    ),
    "no rows": _dot(0, 4, 8, 3, **_EMPTY),
    "no depth": _dot(5, 0, 8, 3, **_EMPTY),
    "no columns": _dot(5, 4, 0, 3, **_EMPTY),
    "no groups": _dot(5, 4, 3, 0, given=((),), bias="float32"),
    "a bias without weights": _dot(40, 16, 24, 3, bias=_HALF),
    **{
        f"biases alone, {sizes}": _dot(2600, 0, 70, 2, given=(sizes,), **_BIASED)
        for sizes in ((901, 1697), (0, 2591), (2101, 0))  # that no number of parts divides
    },
    **{
        f"biases in bfloat16, by {' and '.join(by)}": _dot(
            2200, 1, 24, 1, dtype=_HALF, given=((2101,),), bias=_HALF, weighted=True, by=by
        )
        for by in (("bias", "bias_weights"), ("bias",), ("bias_weights",))
    },
    "float8_e4m3fn by float8_e5m2": _small(50, 64, 40, 3, kinds=EIGHT_BITS, result="float32"),
    "float8_e5m2 by float8_e4m3fn": _small(
        50, 33, 40, 3, kinds=EIGHT_BITS[::-1], result=_HALF, transposed=True
    ),
}
NAMED: dict[str, functools.partial[Case]] = {
    "ragged_dot": _dot(30, 16, 16, 3, **_BIASED),
    **{f"ragged_dot, {name}": case for name, case in _CASES.items()},
}


def _sized(**settings: Any) -> Sized:
    def made(path: Any, of: ModelSizes) -> Case:
        shape = (of.rows, of.hidden, of.width, of.experts)
        return ragged_dot(path, shape, of.dtype, **settings)

    return made


SIZED: dict[str, Sized] = {
    "ragged_dot": _sized(),
    "ragged_dot, transposed": _sized(transposed=True),
    "ragged_dot, a bias": _sized(**_BIASED),
    "ragged_dot, float32": _sized(result="float32"),
}
# Sizes of groups for a GPU, and their rows.
EXPERTS: dict[str, tuple[int, tuple[int, ...]]] = {
    "even": (3072, (384,) * 8),
    "uneven": (3072, (0, 1, 700, 63, 64, 65, 1500, 300)),
    "few": (100, (3, 0, 20, 17, 33, 1, 0, 9)),
    "one": (3072, (0, 0, 0, 3072, 0, 0, 0, 0)),
    "wrong": (3072, (-5, 900, 2**31 - 1, 40, -(2**31), 7, 0, 2**31 - 1)),
}
_SOME_LARGE: dict[str, Any] = {"given": ((300, 500, 77, 0, 900, 400),), "others": 3, **_BIASED}
LARGE: dict[str, functools.partial[Case]] = {
    **{
        f"ragged_dot, {depth} by {columns}, {sizes} groups, {dtype}": _dot(
            num_rows, depth, columns, 8, dtype=dtype, given=(given,)
        )
        for depth, columns in ((256, 512), (200, 328), (130, 67))
        for sizes, (num_rows, given) in EXPERTS.items()
        for dtype in ("float32", _HALF, *["float16"] * (depth == 200))
    },
    **{
        f"ragged_dot, {n} rows": _dot(n, 512, 384, 8, dtype=_HALF, given=((n // 8,) * 7 + (n,),))
        for n in (1, 40, 250, 500)
    },
    **{
        f"ragged_dot, some groups, {depth} by {columns}, transposed: {transposed}": _dot(
            3072, depth, columns, 3, dtype=_HALF, transposed=transposed, **_SOME_LARGE
        )
        for depth, columns in ((256, 512), (130, 67))
        for transposed in (False, True)
    },
    # In blocks of 64 by 256 columns, partial ones, and of many groups.
    **{
        f"ragged_dot, a gradient of {left} by {right}": _dot(
            3072, left, right, groups, dtype=_HALF, by=("weights",)
        )
        for left, right, groups in (
            *((72, 136, 8), (136, 264, 8), (8, 248, 8), (136, 1032, 40), (2048, 1536, 4)),
        )
    },
}
