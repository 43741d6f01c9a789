"""The launch grid: an int, a tuple or list, or a callable of the meta-parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from triax.binding.launch import Grid
from triax.binding.values import is_constexpr
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.messages import short

Sizes: TypeAlias = int | tuple[int, ...] | list[int]
GridLike: TypeAlias = Sizes | Callable[[Mapping[str, Any]], Sizes]

# CUDA C++ Programming Guide, technical specifications: the maximum of each grid dimension.
_LIMITS = (2**31 - 1, 65535, 65535)


def normalize(grid: object, source: str = "") -> Grid:
    """Converts a grid to three ints; `source` says in messages where the grid comes from.

    Raises:
      ArgumentTypeError: the grid is neither an int, nor a tuple or list of ints.
      ArgumentValueError: there are not one to three dimensions, or a size is negative or above
        CUDA's limit.
    """
    if type(grid) is int or is_int(grid):
        grid = (grid,)
    if not isinstance(grid, (tuple, list)):
        raise _not_a_grid(grid, source)
    if not 1 <= len(grid) <= 3:
        raise ArgumentValueError(
            f"Argument `grid` must have one to three dimensions; got {len(grid)}{source}: "
            f"{short(grid)}. One program is `grid=1`."
        )
    sizes: Sequence[Any] = grid
    for axis, size, limit in zip("xyz", sizes, _LIMITS, strict=False):
        if isinstance(size, jax.core.Tracer):
            raise ArgumentTypeError(
                f"Argument `grid` must be known when the function is traced, but its {axis} is the "
                f"traced value {short(size)}{source}. Compute it from shapes or static arguments."
            )
        if type(size) is not int and not is_int(size):
            raise _not_a_grid(grid, source)
        if size < 0:
            raise ArgumentValueError(f"Argument `grid` must not be negative; got {grid!r}{source}.")
        if size > limit:
            remedy = "" if axis == "x" else " Put the long dimension first: x may have 2**31 - 1."
            raise ArgumentValueError(
                f"Argument `grid` has {size} programs along {axis}, but CUDA allows {limit}; "
                f"got {grid!r}{source}.{remedy}"
            )
    x, y, z = (*map(int, sizes), 1, 1)[:3]
    return (x, y, z)


def is_int(value: object) -> bool:
    """Whether a value is a Python or NumPy int, and not a bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _not_a_grid(grid: object, source: str) -> ArgumentTypeError:
    sizes = grid if isinstance(grid, (tuple, list)) else (grid,)
    remedy = ""
    if any(isinstance(size, float) for size in sizes):
        remedy = " Divide ints with // or triton.cdiv."
    elif any(isinstance(size, (jax.Array, np.ndarray)) for size in sizes):
        remedy = " Use Python ints, from shapes or static arguments."
    elif any(map(is_constexpr, sizes)):
        remedy = " Use the Python int that is its `value`."
    return ArgumentTypeError(
        "Argument `grid` must be an int, a tuple or a callable but received: "
        f"type={type(grid).__name__}, value={short(grid)}{source}.{remedy}"
    )
