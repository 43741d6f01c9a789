"""Reductions, scans and maps with any function.

Triton's interpreter combines one element with the next in Python, and lets sums of integers grow
past their type. Here a combine function is applied to whole blocks, in a tree: log2(length) calls,
in an order like a GPU's. Sums, maxima and minima go straight to NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import triton.language as tl

from triax.compat import triton_interpreter as compat
from triax.errors import UnsupportedError
from triax.interpreting.conversions import BFLOAT16
from triax.interpreting.inside import AmbiguousTruth, plain

Arrays = tuple[np.ndarray, ...]
Types = Sequence[tl.dtype]
Combine = Callable[[Arrays, Arrays], Arrays]


def reduce(
    input: Any, axis: Any, combine_fn: Callable[..., Any], keep_dims: Any = False, **_: Any
) -> Any:
    """Replaces `tl.reduce`."""
    arrays, types = _arrays_of(input)
    axis, rank = plain(axis), arrays[0].ndim
    if axis is None:
        arrays = tuple(a.reshape(-1) for a in arrays)
    at = 0 if axis is None else _position(axis, rank)
    reduced = _fast_reduction(combine_fn, arrays, at)
    if reduced is None:
        rows = tuple(np.moveaxis(a, at, 0) for a in arrays)
        reduced = _reduce_tree(_on_arrays(combine_fn, types), rows)
    if plain(keep_dims):
        kept = tuple(range(rank)) if axis is None else at
        reduced = tuple(np.expand_dims(r, kept) for r in reduced)
    return _like(input, reduced, types)


def associative_scan(
    input: Any, axis: Any, combine_fn: Callable[..., Any], reverse: Any = False, **_: Any
) -> Any:
    """Replaces `tl.associative_scan`."""
    arrays, types = _arrays_of(input)
    at = _position(plain(axis), arrays[0].ndim)
    order = slice(None, None, -1 if plain(reverse) else 1)
    rows = tuple(np.moveaxis(a, at, 0)[order] for a in arrays)
    # Compared by identity: hashing a jitted function computes its cache key.
    if combine_fn is compat.SUM_COMBINE and rows[0].dtype != BFLOAT16:
        scanned: Arrays = (np.cumsum(rows[0], axis=0, dtype=rows[0].dtype),)
    else:
        scanned = _scan_tree(_on_arrays(combine_fn, types), rows)
    moved = (np.ascontiguousarray(np.moveaxis(s[order], 0, at)) for s in scanned)
    return _like(input, moved, types)


def map_elementwise(scalar_fn: Callable[..., Any], *args: Any, pack: Any = 1, **_: Any) -> Any:
    """Replaces `tl.map_elementwise`."""
    if plain(pack) != 1:
        raise UnsupportedError(
            f"The interpreter has `tl.map_elementwise` for `pack=1` only, got `pack={plain(pack)}`."
        )
    arrays, types = _arrays_of(args)
    return _call(scalar_fn, np.broadcast_arrays(*arrays), types)


def _call(function: Callable[..., Any], arrays: Sequence[np.ndarray], types: Types) -> Any:
    """Applies a function of scalars to arrays of one shape; lane by lane only if it branches."""
    try:
        return function(*map(compat.tensor, map(np.ascontiguousarray, arrays), types))
    except AmbiguousTruth:
        lanes = zip(*(array.reshape(-1) for array in arrays), strict=True)
        calls = [function(*map(compat.tensor, map(np.asarray, lane), types)) for lane in lanes]

    def join(values: Sequence[Any]) -> tl.tensor:
        # A number that a branch returns may be of another type than the operands.
        dtypes = [v.dtype for v in values if isinstance(v, tl.tensor)]
        dtype = next((dtype for dtype in dtypes if dtype in types), (*dtypes, types[0])[0])
        data = [v.handle.data if isinstance(v, tl.tensor) else [plain(v)] for v in values]
        lanes = [np.asarray(lane).astype(compat.numpy_dtype(dtype)).reshape(1) for lane in data]
        return compat.tensor(np.concatenate(lanes).reshape(arrays[0].shape), dtype)

    if isinstance(calls[0], (tuple, tl.core.tuple)):
        return tuple(map(join, zip(*calls, strict=True)))
    return join(calls)


def _arrays_of(input: Any) -> tuple[Arrays, Types]:
    """Returns the arrays behind one tensor or a tuple of tensors, and their element types."""
    tensors = (input,) if isinstance(input, tl.tensor) else tuple(input)
    return tuple(t.handle.data.reshape(t.shape) for t in tensors), [t.dtype for t in tensors]


def _like(input: Any, arrays: Iterable[np.ndarray], types: Types) -> Any:
    """Wraps arrays as one tensor or as a tuple of tensors, as `input` is."""
    tensors = tuple(map(compat.tensor, map(np.asarray, arrays), types))
    return tensors[0] if isinstance(input, tl.tensor) else tensors


def _position(axis: int, rank: int) -> int:
    if not -rank <= axis < rank:
        raise ValueError(f"`axis` must be in [{-rank}, {rank}), got {axis}.")
    return axis % rank


def _on_arrays(combine_fn: Callable[..., Any], types: Types) -> Combine:
    """Returns the combine function as a function of arrays of one shape."""

    def combine(left: Arrays, right: Arrays) -> Arrays:
        outputs = _call(combine_fn, (*left, *right), [*types, *types])
        outputs = outputs if isinstance(outputs, (tuple, tl.core.tuple)) else (outputs,)
        datas = (o.handle.data if isinstance(o, tl.tensor) else o for o in outputs)
        return tuple(
            np.broadcast_to(data, left[0].shape).astype(compat.numpy_dtype(dtype))
            for data, dtype in zip(datas, types, strict=True)
        )

    return combine


def _reduce_tree(combine: Combine, rows: Arrays) -> Arrays:
    """Reduces the first axis, neighbours first, so that order is kept."""
    while (length := rows[0].shape[0]) > 1:
        even = length - length % 2
        paired = combine(tuple(r[0:even:2] for r in rows), tuple(r[1:even:2] for r in rows))
        rest = tuple(r[even:] for r in rows)
        rows = tuple(np.concatenate(pair) for pair in zip(paired, rest, strict=True))
    return tuple(r[0] for r in rows)


def _scan_tree(combine: Combine, rows: Arrays) -> Arrays:
    """Scans the first axis, whose length is a power of two, by doubling the distance."""
    distance = 1
    while distance < rows[0].shape[0]:
        # Blocks keep their shape; the first lanes have no predecessor and are restored.
        combined = combine(tuple(np.roll(r, distance, axis=0) for r in rows), rows)
        for new, old in zip(combined, rows, strict=True):
            new[:distance] = old[:distance]
        rows = combined
        distance *= 2
    return rows


def _fast_reduction(combine_fn: Callable[..., Any], arrays: Arrays, axis: int) -> Arrays | None:
    """Reduces with NumPy if NumPy has the same function, else returns None."""
    array = arrays[0]
    floating = array.dtype == BFLOAT16 or np.issubdtype(array.dtype, np.floating)
    if combine_fn is compat.SUM_COMBINE and array.dtype not in (BFLOAT16, np.bool_):
        return (np.add.reduce(array, axis=axis, dtype=array.dtype),)
    if combine_fn is compat.MAX_COMBINE:
        return ((np.fmax if floating else np.maximum).reduce(array, axis=axis),)
    if combine_fn is compat.MIN_COMBINE:
        return ((np.fmin if floating else np.minimum).reduce(array, axis=axis),)
    return None
