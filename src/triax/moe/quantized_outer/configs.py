"""How the kernels of quantized_outer are cut into programs."""

from __future__ import annotations

import dataclasses

from triax.moe.grouped_matmul.configs import fit

TILE = 128
"""What a group's rows are padded to a multiple of, and the most that is summed at a time."""


@dataclasses.dataclass(frozen=True)
class GroupsConfig:
    """One program quantizes `block_columns` of a group, `block_rows` at a time."""

    block_rows: int = TILE
    block_columns: int = 128
    num_warps: int = 8


@dataclasses.dataclass(frozen=True)
class OuterConfig:
    """One program computes `block_left` × `block_right`, `block_rows` of the sum at a time.

    `row_tiles` neighbouring tiles of the left side share those of the right one in L2. `persistent`
    is whether there are only as many programs as the GPU runs at once, each of which loops.
    """

    block_left: int
    block_right: int
    block_rows: int
    num_warps: int
    num_stages: int
    persistent: bool
    row_tiles: int = 8

    @classmethod
    def heuristic(cls, left: int, right: int, *, tma: bool, float32_sums: bool) -> OuterConfig:
        """The config for so many columns on both sides.

        `float32_sums` is whether sums of tensor cores are added up outside of them.
        """
        if tma and float32_sums:
            return cls(fit(left, 256), fit(right, 128), TILE, 8, 3, True)
        if tma:
            return cls(fit(left, 128), fit(right, 256), TILE, 8, 3, True, 4)
        return cls(fit(left, 128), fit(right, 128), TILE // 2, 8, 3, False)
