"""Chooses how the work of ragged_dot's kernels is split into programs, for the GPU they run on."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, TypeVar

from triax.architectures import Architecture
from triax.moe.products.thresholds import LARGEST_TILE, NARROW_ROWS_OF_8_BITS
from triax.moe.shared import blocks
from triax.moe.shared.target import Target

TILE = LARGEST_TILE
"""Rows rounded to 8 bits are padded to a multiple of this, which is also the most of a step."""

_LEAST = 16  # rows, columns or depth that tensor cores need
_LEAST_DEPTH = {1: 32, 2: _LEAST, 4: _LEAST}  # by itemsize
_LINE_BYTES = 128  # a swizzled line of shared memory
_LEAST_STAGES = 2
# Rows that tensor cores need to read operands from shared memory.
_LEAST_FROM_SHARED = 64
_BARRIERS_AND_SCALES = 2048

_Config = TypeVar("_Config", "DotConfig", "OuterConfig")


class Itemsizes(NamedTuple):
    """Bytes of an element of both operands and of the result."""

    left: int
    right: int
    result: int


@dataclasses.dataclass(frozen=True)
class DotConfig:
    """A program computes `block_rows` × `block_columns`, in steps of `block_depth`.

    `row_tiles` neighbouring row tiles of a group share weight columns in L2. `persistent` launches
    only as many programs as the GPU runs at once, and each loops over tiles.
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
        target: Target,
        rows_per_group: int,
        columns: int,
        depth: int,
        itemsizes: Itemsizes,
        *,
        exact: bool,
        tma: bool,
        float32_sums: bool = False,
        blocked: bool = False,
        one_order: bool = False,
    ) -> DotConfig:
        """Returns the config for groups of `rows_per_group` rows on average.

        `exact` is whether products are in float32, without tensor cores; `tma` whether blocks are
        loaded and stored by descriptors; `float32_sums` whether tensor cores' sums are promoted to
        float32, and `blocked` whether they are scaled first. Row counts are rounded up to powers of
        two, at most 128, so that few configs are needed. With `one_order` weights of 8 bits are
        multiplied by the same instructions for any number of rows.
        """
        by_instruction = itemsizes.right == 1 and target.architecture.multiplies_from_shared
        least = _LEAST_FROM_SHARED if one_order and by_instruction else _LEAST
        rows, itemsize = max(least, fit(rows_per_group, LARGEST_TILE)), itemsizes.left
        # Each row tile reads the weights again, so if rows are few, a tile holds twice the average.
        few = max(least, fit(2 * rows_per_group, LARGEST_TILE)) if itemsize > 1 else rows
        deep = fit(max(depth, _LEAST_DEPTH[itemsize]), _LINE_BYTES // itemsize)
        # Sums that are scaled take their registers twice.
        widest = fit(columns, 256 if itemsize <= 2 and not blocked else 128)
        wide = fit(columns, 128)
        if exact:
            config = cls(min(rows, 64), fit(columns, 64), fit(depth, 32), 4, 3, False)
        elif not target.architecture.multiplies_from_shared:
            # Float32 as three TF32 products takes twice the registers.
            wide = fit(columns, 64 if itemsize == 4 and few == 128 else 128)
            row_tiles = 8 if rows == 128 else 1
            config = cls(few, wide, deep, 8 if few == 128 else 4, 4, tma, row_tiles)
        elif not tma:
            config = cls(rows, wide, deep, 8, 4, False)
        elif rows == 128 and blocked:
            config = cls(128, wide, deep, 8, 3, True)
        elif rows == 128 and float32_sums:
            config = cls(64, wide, deep, 4, 3, False, 32)
        elif rows == 128:
            config = cls(128, widest, deep, 8, 3, True)
        elif itemsize == 1 and rows > NARROW_ROWS_OF_8_BITS:
            config = cls(64, wide, deep, 4, 4, True)
        elif few == 128:
            config = cls(128, widest, deep, 8, 3, True, 1)
        elif few == 64:
            config = cls(64, widest, deep, 4, 4, True, 1)
        else:  # weight loads in flight limit the speed
            deeper = fit(depth, 2 * _LINE_BYTES // itemsize) if itemsize <= 2 else deep
            config = cls(few, wide, max(deep, deeper), 8, 4, True, 1)
        return _fitted(config, target.architecture, itemsizes, tma)


@dataclasses.dataclass(frozen=True)
class OuterConfig:
    """A program computes `block_left` × `block_right`, in steps of `block_rows`.

    `row_tiles` neighbouring tiles of the left side share a tile of the right side in L2.
    `persistent` is as in `DotConfig`.
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
        cls,
        target: Target,
        left: int,
        right: int,
        itemsizes: Itemsizes,
        *,
        exact: bool,
        tma: bool,
        float32_sums: bool = False,
    ) -> OuterConfig:
        """Returns the config for `left` × `right` columns; for the rest see `DotConfig`."""
        itemsize, from_shared = itemsizes.left, target.architecture.multiplies_from_shared
        deep = _LINE_BYTES // itemsize
        if exact:
            config = cls(fit(left, 64), fit(right, 64), 32, 4, 3, False)
        elif itemsize == 1 and not (tma and from_shared):
            config = cls(fit(left, 128), fit(right, 128), TILE if tma else TILE // 2, 8, 3, tma)
        elif itemsize == 1 and float32_sums:
            config = cls(fit(left, 256), fit(right, 128), TILE, 8, 3, True)
        elif itemsize == 1:
            config = cls(fit(left, 128), fit(right, 256), TILE, 8, 3, True, 4)
        elif tma and from_shared:
            widest = 256 if itemsize == 2 else 128
            config = cls(fit(left, 128), fit(right, widest), deep, 8, 3, True)
        else:
            config = cls(fit(left, 128), fit(right, 128), deep, 8, 4, tma)
        return _fitted(config, target.architecture, itemsizes, tma)


def _fitted(
    config: _Config, architecture: Architecture, itemsizes: Itemsizes, tma: bool
) -> _Config:
    """Returns a config with the most stages, and then the deepest block, that fit shared memory."""
    stages = config.num_stages
    rows, columns, depth = dataclasses.astuple(config)[:3]
    limit = architecture.shared_bytes
    while shared_bytes((rows, columns, depth), stages, architecture, itemsizes, tma) > limit:
        if stages > _LEAST_STAGES:
            stages -= 1
        else:
            depth //= 2
    name = dataclasses.fields(config)[2].name
    return dataclasses.replace(config, num_stages=stages, **{name: depth})


def shared_bytes(
    block: tuple[int, int, int],
    num_stages: int,
    architecture: Architecture,
    itemsizes: Itemsizes,
    tma: bool,
) -> int:
    """Returns an upper bound of Triton's shared memory for a block of (rows, columns, depth).

    If tensor cores read registers, one buffer less is needed: the stage that they multiply has left
    shared memory.
    """
    rows, columns, depth = block
    left, right, result = itemsizes
    from_shared = architecture.multiplies_from_shared and rows >= _LEAST_FROM_SHARED
    loaded = depth * (rows * left + columns * right)
    buffers = num_stages if from_shared else num_stages - 1
    stored = rows * columns // 2 * result  # half the block at a time
    # With descriptors a tile is stored while the next one is loaded.
    needed = buffers * loaded + stored if tma else max(buffers * loaded, stored)
    if from_shared and left > right:  # weights are widened first
        needed += depth * columns * left
    elif left == 4 and (from_shared or not tma):  # float32 may have to be transposed
        needed += loaded
    return needed + _BARRIERS_AND_SCALES


def fit(size: int, largest: int) -> int:
    """Returns the least power of two that holds `size`, from 16 to `largest`."""
    return max(_LEAST, min(largest, blocks.power_of_two(size)))
