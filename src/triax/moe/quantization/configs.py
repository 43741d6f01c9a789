"""Chooses the kernel of quantize for an array's blocks, and how its work is split into programs."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from triax.moe.quantization.scaled import num_blocks
from triax.moe.shared import blocks

Kernel = Literal["rows", "parts", "columns", "tiles"]

KERNELS = (
    "(…, 1, None), (…, 1, b) with b a power of two from 16 to 256, (…, 128, 128), and, transposed, "
    "(…, None, 1) and (…, 128, 128)"
)
"""The blocks that the kernels support, in words."""
_PARTS = (16, 32, 64, 128, 256)
TILE = 128
"""The rows and the columns of a tile."""
_MAX_ROWS = 128
_MAX_BLOCKS = 2**31 - _MAX_ROWS


def kernel_of(shape: tuple[int, ...], block: tuple[int, ...], transposed: bool) -> Kernel | None:
    """Returns the kernel for an array's blocks, or None."""
    if not shape or any(of != 1 for of in block[:-2]):
        return None
    if math.prod(num_blocks(shape, block)) >= _MAX_BLOCKS:
        return None
    depth, rows = block[-1], block[-2] if len(block) > 1 else 1
    if rows == 1 and not transposed:
        if depth >= shape[-1]:
            return "rows"
        return "parts" if depth in _PARTS else None
    if len(shape) > 1 and transposed and depth == 1 and rows >= shape[-2]:
        return "columns"
    return "tiles" if (rows, depth) == (TILE, TILE) else None


@dataclasses.dataclass(frozen=True)
class RowsConfig:
    """A program takes `block_rows` blocks, whole if `at_once`, else `block_columns` at a time."""

    block_rows: int
    block_columns: int
    at_once: bool
    num_warps: int

    @classmethod
    def for_depth(cls, depth: int) -> RowsConfig:
        """Returns the fastest config on an H200: short blocks stay in registers, others do not."""
        columns = blocks.power_of_two(depth)
        if columns >= 4096:
            num_warps = max(4, min(columns // 2048, 16))
            return cls(1, 2048 if num_warps == 4 else 4096, False, num_warps)
        if columns >= 1024:
            return cls(1, 512, False, 2)
        rows = min(2048 // columns, _MAX_ROWS)
        return cls(rows, columns, True, max(1, rows * columns // (32 * 32)))
