"""sort_chunks_by_index: calls, hostile inputs, and what results must be, bit for bit."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.moe import draws
from tests.moe.bounds import Array
from tests.moe.case import Arrays, Case, Sized
from tests.moe.draws import Rng, one_of
from tests.moe.permutation.case import FLOATS, MOVED
from tests.moe.plans.case import spans


def maps_of(sizes: Array, order: Array, num_rows: int) -> tuple[Array, Array]:
    """The row of x that each row of the output is, and the output's row for each gradient of x."""
    groups = spans(sizes, num_rows)
    source, target = np.arange(num_rows), np.arange(num_rows)
    named: set[int] = set()
    first = 0
    for chunk in map(int, order):
        if not 0 <= chunk < len(groups):
            continue
        rows = np.arange(num_rows)[groups[chunk]]
        moved = first + np.arange(len(rows))
        source[moved[moved < num_rows]] = rows[moved < num_rows]
        if chunk not in named:
            target[rows] = np.minimum(moved, num_rows - 1)
        named.add(chunk)
        first += len(rows)
    return source, target


def sort_chunks(
    path: str,
    rows: int,
    width: int,
    chunks: int,
    dtype: Any = "float32",
    probs: Any = "float32",
    integers: Any = "int32",
    is_wrong: bool = False,
) -> Case:
    """`is_wrong` names chunks twice, or not at all, and some that there are not."""
    dtype = np.dtype(dtype)
    call = "moe.sort_chunks_by_index(x, sizes, order, "
    call += "probs, implementation=how)" if probs else "implementation=how)"
    moved = {"rows": "x"} | ({"probs": "probs"} if probs else {})
    differentiates = jnp.issubdtype(dtype, jnp.floating)
    gradients = ("x",) * differentiates + ("probs",) * bool(probs)
    info = np.iinfo(integers)

    def draw(rng: Rng) -> Arrays:
        sizes = draws.group_sizes(rng, chunks, rows) if chunks else np.zeros(0)
        order = rng.permutation(chunks)
        if is_wrong:
            order = rng.integers(-1, chunks + 2, chunks)
            wild = rng.random(chunks) < 0.1
            order[wild] = rng.choice([info.min, info.max, *[2**32 + 1] * (info.bits > 32)])
        fit: Any = lambda array: np.clip(array, info.min, info.max).astype(integers)
        arrays = {"x": draws.bits(rng, (rows, width), dtype), "sizes": fit(sizes)}
        arrays["order"] = fit(order)
        if probs:
            arrays["probs"] = draws.bits(rng, (rows,), probs)
            arrays["g_probs"] = draws.bits(rng, (rows,), probs)
        if differentiates:
            arrays["g_rows"] = draws.bits(rng, (rows, width), dtype)
        return arrays

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        source, target = maps_of(arrays["sizes"], arrays["order"], rows)
        wanted = {name: arrays[of][source] for name, of in moved.items()}
        pulled = {f"d_{of}": f"g_{name}" for name, of in moved.items() if of in gradients}
        return wanted | {name: arrays[of][target] for name, of in pulled.items()}

    case = Case("sort_chunks_by_index", path, call, (*moved,), draw, expect, gradients)
    case.is_derivative = not is_wrong
    case.moved, case.columns = gradients, ("x",)
    case.kernels = ("chunk_maps", *["move_rows"] * (1 + bool(gradients)))
    return case


def draw_chunks(rng: Rng, path: str) -> Case:
    rows = int(rng.integers(1, 60 if path == "interpret" else 300))
    chunks = int(rng.integers(1, 70))
    width = one_of(rng, draws.SMALL_WIDTHS if path == "interpret" else draws.WIDTHS)
    dtype = one_of(rng, MOVED)
    probs = "float32" if rng.random() < 0.5 else ""
    return sort_chunks(path, rows, width, chunks, dtype, probs, is_wrong=rng.random() < 0.2)


RANDOM = (draw_chunks,)
_of = functools.partial
_SHAPES = {
    "no rows": (0, 3, 2),
    "one of each": (1, 1, 1),
    "no chunks": (5, 3, 0),
    "no width": (17, 0, 4),
    "small": (33, 1, 8),
    "several blocks of rows": (70, 67, 5),
    "several blocks of the width": (9, 4097, 3),
    # More chunks than one load takes, and more than rows.
    "1,023 chunks": (5, 2, 1023),
    "1,024 chunks": (300, 2, 1024),
    "1,025 chunks": (5, 2, 1025),
    "3,000 chunks": (300, 2, 3000),
    # A program for each row, which looks at many chunks at a time.
    "127 chunks of wide rows": (40, 600, 127),
    "129 chunks of wide rows": (40, 600, 129),
    "20,000 chunks of wide rows": (20, 600, 20000),
}
_SMALL = _of(sort_chunks, rows=70, width=33, chunks=5)
NAMED: dict[str, functools.partial[Case]] = {
    f"chunks, {name}" if name else "chunks": of
    for name, of in (
        {
            name: _of(sort_chunks, rows=rows, width=width, chunks=chunks)
            for name, (rows, width, chunks) in _SHAPES.items()
        }
        | {"": _SMALL}
        | {dtype: _of(_SMALL, dtype=dtype) for dtype in (*FLOATS[1:], "float64", "float8_e5m2")}
        | {dtype: _of(_SMALL, dtype=dtype) for dtype in ("int8", "uint16", "int32", "bool")}
        | {f"probs in {dtype}": _of(_SMALL, probs=dtype) for dtype in FLOATS[1:]}
        | {"no probs": _of(_SMALL, probs="")}
        | {
            f"wrong, {count} chunks in {integers}": _of(
                sort_chunks, rows=300, width=3, chunks=count, integers=integers, is_wrong=True
            )
            for count, integers in ((6, "int32"), (300, "int32"), (6, "int8"), (40, "uint32"))
        }
        | {"wrong, 64 bits": _of(_SMALL, integers="int64", is_wrong=True)}
    ).items()
}
SIZED: dict[str, Sized] = {
    "chunks": lambda path, of: sort_chunks(path, of.rows, of.hidden, of.experts, of.dtype),
    "chunks, no probs": lambda path, of: sort_chunks(
        path, of.rows, of.hidden, of.experts, of.dtype, probs=""
    ),
}
LARGE: dict[str, functools.partial[Case]] = {
    f"chunks, {rows} rows, {width} wide, {chunks} chunks": _of(
        sort_chunks, rows=rows, width=width, chunks=chunks, is_wrong=is_wrong
    )
    for rows, width, chunks, is_wrong in (
        (1025, 1, 8, False),
        (1000, 64, 67, True),
        (511, 2880, 64, False),
        (257, 7168, 1025, False),
        (4097, 7, 3000, True),
    )
}
