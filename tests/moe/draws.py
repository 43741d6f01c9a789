"""Random group sizes, expert ids and values, most of them hard on kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.moe.bounds import Array

Rng = np.random.Generator

TILES = (16, 32, 64, 128)
WIDTHS = (8, 16, 24, 33, 40, 64, 72, 96, 100, 128, 136, 160, 200)
SMALL_WIDTHS = (8, 16, 17, 24, 32, 40, 64)


def one_of(rng: Rng, choices: Any) -> Any:
    return choices[rng.integers(len(choices))]


def shares(rng: Rng, count: int) -> Array:
    """How likely each of so many is: alike, skewed, one alone, or only some."""
    kind = rng.integers(4)
    if kind == 0:
        return np.full(count, 1 / count)
    if kind == 1:
        return rng.dirichlet(np.full(count, one_of(rng, (0.05, 0.3, 1.0))))
    some = rng.permutation(count)[: 1 if kind == 2 else max(1, count // 2)]
    found = np.zeros(count)
    found[some] = 1 / len(some)
    return found


def group_sizes(rng: Rng, count: int, num_rows: int) -> Array:
    """Sizes of groups, in sum below, at, or above the rows; some negative."""
    kind = rng.integers(8)
    sizes = rng.multinomial(num_rows, shares(rng, count))
    if kind == 0:
        sizes = sizes // 2
    elif kind == 1:  # whole tiles, one row more, one less
        sizes = one_of(rng, TILES) * rng.integers(0, 3, count) + rng.integers(-1, 2, count)
    elif kind == 2:
        sizes = rng.integers(0, 4, count)
    elif kind == 3:
        sizes[rng.random(count) < 0.3] = one_of(rng, (-1, -(2**31), 2**31 - 1, num_rows))
    elif kind == 4:
        sizes[...] = 0
        sizes[rng.integers(count)] = one_of(rng, (1, num_rows - 1, num_rows))
    return sizes.astype(np.int32)


def ids(
    rng: Rng,
    num_tokens: int,
    top_k: int,
    num_experts: int,
    dtype: Any = np.int32,
    kind: str | None = None,
) -> Array:
    """Expert ids; some experts have most or none, some ids are out of range or named twice.

    Of a kind, or of any: "distinct", "wild", "alike", "none" or "other".
    """
    shape = (num_tokens, top_k)
    found = rng.choice(num_experts, shape, p=shares(rng, num_experts))
    kind = kind or one_of(rng, ("distinct", "wild", "alike", "none", *["other"] * 3))
    if kind == "distinct" and top_k <= num_experts:  # no expert twice, as routers choose
        found = np.argsort(rng.random((num_tokens, num_experts)), axis=1)[:, :top_k]
    elif kind == "wild":
        info = np.iinfo(dtype)
        wild = [info.min, info.max, *[2**32, 1 - 2**32] * (info.bits > 32 and info.min < 0)]
        wild += [n for n in (-1, num_experts) if info.min <= n <= info.max]
        found = np.where(rng.random(shape) < 0.3, rng.choice(wild, shape), found)
    elif kind == "alike" and num_tokens:
        found[rng.random(num_tokens) < 0.5] = found[0]
    elif kind == "none":
        found[...] = np.iinfo(dtype).max
    return found.astype(dtype)


# Powers of two that values are multiplied by: products of three of the largest are finite.
_POWERS = {"huge": 40, "tiny": -60, "subnormal": -130}
_FLOAT16_POWERS = {"huge": 4, "tiny": -12, "subnormal": -18}
KINDS = ("normal",) * 4 + ("integers", "zeros", "huge", "tiny", "subnormal", "rows")


def values(rng: Rng, shape: Any, dtype: Any, kind: str = "normal") -> Array:
    """Finite numbers of a kind; "rows" are of very different sizes."""
    dtype = np.dtype(dtype)
    found = rng.standard_normal(shape, np.float32)
    if kind == "integers":
        found = np.rint(found * 2)
    elif kind == "zeros":
        found *= rng.random(shape) < 0.1
    elif kind == "rows":
        most = 3 if dtype == np.float16 else 20
        found *= np.exp2(rng.integers(-most, most + 1, (*shape[:-1], 1))).astype(np.float32)
    elif kind != "normal":
        powers = _FLOAT16_POWERS if dtype == np.float16 else _POWERS
        found = np.ldexp(found, powers[kind])
    return np.asarray(found.astype(dtype))


def rows_in_turn(rng: Rng, kinds: Any, shape: Any, dtype: Any) -> Array:
    """Rows of each kind in turn, the normal ones of different sizes."""
    found = np.empty(shape, np.dtype(dtype))
    for i, kind in enumerate(kinds):
        some = values(rng, found[i :: len(kinds)].shape, dtype, kind)
        scale = one_of(rng, (1, 3, 20)) if kind == "normal" else 1
        found[i :: len(kinds)] = some * np.asarray(scale, dtype)
    return found


def bits(rng: Rng, shape: Any, dtype: Any) -> Array:
    """Every bit pattern of a dtype, NaNs with payloads included."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return np.asarray(rng.integers(0, 2, shape).astype(bool))
    data = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    return np.asarray(data.view(dtype).reshape(shape))


def plant(rng: Rng, array: Array, at: Any) -> None:
    """Puts a NaN or an infinity somewhere into a part of an array."""
    part = array[at]
    if part.size:
        index = np.unravel_index(rng.integers(part.size), part.shape)
        part[index] = one_of(rng, (np.nan, np.inf, -np.inf))
        array[at] = part
