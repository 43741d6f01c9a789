"""ragged_dot of a `ScaledArray`: calls, hostile inputs, and what results must be."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import numpy as np

from tests.moe import draws
from tests.moe.bounds import Array, Near, Some, exact, rounded, sum_unit
from tests.moe.case import Arrays, Case, ModelSizes, Sized
from tests.moe.draws import Rng, one_of
from tests.moe.products.case import (
    EIGHT_BITS,
    EXPERTS,
    PACKED,
    Grouped,
    Shape,
    dot,
    draw_shape,
    interpreted_as,
    small_numbers,
    swapped,
)

E8M0 = "float8_e8m0fnu"
FAST = "ANY_F8_ANY_F8_F32_FAST_ACCUM"
_SCALES = {"int8": ("float32",), "int4": ("float32", "bfloat16", "float16", E8M0)}
_SCALES |= {"float4_e2m1fn": (*_SCALES["int4"], *("float8_e4m3fn",) * 3)}
_SCALES |= dict.fromkeys(EIGHT_BITS, ("float32",) * 4 + (E8M0,))


def numbers_of(values: Array, kind: str | None) -> Array:
    """The numbers in values of a dtype, in float64; two of 4 bits are in a byte."""
    if kind not in PACKED:
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


class Weights:
    """Numbers of a small dtype with scales: how they are drawn, and passed.

    Attributes:
      kind: the dtype of numbers.
      block: the depth and the columns that share a scale; None for all.
      scales, zeros: their dtypes; "" for no zeros.
      has_global_scales: whether each column has another scale.
      tiles: whether, and into how many shards of depth and columns, they are tiled.
      turned: whether they are passed with the last two sizes swapped, as in torch.
    """

    def __init__(
        self,
        shape: Shape,
        kind: str,
        *,
        block: tuple[int | None, int | None] = (None, 1),
        scales: str = "float32",
        zeros: str = "",
        has_global_scales: bool = False,
        transposed: bool = True,
        tiles: tuple[int, int] | None = None,
        turned: bool = False,
    ) -> None:
        _, depth, columns, count = shape
        self.kind, self.scales, self.zeros = kind, scales, zeros
        self.has_global_scales = has_global_scales
        self.transposed, self.tiles, self.turned = transposed, tiles, turned
        self.deep, self.wide = block[0] or max(depth, 1), block[1] or max(columns, 1)
        swap = -1 if transposed else 1
        self.stored = (count, *(depth, columns)[::swap])
        self.blocks = (1, *(self.deep, self.wide)[::swap])

    @property
    def source(self) -> str:
        found = f"moe.ScaledArray(weights, scales, {(1, self.deep, self.wide)}, {self.transposed}"
        found += f", packed={self.kind!r}" * (self.kind in PACKED)
        found += ", zeros=zeros" * bool(self.zeros)
        found += ", global_scales=global_scales" * self.has_global_scales + ")"
        found += "" if self.tiles is None else f".tile({self.tiles})"
        return found + ".mT" * self.turned

    def draw(self, rng: Rng) -> Arrays:
        counts = tuple(-(-s // b) for s, b in zip(self.stored, self.blocks, strict=True))
        arrays = {
            "weights": small_numbers(rng, self.stored, self.kind),
            "scales": np.exp(rng.standard_normal(counts, np.float32)).astype(self.scales),
        }
        if self.zeros:  # the outermost, too
            arrays["zeros"] = rng.choice([-128, -5, 0, 3, 127], counts).astype(self.zeros)
        if self.has_global_scales:
            of_all = rng.standard_normal((*counts[:-1], 1), np.float32)
            arrays["global_scales"] = np.exp(of_all)
        return arrays

    def plant(self, rng: Rng, arrays: Arrays) -> None:
        """Puts a NaN into the numbers or scales."""
        name = "weights" if self.kind in EIGHT_BITS and rng.random() < 0.5 else "scales"
        array = arrays[name]
        if array.size:
            array[np.unravel_index(rng.integers(array.size), array.shape)] = np.nan

    def numbers(self, arrays: Arrays) -> Array:
        """What they stand for in float64, [groups, depth, columns]; scaled in float32."""
        found = numbers_of(arrays["weights"], self.kind)
        if self.zeros:
            found = found - spread(arrays["zeros"], self.stored, self.blocks)
        found = found * spread(arrays["scales"], self.stored, self.blocks)
        if self.has_global_scales:
            of_all = (*self.blocks[:-1], max(self.stored[-1], 1))
            found = found * spread(arrays["global_scales"], self.stored, of_all)
        return found.swapaxes(1, 2) if self.transposed else found


def scaled(
    path: str,
    shape: Shape,
    kind: str,
    *,
    dtype: Any = "bfloat16",
    row_kind: str = "",
    row_block: int | None = None,
    result: str = "",
    precision: str = "",
    once: bool = False,
    gpu: tuple[tuple[str, Any], ...] = (),
    bias: Any = "",
    weighted: bool = False,
    others: int | None = None,
    given: tuple[tuple[int, ...], ...] = (),
    **options: Any,
) -> Case:
    """Weights of a kind, times rows of a dtype, or which are a `ScaledArray` of `row_kind`.

    `once` is whether kernels round sums alone; else they may first round weights times scales, as
    plain JAX does. `options` are those of `Weights`, `gpu` what the interpreter's GPU has.
    """
    num_rows, depth, columns, num_groups = shape
    weights, both = Weights(shape, kind, **options), bool(row_kind)
    of = Grouped(num_rows, columns, num_groups, bias, weighted, others, given)
    row_block = row_block or max(depth, 1)
    out_type = np.dtype(result or ("bfloat16" if both else dtype))
    rows = f"moe.ScaledArray(rows, row_scales, (1, {row_block}))" if both else "rows"
    call = f"moe.ragged_dot({rows}, {weights.source}, {of.source}"
    call += "transpose_weights=True, " * weights.turned
    call += f"precision={precision!r}, " * bool(precision)
    call += f"preferred_element_type=jnp.{result}, " * bool(result) + "implementation=how)"
    is_rounded = kind in PACKED or (weights.deep < depth and not both)
    is_rounded &= path == "xla" or not once

    def draw(rng: Rng) -> Arrays:
        arrays = weights.draw(rng) | of.draw(rng)
        if both:
            of_rows = (num_rows, -(-depth // row_block))
            arrays["rows"] = small_numbers(rng, (num_rows, depth), row_kind)
            arrays["row_scales"] = np.exp(rng.standard_normal(of_rows)).astype(np.float32)
            of.poison(arrays, ("row_scales",), ("scales",))
        else:
            value_kind = one_of(rng, ("normal", "normal", "zeros", "rows"))
            arrays["rows"] = draws.values(rng, (num_rows, depth), dtype, value_kind)
            arrays["g_out"] = draws.values(rng, (num_rows, columns), out_type)
            of.poison(arrays, ("rows", "g_out"), ("scales",))
            if rng.random() < 0.2:
                draws.plant(rng, arrays["rows"], slice(None))
        if rng.random() < 0.3:
            weights.plant(rng, arrays)
        return arrays

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        groups, numbers = of.spans(arrays), weights.numbers(arrays)
        # Scales multiply numbers or sums, in float32.
        right, left = Near(numbers, abs(numbers) * 2.0**-23), exact(arrays["rows"])
        if is_rounded:
            right = rounded(right, dtype)
        if both:
            values = left.value * spread(arrays["row_scales"], left.value.shape, (1, row_block))
            left = Near(values, abs(values) * 2.0**-23)
        u = sum_unit(path, arrays["rows"].dtype)
        out = dot(left, right, groups, u, None if precision == FAST else 128)
        wanted: dict[str, Any] = {"out": rounded(of.biased(out, arrays), out_type)}
        if both:
            return wanted
        if kind == "float8_e4m3fn":  # an infinity in a row may become NaN
            wanted["out"] = Some(wanted["out"], ~np.isinf(out.value))
        gradient = exact(arrays["g_out"].astype(dtype))
        # For this gradient weights are dequantized in the rows' dtype.
        back = dot(gradient, swapped(rounded(right, dtype)), groups, u)
        return wanted | {"d_rows": rounded(back, dtype)} | of.bias_gradients(arrays, dtype, u)

    name = f"ragged_dot of {kind}" + (" and 8 bits" if both else "")
    case = Case(name, path, call, ("out",), draw, expect, () if both else ("rows", *of.gradients))
    case.widest = "float32"
    case.within = interpreted_as(**dict(gpu)) if gpu else contextlib.nullcontext
    return case


def draw_scaled(rng: Rng, path: str) -> Case:
    num_rows, depth, columns, num_groups = draw_shape(rng, path)
    kind = one_of(rng, (*EIGHT_BITS, "int8", *PACKED))
    tiled = kind != "float8_e5m2" and rng.random() < 0.3
    if kind in PACKED or tiled:
        of = 64 if tiled else 2
        depth, columns = depth + -depth % of, columns + -columns % of
    both = not (kind in PACKED or tiled) and rng.random() < 0.5
    both &= kind != "int8" or path == "xla"  # kernels do not multiply integers
    row_kind = "" if not both else kind if kind == "int8" else str(one_of(rng, EIGHT_BITS))
    transposed, blocked, biased, weighted = (rng.random(4) < (0.75, 0.4, 0.25, 0.3)).tolist()
    biased &= row_kind != "int8"  # which takes none
    deep, scales = 32 if blocked and depth >= 32 else depth, one_of(rng, _SCALES[kind])
    has_global_scales = scales == "float8_e4m3fn" and bool(rng.random() < 0.8)
    if scales == "float8_e4m3fn" and depth >= 16:
        deep = 16
    floats: tuple[str, ...] = ("bfloat16", "bfloat16", "float16", "float32")
    if tiled and kind not in PACKED:  # float16 is refused with scales of blocks
        floats = ("bfloat16", "float32")
    return scaled(
        path,
        (num_rows, depth, columns, num_groups),
        kind,
        row_kind=row_kind,
        dtype=one_of(rng, floats),
        block=(deep, one_of(rng, (1, columns) if deep == depth else (1, 16, columns))),
        row_block=32 if deep == 32 and rng.random() < 0.5 else depth,
        transposed=transposed,
        zeros="int8" if kind == "int4" and rng.random() < 0.5 else "",
        scales=scales,
        has_global_scales=has_global_scales,
        bias="float32" if biased else "",
        weighted=biased and weighted,
        others=int(rng.integers(0, 4)) if rng.random() < 0.2 else None,
        result="float32" if rng.random() < 0.2 else "",
        tiles=(1, 1) if tiled else None,
    )


RANDOM = (draw_scaled,)

E4M3, E5M2, INT4, E2M1 = *EIGHT_BITS, *PACKED


def _scaled(*shape: int, **settings: Any) -> functools.partial[Case]:
    """Of rows, depth, columns and groups."""
    return functools.partial(scaled, shape=shape, **settings)


def _way(kind: str, *block: int | None, **settings: Any) -> dict[str, Any]:
    return {"kind": kind, **({"block": block} if block else {}), **settings}


_NVFP4: dict[str, Any] = {"scales": E4M3, "has_global_scales": True}
_STORED: dict[str, Any] = {"transposed": False}
_FLOAT: dict[str, Any] = {"dtype": "float32"}
# Rows and weights in 8 bits.
_BOTH = {
    "rows and columns": _way(E4M3),
    "rows and columns, fast sums": _way(E4M3, precision=FAST),
    "more than the depth": _way(E5M2, 512, 1, row_block=512),
    "rows and groups": _way(E4M3, None, None, row_kind=E5M2, **_STORED),
    "blocks": _way(E4M3, 128, 128, row_block=128, bias="float32"),
    "blocks, depth not innermost": _way(E4M3, 128, 128, row_block=128, **_STORED),
    "small blocks": _way(E4M3, 32, 16, row_block=64),
    "powers of two": _way(E4M3, 32, 1, row_block=32, scales=E8M0),
    "blocks and columns": _way(E4M3, row_block=64),
    "rows and blocks": _way(E4M3, 64, 200, **_STORED),
}
# Weights alone, of 8 bits and of four.
_ALONE = {
    "e4m3, columns": _way(E4M3, bias="bfloat16", weighted=True),
    "e5m2, groups": _way(E5M2, None, None, **_FLOAT, **_STORED),
    "int8, columns innermost": _way("int8", bias="float32", **_STORED),
    "e4m3, blocks": _way(E4M3, 128, 128, **_FLOAT),
    "int8, blocks": _way("int8", 32, 1, **_STORED),
    "int8, 64": _way("int8", 64, 1),
    "e4m3, some groups": _way(E4M3, others=3, given=((5, 4, 9, 1, 8, 2, 3),)),
    "int8 as in torch": _way("int8", 64, 32, turned=True),
    "e4m3 as in torch, not transposed": _way(E4M3, turned=True, **_STORED),
    "mxfp4": _way(E2M1, 32, 1, scales=E8M0),
    "nvfp4": _way(E2M1, 16, 1, **_NVFP4),
    "e2m1": _way(E2M1, 64, 1, bias="float32", **_FLOAT),
    "int4, groups of 128": _way(INT4, 128, 1, zeros="int8"),
    "int4, groups of 32": _way(INT4, 32, 1, zeros="float32", **_FLOAT),
    "int4, columns": _way(INT4),
    "int4, experts": _way(INT4, None, None, **_STORED),
    "int4, columns innermost": _way(INT4, 100, 7, zeros="int8", **_STORED),
    "mxfp8": _way(E4M3, 32, 1, scales=E8M0, dtype="float16"),
    "int4, 16": _way(INT4, 16, 1),
    "e4m3, blocks of columns": _way(E4M3, None, 32),
}
# Weights in tiles.
TILED = {
    "e4m3, columns": _way(E4M3),
    "e4m3, groups": _way(E4M3, None, None),
    "e4m3, 128": _way(E4M3, 128, 128),
    "e4m3, 32": _way(E4M3, 32, 1),
    "e4m3, powers": _way(E4M3, 32, 1, scales=E8M0),
    "int8, columns": _way("int8"),
    "int8, 64": _way("int8", 64, 1),
    "int8, 32": _way("int8", 32, 1),
    "int8, powers": _way("int8", 32, 1, scales=E8M0),
    "mxfp4": _way(E2M1, 32, 1, scales=E8M0),
    "nvfp4": _way(E2M1, 16, 1, **_NVFP4),
    "nvfp4, 48": _way(E2M1, 48, 1, **_NVFP4),
    "e2m1, 64 by 32": _way(E2M1, 64, 32),
    "e2m1, powers of columns": _way(E2M1, scales=E8M0),
    "e2m1, 32": _way(E2M1, 32, 1),
    "int4, columns": _way(INT4, zeros="int8"),
    "int4, 32": _way(INT4, 32, 1, zeros="int8"),
    "int4, 32, no zeros": _way(INT4, 32, 1),
    "int4, 32 by 48": _way(INT4, 32, 48, zeros="int8"),
    "int4, 96": _way(INT4, 96, 1, zeros="int8"),
    "int4, 64": _way(INT4, 64, 1, zeros="int8"),
    "int4, 128": _way(INT4, 128, 1),
    "int4, 32, bfloat16": _way(INT4, 32, 1, scales="bfloat16", zeros="int8"),
    "int4, 64, float16": _way(INT4, 64, 1, scales="float16", zeros="int8"),
    "int4, columns, bfloat16": _way(INT4, scales="bfloat16"),
    "int4, powers": _way(INT4, 32, 1, scales=E8M0, zeros="int8"),
}
# Rows, depth, columns and groups for each of the kernels that take tiles; and sizes of groups.
_FEW: dict[str, tuple[Shape, tuple[int, ...]]] = {
    "very few": ((13, 832, 64, 4), (0, 6, 0, 5)),  # warps share a tile's depth
    "narrow": ((24, 192, 192, 5), (3, 0, 17, 1, 2)),
    "wide": ((96, 192, 64, 3), (65, 1, 20)),
    "wider": ((75, 192, 64, 1), (65,)),  # one more than a tile; no kernel for very few takes them
    "wrong": ((70, 192, 64, 4), (-5, 40, 2**31 - 1, 7)),
    "many": ((520, 128, 64, 2), (495, 20)),
    "uneven": ((40, 192, 160, 3), (20, 0, 9)),  # no whole tiles
    "broad": ((75, 128, 192, 1), (65,)),  # as "wider", and columns past a tile of 128
}
_BROAD = ("mxfp4", "nvfp4", "int4, 32", "int4, 32, no zeros", "int4, 64, float16", "int4, powers")
_BLACKWELL = (("compute_capability", 120),)  # whose tensor cores read registers


def _tiled(way: str, rows: str, **settings: Any) -> functools.partial[Case]:
    shape, given = _FEW[rows]
    given = settings.pop("given", given)
    more = {"tiles": (1, 1), "once": rows not in ("many", "uneven"), "given": (given,), **settings}
    return _scaled(*shape, **TILED[way], **more)


_CASES = {
    "weights in tiles": _scaled(30, 64, 64, 3, **_way(INT4, 32, 1), tiles=(1, 1), **_FLOAT),
    "8 bits": _scaled(30, 64, 16, 3, kind=E4M3, row_kind=E5M2),
    **{
        f"8 bits, {name}": _scaled(
            *(40, 272, 144, 4),  # blocks of 128 and 64 are partial
            **{"row_kind": E4M3, "result": "float32", "given": ((10, 0, 21, -3),), **settings},
        )
        for name, settings in _BOTH.items()
    },
    **{
        f"weights in {name}": _scaled(40, 272, 80, 4, **{"given": ((10, 0, 21, -3),), **settings})
        for name, settings in _ALONE.items()
    },
    **{
        f"nothing of {name}": _scaled(*shape, kind=kind, row_kind=row_kind)
        for name, shape, kind, row_kind in (
            ("the depth", (5, 0, 8, 3), E4M3, ""),
            ("the columns", (5, 4, 0, 3), E4M3, E4M3),
            ("the rows", (0, 4, 8, 3), INT4, ""),
        )
    },
    **{
        f"tiles of {way}, {rows}": _tiled(
            way,
            rows,
            gpu=_BLACKWELL * ((i // 2 if rows in ("wider", "broad") else i) % 2),
            bias="bfloat16",
            weighted=bool(i % 3),
            result="float32" * (i % 4 == 0),
        )
        for i, way in enumerate(TILED)
        for rows in dict.fromkeys(([*_FEW][i % 5], "broad" if way in _BROAD else "wider"))
    },
    "tiles of e4m3, columns, some groups": _tiled(
        "e4m3, columns", "very few", others=3, given=(0, 2, 0, 5, -3, 2**31 - 1, 4)
    ),
    "tiles of mxfp4, some groups": _tiled(
        "mxfp4", "wrong", others=3, given=(30, 10, 20, 5, 40, 0, 0)
    ),
    "tiles of e4m3, columns, wrong sizes": _tiled(
        "e4m3, columns", "very few", given=(-5, 2, -3, 2**31 - 1)
    ),
    **{
        f"tiles of {way}, many rows": _tiled(way, "many")
        for way in ("e4m3, columns", "e4m3, 128", "mxfp4", "nvfp4", "int4, 32")
    },
    **{
        f"tiles of {way}, shards of {shards}": _tiled(way, "uneven", tiles=shards, bias="float32")
        for way, shards in (
            *(("mxfp4", (2, 1)), ("int4, 32", (1, 5)), ("int4, columns", (2, 5))),
            *(("e4m3, groups", (2, 5)), ("nvfp4", (2, 1))),
        )
    },
    # Which are dequantized.
    **{
        f"tiles that few rows do not take, {i}": _scaled(40, 192, 64, 2, **way, tiles=(1, 1))
        for i, way in enumerate(
            (
                _way(INT4, 16, 1),
                _way(INT4, 64, 1, zeros="float32"),
                _way(E2M1, 48, 1, scales=E8M0),
                _way(E2M1, 8, 1, **_NVFP4),
                _way(E2M1, 16, 2, **_NVFP4),
                _way(E2M1, None, 1, **_NVFP4),
            )
        )
    },
    **{
        f"tiles of {kind} with columns innermost": _scaled(
            43, 64, 192, 3, kind=kind, tiles=(1, 1), once=True, given=((10, 20, 5),), **_STORED
        )
        for kind in ("int8", E4M3)
    },
}
NAMED: dict[str, functools.partial[Case]] = {
    "ragged_dot_scaled": _scaled(30, 16, 16, 3, **_way(E2M1, 8, 1), bias="float32", **_FLOAT),
    **{f"ragged_dot, {name}": case for name, case in _CASES.items()},
}

# Tiles that take other ways through the kernel for very few rows; the last rows are for the other.
QUICK = (
    *("e4m3, columns", "e4m3, 32", "mxfp4", "nvfp4", "e2m1, 64 by 32"),
    *("int8, columns", "int4, 32", "int4, 64", "int4, powers"),
)
SLOW = [
    n
    for n in NAMED
    if "tiles of" in n and not any(f"of {way}, " in n for way in QUICK)
    if not n.endswith(("wider", "broad"))
]


def _sized(kind: str, **settings: Any) -> Sized:
    def made(path: Any, of: ModelSizes) -> Case:
        deep = of.hidden + -of.hidden % 64 if "block" in settings else of.hidden
        wide = of.width + -of.width % 64 if settings.get("tiles") else of.width
        return scaled(path, (of.rows, deep, wide, of.experts), kind, dtype=of.dtype, **settings)

    return made


SIZED: dict[str, Sized] = {
    "ragged_dot, 8 bits": _sized(E4M3, row_kind=E4M3),
    "ragged_dot, 8-bit weights": _sized(E4M3),
    "ragged_dot, int4": _sized(INT4, block=(32, 1), zeros="int8"),
    "ragged_dot, MXFP4 in tiles": _sized(E2M1, block=(32, 1), scales=E8M0, tiles=(1, 1)),
    "ragged_dot, NVFP4 in tiles": _sized(E2M1, block=(16, 1), tiles=(1, 1), **_NVFP4),
}
_FEW_LARGE: dict[str, tuple[int, tuple[int, ...]]] = {
    "narrow": (40, (3, 0, 17, 1, 0, 9, 2, 2)),
    "wide": (330, (60, 0, 65, 64, 1, 130)),
    "wider": (600, (200, 0, 129, 255)),
    "many": (1000, (700, 300)),
    "wrong": (70, (-5, 40, 2**31 - 1, 7)),
}
LARGE: dict[str, functools.partial[Case]] = {
    **{
        f"ragged_dot, {name}, {sizes} groups": _scaled(
            num_rows, 1072, 656, 8, given=(given,), **settings
        )
        for sizes, (num_rows, given) in EXPERTS.items()
        for name, settings in {
            "8 bits, rows and columns": _way(E4M3, row_kind=E4M3, result="float32"),
            "8 bits, fast sums": _way(E4M3, row_kind=E5M2, result="float32", precision=FAST),
            "8 bits, blocks": _way(E4M3, 128, 128, row_kind=E4M3, row_block=128),
            "8 bits, blocks of e5m2": _way(E4M3, 128, 128, row_kind=E5M2, row_block=128),
            "weights in e4m3": _way(E4M3),
            "weights in int8, columns innermost": _way("int8", **_STORED),
            "weights in e5m2": _way(E5M2),
            "weights in int8, blocks": _way("int8", 128, 128),
        }.items()
    },
    **{
        f"ragged_dot, tiles of {way}, {rows}, 2880 by 704": _scaled(
            *(num_rows, 2880, 704, len(given)),
            **TILED[way],
            tiles=(1, 1),
            given=(given,),
            bias="bfloat16",
            once=rows != "many",
        )
        for i, way in enumerate(TILED)
        for rows, (num_rows, given) in [*_FEW_LARGE.items()][i % 2 :: 2]
    },
    # All numbers, whatever blocks the rows of a group take.
    **{
        f"ragged_dot, tiles of {kind}, {n} rows": _scaled(
            n, 256, 256, 8, kind=kind, tiles=(1, 1), result="float32", given=((n // 8,) * 8,)
        )
        for kind in (E4M3, "int8", INT4, E2M1)
        for n in (16, 256, 512, 2048, 32768)
    },
}
