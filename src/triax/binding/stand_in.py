"""A stand-in for an array in code that runs before it exists: grids, heuristics, pruning, hooks."""

from __future__ import annotations

import math
from typing import Any

import jax

from triax.binding.descriptor import strides_from_shape


class Array(jax.ShapeDtypeStruct):
    """A `jax.ShapeDtypeStruct` with the methods of PyTorch tensors that grids or hooks call."""

    __slots__ = ()

    @property
    def itemsize(self) -> int:
        return int(self.dtype.itemsize)

    @property
    def nbytes(self) -> int:
        return self.numel() * self.itemsize

    def element_size(self) -> int:
        return self.itemsize

    def numel(self) -> int:
        return math.prod(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def stride(self, dim: int | None = None) -> Any:
        strides = strides_from_shape(self.shape)
        return strides if dim is None else strides[dim]

    def is_contiguous(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"{name!r} of an array is not known while grids, heuristics and configs are evaluated. "
            "An array has a shape and a dtype, and will be dense, row-major, aligned to 16 bytes."
        )
