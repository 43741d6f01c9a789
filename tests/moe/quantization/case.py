"""quantize and what its result stands for: calls, hostile numbers, and the exact values and scales.

All of it has float32's operations, each rounded once: results are wanted bit for bit.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import ml_dtypes
import numpy as np

from tests.moe import draws
from tests.moe.bounds import TINY, Array, Numbers
from tests.moe.case import Arrays, Case, Sized
from tests.moe.draws import Rng, one_of
from tests.moe.permutation.case import FLOATS

_INTEGERS = {"int8": 127, "int4": 7}
EIGHT = ("float8_e4m3fn", "float8_e5m2", "int8")
PACKED = ("int4", "float4_e2m1fn")
E8M0 = "float8_e8m0fnu"
_F32 = np.float32
_NAN = np.array(0x7FC12345, np.uint32).view(_F32)  # with a payload
_SPECIAL = np.array(
    [_NAN, -np.nan, np.inf, -np.inf, 3.4028235e38, 0.0, -0.0, 1e-40, -1e-45, 6e-8], _F32
)
KINDS = (*draws.KINDS, "special", "special", "middles")


def dtype_of(kind: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, kind, kind))


def top_of(kind: str) -> Any:
    """The largest number."""
    return _F32(_INTEGERS.get(kind) or ml_dtypes.finfo(dtype_of(kind)).max)


def blocks_of(x: Array, block: tuple[int, ...]) -> Array:
    """The numbers of each block in the last dimension; zeros where one is partial."""
    edges = [(0, -s % b) for s, b in zip(x.shape, block, strict=True)]
    parts = [n for s, b in zip(x.shape, block, strict=True) for n in (-(-s // b), b)]
    ndim = x.ndim
    order = [*range(0, 2 * ndim, 2), *range(1, 2 * ndim, 2)]
    x = np.pad(x, edges) if edges else x
    return x.reshape(parts).transpose(order).reshape(*parts[::2], math.prod(block))


def array_of(blocks: Array, block: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    ndim = len(shape)
    parts = blocks.reshape((*blocks.shape[:-1], *block))
    order = [axis for i in range(ndim) for axis in (i, ndim + i)]
    whole = parts.transpose(order).reshape(
        [n * b for n, b in zip(blocks.shape, block, strict=False)]
    )
    return whole[tuple(map(slice, shape))]


def quantized(x: Array, kind: str, block: tuple[int, ...], e8m0: bool) -> tuple[Array, Array]:
    """Values and scales by their definition, with float32's operations and ml_dtypes' casts."""
    dtype, top = dtype_of(kind), top_of(kind)
    x = blocks_of(x.astype(_F32), block)
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


def packed(values: Array) -> Array:
    """Numbers of 4 bits, two to a byte."""
    codes = np.ascontiguousarray(values).view(np.uint8) & 15
    return codes[..., ::2] + 16 * codes[..., 1::2]


def special(rng: Rng, shape: tuple[int, ...]) -> Array:
    """What is not finite, zeros of both signs and subnormals, alone in a row or among others."""
    x = draws.values(rng, shape, _F32, "rows" if shape else "normal")
    at = np.asarray(rng.random(shape) < 0.02)
    x[at] = rng.choice(_SPECIAL, int(at.sum()))
    if x.ndim > 1:
        for row in (_F32(-3e-41), _F32(0)):
            x[rng.integers(len(x) + 2) :][:1] = row
    return x


def middles(rng: Rng, shape: tuple[int, ...], block: tuple[int, ...], kind: str) -> Array:
    """Quotients next to the middle of two values: a last bit that is wrong rounds them to another.

    Each block has the largest number, which makes its scale.
    """
    codes = np.arange(1 << (4 if kind in PACKED else 8), dtype=np.uint8)
    codes = codes.astype(dtype_of(kind)) if kind in _INTEGERS else codes.view(dtype_of(kind))
    numbers = np.unique(abs(codes.astype(_F32)))
    numbers = numbers[numbers <= top_of(kind)]
    choices = (numbers[1:] + numbers[:-1]) / 2
    counts = [-(-s // b) for s, b in zip(shape, block, strict=True)]
    powers = np.exp2(rng.integers(-120, 90, (*counts, 1)))
    scales = (rng.uniform(1, 2, (*counts, 1)) * powers).astype(_F32)
    x = (rng.choice(choices, (*counts, math.prod(block))) * scales).astype(_F32)
    x = np.nextafter(x, np.where(rng.random(x.shape) < 0.5, _F32(0), _F32(np.inf))) * rng.choice(
        [-1, 1], x.shape
    )
    x[..., 0] = (top_of(kind) * scales)[..., 0]
    return array_of(x.astype(_F32), block, shape)


def quantize(
    path: str,
    shape: tuple[int, ...],
    block: tuple[int | None, ...],
    transposed: bool = False,
    to: str = "float8_e4m3fn",
    dtype: Any = "float32",
    e8m0: bool = False,
    kind: str = "",
    has_kernels: bool = True,
) -> Case:
    """`has_kernels` is whether there are any for these blocks. `kind` is one of `KINDS`, by default
    any. The result is turned back, too."""
    dtype = np.dtype(dtype)
    is_packed = to in PACKED
    sizes = tuple(max(s, 1) if b is None else b for b, s in zip(block, shape, strict=True))
    scale = "scale_dtype='float8_e8m0fnu', " * e8m0
    call = f"moe.quantize(x, {to!r}, block={block}, transposed={transposed}, {scale}"
    call = f"both({call}implementation={'how' if has_kernels else None}))"
    both = lambda scaled: (scaled.values, scaled.scales, scaled.dequantize())

    def draw(rng: Rng) -> Arrays:
        of = kind or one_of(rng, KINDS)
        if not math.prod(shape):
            return {"x": np.zeros(shape, dtype)}
        with np.errstate(over="ignore"):
            if of == "special":
                return {"x": special(rng, shape).astype(dtype)}
            if of == "middles":
                return {"x": middles(rng, shape, sizes, to).astype(dtype)}
            x = draws.values(rng, shape, dtype, of if shape else "normal")
        if rng.random() < 0.3 and not kind:
            draws.plant(rng, x, ...)
        return {"x": x}

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        values, scales = quantized(arrays["x"], to, sizes, e8m0)
        # Products of float32, which platforms may take for zeros where they are subnormal.
        wide = values.astype(_F32) * scales.astype(_F32)[..., None]
        back, values = (array_of(of, sizes, shape) for of in (wide, values))
        flushed = (back != 0) & (abs(back) < TINY) & (found["back"] == 0)
        back = np.where(flushed, found["back"], back)
        if transposed:
            values, scales = values.swapaxes(-1, -2), scales.swapaxes(-1, -2)
        values = packed(values) if is_packed else values
        return {"values": values, "scales": scales, "back": Numbers(back)}

    results = ("values", "scales", "back")
    case = Case("quantize", path, call, results, draw, expect, names={"both": both})
    case.kernels = ("quantize_rows",) * has_kernels
    return case


def draw_quantize(rng: Rng, path: str) -> Case:
    to = one_of(rng, (*EIGHT, *PACKED))
    transposed, e8m0 = (rng.random(2) < (0.5, 0.3)).tolist()
    e8m0 &= to not in _INTEGERS
    widths = draws.SMALL_WIDTHS if path == "interpret" else draws.WIDTHS
    shape = tuple(one_of(rng, widths) for _ in range(2))
    if to in PACKED:
        shape = tuple(size + size % 2 for size in shape)
    if rng.random() < 0.4:
        shape = (int(rng.integers(1, 5)), *shape)
    kernels = not (to in PACKED or e8m0)
    blocks: Any = ((1, None), (1, 32), (1, 128)) if not transposed else ((None, 1), (128, 128))
    if path == "xla" or not kernels:
        blocks = (*blocks, (None, None), (7, 1), (3, 50), (32, 1))
    block = (1,) * (len(shape) - 2) + one_of(rng, blocks)
    dtype = one_of(rng, ("float32", "bfloat16", "float16"))
    return quantize(path, shape, block, transposed, to, dtype, e8m0, has_kernels=kernels)


RANDOM = (draw_quantize,)


def _blocks(shape: Any, block: Any, transposed: Any = False, **options: Any) -> Any:
    how = {"shape": shape, "block": block, "transposed": transposed}
    return functools.partial(quantize, **how, **options)


_KERNELS: dict[str, tuple[Any, ...]] = {
    "rows": ((33, 21), (1, None)),
    "rows that are read twice": ((2, 3, 1500), (1, 1, None)),
    "rows that several warps read twice": ((3, 9000), (1, None)),
    "parts of rows": ((130, 256), (1, 16)),
    "parts, the last one partial": ((5, 300), (1, 128)),
    "tiles": ((130, 200), (128, 128)),
    "tiles, transposed": ((2, 130, 300), (1, 128, 128), True),
    "columns": ((2, 300, 70), (1, None, 1), True),
    "columns, odd": ((33, 21), (None, 1), True),
}
_PLAIN: dict[str, tuple[Any, ...]] = {
    "odd blocks": ((7, 30), (2, 7)),
    "odd blocks, transposed": ((6, 10, 4), (2, None, 3), True),
    "a block beyond the array": ((40,), (64,)),
    "blocks of one": ((9, 5), (1, 1)),
    "no dimensions": ((), ()),
    "blocks of columns": ((2, 70, 12), (1, 32, 1), True),
}
_SMALL: dict[str, tuple[Any, ...]] = {
    "blocks of columns": _PLAIN["blocks of columns"],
    "rows and columns": ((3, 6, 100), (1, 4, 32)),
    "blocks that end within bytes": ((5, 30), (2, 7)),
    "columns": ((6, 40), (None, 1), True),
}
_FORMATS = [(to, "") for to in PACKED] + [(to, E8M0) for to in (PACKED[1], *EIGHT[:2])]
NAMED: dict[str, functools.partial[Case]] = (
    {"quantize": _blocks((33, 40), (1, None), to="int8")}
    | {
        f"quantize, {name}, {to}": _blocks(
            *of, to=to, dtype=FLOATS[(i + j) % 3], kind=("special", "rows")[(i + j) % 2]
        )
        for i, (name, of) in enumerate(_KERNELS.items())
        for j, to in enumerate(EIGHT)
    }
    | {
        f"quantize, middles, {to}": _blocks((30, 90), (1, None), to=to, kind="middles")
        for to in EIGHT
    }
    | {
        f"quantize, nothing, {shape}": _blocks(shape, (1,) * (len(shape) - 1) + (None,))
        for shape in ((0, 5), (3, 0, 128), (0,))
    }
    | {
        f"quantize, {name}": _blocks(*of, to=EIGHT[i % 3], has_kernels=False)
        for i, (name, of) in enumerate(_PLAIN.items())
    }
    | {
        f"quantize, {name}, {to}{', ' * bool(scales)}{scales}": _blocks(
            *of,
            to=to,
            e8m0=bool(scales),
            dtype=FLOATS[j // 2],
            kind=("special", "middles", "")[i % 3],
            has_kernels=False,
        )
        for i, (to, scales) in enumerate(_FORMATS)
        for j, (name, of) in enumerate(_SMALL.items())
        if (i + j) % 2 == 0
    }
)
# Widths of models.
SIZED: dict[str, Sized] = {
    "quantize": lambda path, of: quantize(
        path, (of.rows, of.hidden), (1, None), dtype=of.dtype, kind="rows"
    ),
    "quantize, columns": lambda path, of: quantize(
        path, (of.experts, of.hidden, of.width), (1, None, 1), True, dtype=of.dtype, kind="rows"
    ),
}
LARGE: dict[str, functools.partial[Case]] = {
    f"quantize, {of[0]} in {of[1]}{' transposed' * (len(of) > 2)}, {to}": _blocks(
        *of, to=to, dtype=FLOATS[(i + j) % 3]
    )
    for i, of in enumerate(
        (
            ((1000, 7168), (1, None)),
            ((65, 16384), (1, None)),
            ((4099, 40), (1, None)),
            ((333, 2880), (1, 128)),
            ((1000, 2048), (1, 32)),
            ((3, 2880, 1440), (1, 128, 128)),
            ((3, 2880, 1440), (1, 128, 128), True),
            ((3, 2880, 1440), (1, None, 1), True),
            ((2, 7168, 512), (1, None, 1), True),
        )
    )
    for j, to in enumerate(EIGHT)
}
