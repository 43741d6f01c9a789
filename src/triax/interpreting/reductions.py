"""Reductions, scans and maps, for any function.

Triton's interpreter combines one element with the next in Python. Here a combine
function is applied to whole blocks, in a tree: the logarithm of the length many
calls, and an order like a GPU's. Sums, maxima and their kin go straight to NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import triton.language as tl

from triax.compat import triton_interpreter as compat
from triax.errors import UnsupportedError
from triax.interpreting.conditions import AmbiguousTruth

Arrays = tuple[np.ndarray, ...]
Combine = Callable[[Arrays, Arrays], Arrays]

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def reduce(
    input: Any, axis: Any, combine_fn: Callable[..., Any], keep_dims: Any = False, **_: Any
) -> Any:
    """`tl.reduce`."""
    tensors, axis = _tensors(input), _unwrap(axis)
    keep_dims = bool(_unwrap(keep_dims))
    types = [t.dtype for t in tensors]
    arrays = tuple(t.handle.data.reshape(t.shape) for t in tensors)
    rank = arrays[0].ndim
    if axis is None:
        arrays = tuple(a.reshape(-1) for a in arrays)
    elif not -rank <= axis < rank:
        raise ValueError(f"`axis` must be in [{-rank}, {rank}), got {axis}.")
    at = 0 if axis is None else axis % rank
    fast = _fast_reduction(combine_fn, arrays, at)
    if fast is not None:
        reduced = fast
    else:
        try:
            rows = tuple(np.moveaxis(a, at, 0) for a in arrays)
            reduced = _reduce_tree(_on_blocks(combine_fn, types), rows)
        except AmbiguousTruth:
            # A combine function with control flow only makes sense on scalars.
            return _like(input, compat.elementwise_reduce(tensors, axis, combine_fn, keep_dims))
    if keep_dims:
        kept = (1,) * rank if axis is None else None
        reduced = tuple(r.reshape(kept) if kept else np.expand_dims(r, at) for r in reduced)
    pairs = zip(reduced, types, strict=True)
    return _like(input, tuple(compat.tensor(np.asarray(r), t) for r, t in pairs))


def associative_scan(
    input: Any, axis: Any, combine_fn: Callable[..., Any], reverse: Any = False, **_: Any
) -> Any:
    """`tl.associative_scan`."""
    tensors, axis, reverse = _tensors(input), _unwrap(axis), bool(_unwrap(reverse))
    types = [t.dtype for t in tensors]
    arrays = tuple(t.handle.data.reshape(t.shape) for t in tensors)
    rank = arrays[0].ndim
    if not -rank <= axis < rank:
        raise ValueError(f"`axis` must be in [{-rank}, {rank}), got {axis}.")
    rows = tuple(np.moveaxis(a, axis, 0) for a in arrays)
    if reverse:
        rows = tuple(r[::-1] for r in rows)
    # By identity: hashing a jitted function fills in its cache key.
    cumulate: Any = None
    if combine_fn is compat.SUM_COMBINE:
        cumulate = np.cumsum
    elif combine_fn is compat.PROD_COMBINE:
        cumulate = np.cumprod
    if cumulate is not None and rows[0].dtype != _BFLOAT16:
        scanned: Arrays = (cumulate(rows[0], axis=0, dtype=rows[0].dtype),)
    else:
        try:
            scanned = _scan_tree(_on_blocks(combine_fn, types), rows)
        except AmbiguousTruth:
            parts = compat.elementwise_scan(tensors, axis % rank, combine_fn, reverse)
            return _like(input, parts)
    if reverse:
        scanned = tuple(s[::-1] for s in scanned)
    pairs = zip(scanned, types, strict=True)
    return _like(
        input,
        tuple(compat.tensor(np.ascontiguousarray(np.moveaxis(s, 0, axis)), t) for s, t in pairs),
    )


def map_elementwise(scalar_fn: Callable[..., Any], *args: Any, pack: Any = 1, **_: Any) -> Any:
    """`tl.map_elementwise`, with one element a call where the function has control flow."""
    if _unwrap(pack) != 1:
        raise UnsupportedError(
            "The interpreter has `tl.map_elementwise` for `pack=1` only, got "
            f"`pack={_unwrap(pack)}`."
        )
    types = [arg.dtype for arg in args]
    arrays = np.broadcast_arrays(*(arg.handle.data.reshape(arg.shape) for arg in args))
    shape = arrays[0].shape
    try:
        return scalar_fn(*map(compat.tensor, arrays, types))
    except AmbiguousTruth:
        rows = zip(*(array.reshape(-1) for array in arrays), strict=True)
        calls = [scalar_fn(*map(compat.tensor, map(np.asarray, row), types)) for row in rows]
    single = not isinstance(calls[0], (tuple, tl.core.tuple))
    outputs = zip(*([(call,) for call in calls] if single else calls), strict=True)
    mapped = []
    for lanes in outputs:
        data = np.concatenate([lane.handle.data for lane in lanes]).reshape(shape)
        mapped.append(compat.tensor(data, lanes[0].dtype))
    return mapped[0] if single else tuple(mapped)


def _unwrap(value: Any) -> Any:
    return value.value if isinstance(value, tl.constexpr) else value


def _tensors(input: Any) -> tuple[tl.tensor, ...]:
    return (input,) if isinstance(input, tl.tensor) else tuple(input)


def _like(input: Any, outputs: Sequence[tl.tensor]) -> Any:
    return outputs[0] if isinstance(input, tl.tensor) else tuple(outputs)


def _on_blocks(combine_fn: Callable[..., Any], types: Sequence[tl.dtype]) -> Combine:
    """A combine function on arrays of one shape."""

    def combine(left: Arrays, right: Arrays) -> Arrays:
        arguments = [
            compat.tensor(np.ascontiguousarray(array), dtype)
            for arrays in (left, right)
            for array, dtype in zip(arrays, types, strict=True)
        ]
        outputs = combine_fn(*arguments)
        outputs = outputs if isinstance(outputs, (tuple, tl.core.tuple)) else (outputs,)
        shape = left[0].shape
        datas = (o.handle.data if isinstance(o, tl.tensor) else o for o in outputs)
        return tuple(
            np.broadcast_to(data, shape).astype(compat.numpy_dtype(dtype))
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
    """Scans the first axis, whose length is a power of two."""
    if rows[0].shape[0] == 1:
        return rows
    evens, odds = tuple(r[0::2] for r in rows), tuple(r[1::2] for r in rows)
    through_odds = _scan_tree(combine, combine(evens, odds))
    # The first lane has no predecessor; it is computed with a stand-in and replaced.
    before = tuple(np.concatenate([s[:1], s[:-1]]) for s in through_odds)
    through_evens = combine(before, evens)
    scanned = tuple(np.empty(r.shape, r.dtype) for r in rows)
    for out, even, odd, row in zip(scanned, through_evens, through_odds, rows, strict=True):
        out[0::2], out[1::2] = even, odd
        out[0] = row[0]
    return scanned


def _fast_reduction(combine_fn: Callable[..., Any], arrays: Arrays, axis: int) -> Arrays | None:
    """NumPy's answer, where NumPy has the same function."""
    array = arrays[0]
    floating = array.dtype == _BFLOAT16 or np.issubdtype(array.dtype, np.floating)
    if combine_fn is compat.SUM_COMBINE and array.dtype not in (_BFLOAT16, np.bool_):
        return (np.add.reduce(array, axis=axis, dtype=array.dtype),)
    if combine_fn is compat.MAX_COMBINE:
        return ((np.fmax if floating else np.maximum).reduce(array, axis=axis),)
    if combine_fn is compat.MIN_COMBINE:
        return ((np.fmin if floating else np.minimum).reduce(array, axis=axis),)
    for combines, pick in (
        (compat.ARGMAX_COMBINES, np.argmax),
        (compat.ARGMIN_COMBINES, np.argmin),
    ):
        # NumPy lets NaNs win and takes the first of equals; Triton takes the lowest index.
        if any(combine_fn is c for c in combines) and not (floating and np.isnan(array).any()):
            where = np.expand_dims(pick(array, axis=axis), axis)
            picked = (np.take_along_axis(a, where, axis) for a in arrays)
            return tuple(np.squeeze(p, axis) for p in picked)
    return None
