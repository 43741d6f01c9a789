"""Weights' gradients in 8 bits: calls, hostile inputs, and what results must be."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import ml_dtypes
import numpy as np

from tests.moe import draws
from tests.moe.bounds import U32, Array, Near, matmul, rounded, sum_unit
from tests.moe.case import Arrays, Case
from tests.moe.draws import Rng, one_of
from tests.moe.products.case import (
    EIGHT_BITS,
    EXPERTS,
    Grouped,
    Shape,
    draw_shape,
    interpreted_as,
    put,
    zeros,
)
from tests.moe.quantization.case import array_of, quantized
from triax.moe.products.quantized_outer_ops import outer_in_8_bits


def side_of(rows: Array, kind: str) -> Near:
    """What rows of a group stand for in 8 bits."""
    values, scales = quantized(rows, kind, (len(rows), 1), False)
    numbers = array_of(values, (len(rows), 1), rows.shape).astype(np.float64) * scales
    return Near(numbers, abs(numbers) * 2.0**-23)


def products(
    left: Array,
    right: Array,
    kinds: Any,
    groups: list[slice],
    u: float = U32,
    terms: int | None = None,
) -> Near:
    """The sums of left × right over the rows of each group, both rounded to 8 bits."""
    out = zeros(len(groups), left.shape[1], right.shape[1])
    for group, span in enumerate(groups):
        if span.stop > span.start:
            x, y = (side_of(of[span], kind) for of, kind in zip((left, right), kinds, strict=True))
            put(out, group, matmul(x.T, y, u, terms))
    return out


def quantized_outer(
    path: str,
    shape: Shape,
    kinds: tuple[str, str] = EIGHT_BITS,
    *,
    dtype: Any = "float32",
    result: str = "",
    fast_sums: bool = False,
    named: tuple[int, ...] = (0, 0),
    tma: bool = True,
    given: tuple[tuple[int, ...], ...] = (),
) -> Case:
    """Of rows, both sides' columns and groups. A side that has `named` rows has so many, of which
    each of the groups' rows names one."""
    num_rows, *widths, num_groups = shape
    of, result = Grouped(num_rows, 0, num_groups, given=given), result or str(dtype)
    sources = "".join(
        f"{f'{n}_source' if count else None}, " for n, count in zip("xy", named, strict=True)
    )
    call = (
        f"quantized_outer(x, y, sizes, sources=({sources}), dtypes={kinds}, "
        f"result_dtype='{result}', fast_sums={fast_sums}, implementation=how)"
    )

    def draw(rng: Rng) -> Arrays:
        arrays, value_kind = of.draw(rng), one_of(rng, ("normal", "normal", "zeros", "rows"))
        for name, width, count in zip("xy", widths, named, strict=True):
            side = draws.values(rng, (count or num_rows, width), dtype, value_kind)
            if count:
                arrays[f"{name}_source"] = rng.integers(-2, count + 3, num_rows, np.int32)
            elif width:
                side[:, rng.integers(width)] = 0
            arrays[name], value_kind = side, "normal"
        of.poison(arrays, tuple(n for n, count in zip("xy", named, strict=True) if not count), ())
        if rng.random() < 0.3:
            draws.plant(rng, arrays["x"], slice(None))
        return arrays

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        sides = []
        for name, count in zip("xy", named, strict=True):
            side = arrays[name]
            if count:
                row = arrays[f"{name}_source"]
                known = (row >= 0) & (row < count)
                side = np.where(known[:, None], side[np.clip(row, 0, count - 1)], 0)
            sides.append(side.astype(dtype))
        u, terms = sum_unit(path, ml_dtypes.float8_e5m2), None if fast_sums else 128
        out = products(sides[0], sides[1], kinds, of.spans(arrays), u, terms)
        return {"out": rounded(out, result)}

    names = {"quantized_outer": outer_in_8_bits}
    case = Case("quantized_outer", path, call, ("out",), draw, expect, names=names)
    case.within = contextlib.nullcontext if tma else interpreted_as(tensor_maps=False)
    case.widest = "float32"
    return case


def draw_quantized_outer(rng: Rng, path: str) -> Case:
    kinds = one_of(rng, EIGHT_BITS), one_of(rng, EIGHT_BITS)
    named = tuple(int(rng.integers(1, 60)) if rng.random() < 0.2 else 0 for _ in range(2))
    return quantized_outer(
        path,
        draw_shape(rng, path),
        kinds,
        dtype=one_of(rng, ("float32", "bfloat16", "bfloat16")),
        fast_sums=bool(rng.random() < 0.3),
        named=named,
    )


RANDOM = (draw_quantized_outer,)


def _outer(*shape: int, **settings: Any) -> functools.partial[Case]:
    """Of rows, both sides' columns and groups."""
    return functools.partial(quantized_outer, shape=shape, **settings)


_SIZES = {
    "uneven": (0, 1, 150, 100),
    "whole tiles": (128, 0, 0, 128),
    "one": (0, 0, 300, 0),
    "only empty": (0, 0, 0, 0),
    "too many": (100, 50, 2**31 - 1, 2**31 - 1),
    "negative": (-7, 160, -(2**31), 33),
}
_CASES = {
    **{
        f"{sizes} groups": _outer(
            *(300, 70, 80, 4),
            given=(given,),
            kinds=(EIGHT_BITS[i % 2], EIGHT_BITS[i // 2 % 2]),
            dtype=("bfloat16", "float32", "float16")[i % 3],
            result="float32",
            fast_sums=i % 2 == 0,
        )
        for i, (sizes, given) in enumerate(_SIZES.items())
    },
    "no TMA": _outer(300, 64, 48, 4, given=(_SIZES["uneven"],), tma=False),
    "one of each": _outer(1, 1, 1, 1),
    "several tiles": _outer(40, 300, 257, 3, dtype="bfloat16"),
    "many groups": _outer(9, 16, 24, 260),
    "left rows that are named": _outer(150, 40, 24, 3, named=(47, 0)),
    "rows that are named": _outer(150, 40, 24, 3, named=(47, 30), dtype="bfloat16"),
    "no rows": _outer(0, 4, 3, 2, given=((1, 1),)),
    "no groups": _outer(5, 4, 3, 0, given=((),)),
    "no left": _outer(5, 0, 3, 2),
    "no right": _outer(5, 4, 0, 2),
}
NAMED: dict[str, functools.partial[Case]] = {
    "quantized_outer": _outer(30, 16, 24, 3),
    **{f"quantized_outer, {name}": case for name, case in _CASES.items()},
}
LARGE: dict[str, functools.partial[Case]] = {
    f"quantized_outer, {sizes} groups, fast: {fast}, {kind}": _outer(
        *(num_rows, 1072, 656, 8),
        kinds=(EIGHT_BITS[0], kind),
        dtype="bfloat16",
        result="float32",
        fast_sums=fast,
        named=(500 * (kind == EIGHT_BITS[1]), 0),
        given=(given,),
    )
    for sizes, (num_rows, given) in EXPERTS.items()
    for fast in (True, False)
    for kind in EIGHT_BITS
}
