"""How the kernels of ragged_dot are cut into programs."""

from __future__ import annotations

import dataclasses

from triax.moe.shared import blocks

_LEAST = 16  # what tensor cores take of rows, columns or depth
_LEAST_DEPTH_OF_8_BITS = 32
_HOPPER = 90


@dataclasses.dataclass(frozen=True)
class DotConfig:
    """One program computes `block_rows` × `block_columns`, `block_depth` of the sum at a time.

    `row_tiles` neighbouring row tiles of a group share the columns of its weights in L2.
    `persistent` is whether there are only as many programs as the GPU runs at once, which loop.
    """

    block_rows: int
    block_columns: int
    block_depth: int
    num_warps: int
    num_stages: int
    persistent: bool
    row_tiles: int = 8

    @classmethod
    def heuristic(
        cls,
        rows_per_group: int,
        columns: int,
        depth: int,
        itemsize: int,
        *,
        exact: bool,
        hopper: bool,
        tma: bool,
        float32_sums: bool = False,
        blocked: bool = False,
    ) -> DotConfig:
        """The config for groups of so many rows on average, and elements of `itemsize` bytes.

        `exact` is whether products are in float32, without tensor cores; `float32_sums` whether the
        sums of tensor cores are added up outside of them, `blocked` whether they are scaled before.
        Row counts are rounded to powers of two up to 128, so that few configs are needed.
        """
        rows = fit(rows_per_group, 128)
        if exact:
            return cls(min(rows, 64), fit(columns, 64), fit(depth, 32), 4, 3, False)
        deep = 128 // itemsize  # the 128 bytes of a swizzled line in shared memory
        widest = 256 if itemsize <= 2 else 128
        depth = max(depth, _LEAST_DEPTH_OF_8_BITS if itemsize == 1 else _LEAST)
        if tma and rows == 128 and blocked:
            return cls(128, fit(columns, 128), fit(depth, deep), 8, 3, True)
        if tma and rows == 128 and float32_sums:
            return cls(64, fit(columns, 128), fit(depth, deep), 4, 3, False, 32)
        if tma and rows == 128:
            return cls(128, fit(columns, widest), fit(depth, deep), 8, 3, True)
        if tma and itemsize == 1 and rows > _LEAST:
            return cls(64, fit(columns, 128), fit(depth, deep), 4, 4, True)
        if tma:  # few rows: what matters is how much of the weights is in flight
            # Weights are read for each tile of a group; few groups are twice the average.
            rows = fit(2 * rows_per_group, 128) if itemsize > 1 else rows
            if rows == 128:
                return cls(128, fit(columns, widest), fit(depth, deep), 8, 3, True, 1)
            if rows == 64:
                return cls(64, fit(columns, widest), fit(depth, deep), 4, 4, True, 1)
            deep = 2 * deep if itemsize <= 2 else deep
            return cls(rows, fit(columns, 128), fit(depth, deep), 8, 4, True, 1)
        return cls(rows, fit(columns, 128), fit(depth, deep if hopper else deep // 2), 8, 4, False)


@dataclasses.dataclass(frozen=True)
class OuterConfig:
    """One program computes `block_left` × `block_right`, `block_rows` of the sum at a time.

    `row_tiles` neighbouring tiles of the left side share those of the right one in L2. `persistent`
    is as in `DotConfig`.
    """

    block_left: int
    block_right: int
    block_rows: int
    num_warps: int
    num_stages: int
    persistent: bool
    row_tiles: int = 8

    @classmethod
    def heuristic(
        cls, left: int, right: int, itemsize: int, *, exact: bool, hopper: bool, tma: bool
    ) -> OuterConfig:
        """The config for so many columns on both sides, and elements of `itemsize` bytes."""
        if exact:
            return cls(fit(left, 64), fit(right, 64), 32, 4, 3, False)
        deep = 128 // itemsize
        if tma:
            return cls(fit(left, 128), fit(right, 256 if itemsize <= 2 else 128), deep, 8, 3, True)
        return cls(fit(left, 128), fit(right, 128), deep if hopper else deep // 2, 8, 4, False)


def is_hopper(compute_capability: int) -> bool:
    """Whether tensor cores read their operands from shared memory, and need large blocks."""
    return compute_capability >= _HOPPER


def fit(size: int, largest: int) -> int:
    """The least power of two that holds `size`, from 16 to `largest`."""
    return max(_LEAST, min(largest, blocks.power_of_two(size)))
