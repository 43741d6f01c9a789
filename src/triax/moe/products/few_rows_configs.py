"""Chooses how the work of the kernels for few rows is split into programs."""

from __future__ import annotations

import dataclasses

from triax.architectures import Architecture
from triax.moe.products.thresholds import (
    HALF_OF_A_WARP_GROUP,
    VERY_FEW_ROWS,
    VERY_FEW_ROWS_BY_HALVES,
    VERY_FEW_ROWS_FROM_REGISTERS,
)
from triax.moe.shared import blocks
from triax.moe.shared.target import Target

_BARRIERS_AND_SCALES = 4096
_LEAST_DEPTH = 64  # of a block, which has a scale for each half if 64 share none


@dataclasses.dataclass(frozen=True)
class FewRowsConfig:
    """A program computes `block_rows` × `block_columns`, in steps of `block_depth`.

    With `weights_left` the weights are the left operand of tensor cores, which on Hopper reads
    registers. There are `programs` programs for each multiprocessor, or one for each tile. The
    compiler may use `registers` for a thread, or as many as there are.
    """

    block_rows: int
    block_columns: int
    block_depth: int
    num_stages: int
    weights_left: bool
    num_warps: int = 4
    programs: int | None = 2
    registers: int | None = None

    @property
    def flatten(self) -> bool:
        """Whether to flatten the loops over tiles and depth; on Hopper sums must begin at zero."""
        return not self.weights_left

    @classmethod
    def heuristic(
        cls,
        architecture: Architecture,
        rows_per_group: int,
        columns: int,
        depth: int,
        scaled: int | None,
        *,
        eight: bool,
    ) -> FewRowsConfig:
        """Returns the config for weights of `eight` bits, or of four.

        `scaled` is the depth of a scale that multiplies sums, if not all.

        For tensor cores that read shared memory it is as measured on an H200. Warps wait for most
        of their time, so as many programs as possible should share a multiprocessor. Programs are
        therefore small. On Hopper they also get fewer registers than the compiler would use, where
        few values then spill to memory.

        For tensor cores that read registers it has as many stages as fit. A stage has a block of
        16-bit rows and a block of weights. 4-bit weights pass through shared memory once more after
        they are widened.
        """
        in_sum = scaled is not None
        if eight and scaled is not None:
            scaled = max(scaled & -scaled, _LEAST_DEPTH)
        width, deep = min(128, blocks.power_of_two(columns)), 128
        if not architecture.multiplies_from_shared:
            # Few groups exceed twice the mean.
            rows = max(16, min(64, blocks.power_of_two(2 * rows_per_group)))
            if rows == 64 or depth <= 64 or (scaled is not None and scaled % 128):
                deep = _LEAST_DEPTH  # of 64 rows, as registers allow
            widened = 0 if eight else 2 * width * deep
            loaded = deep * (2 * rows + (width if eight else width // 2))
            stages = 1 + (architecture.shared_bytes - widened - _BARRIERS_AND_SCALES) // loaded
            # With two scales for a block there are sums of both halves.
            has_halves = not eight and rows == 64 and scaled is not None and scaled % deep
            return cls(rows, width, deep, min(stages, 4), False, 8 if has_halves else 4)
        registers: int | None = None
        if rows_per_group <= HALF_OF_A_WARP_GROUP:
            rows, registers = 32, 168 if in_sum or eight else 128
        elif in_sum:
            rows = 64
        else:
            rows, deep, registers = (64, 64, 128) if eight else (64, 128, 168)
        if depth <= 64 or (scaled is not None and scaled % (128 if eight else 64)):
            deep = _LEAST_DEPTH
            if rows == 32:
                registers = 128
        if architecture.compute_capability != 90:
            registers = None
        stages = 4 if deep == _LEAST_DEPTH and not eight else 3
        return cls(rows, width, deep, stages, True, programs=None, registers=registers)


@dataclasses.dataclass(frozen=True)
class VeryFewRowsConfig:
    """A program has `block_rows` × 64 numbers; each of its `split` warps sums a part of the depth.

    The limits are from an H100, where `wgmma` is faster for more rows; those for 8 rows, and for
    scales that are powers of two, are from an H200. No other card was measured.
    """

    block_rows: int
    split: int
    stages: int

    @property
    def num_warps(self) -> int:
        """Returns one warp for each part."""
        return self.split

    def finds_tiles(self, target: Target, num_tiles: int) -> bool:
        """Returns whether each program finds its tile itself, from the sizes of the groups.

        That saves the kernel that lists the tiles, but every program takes longer to begin, so
        there must be few. Programs of more than 8 rows have no registers left for it.
        """
        return self.block_rows == 8 and num_tiles <= 24 * target.multiprocessors

    @staticmethod
    def most_rows(architecture: Architecture, scaled: int | None) -> int:
        """Returns up to how many rows per group, on average, the kernel for very few rows is used.

        `scaled` is how much of the depth shares a scale that multiplies sums; None for all of it,
        and for powers of two.
        """
        if architecture.compute_capability < 80:  # no products of bfloat16
            return 0
        if not architecture.multiplies_from_shared:
            return VERY_FEW_ROWS_FROM_REGISTERS
        return VERY_FEW_ROWS_BY_HALVES if scaled is not None and scaled % 64 else VERY_FEW_ROWS

    @classmethod
    def heuristic(
        cls,
        target: Target,
        rows_per_group: int,
        num_tiles: int,
        depth: int,
        *,
        powers: bool,
        in_sum: bool,
        eight: bool,
    ) -> VeryFewRowsConfig:
        """Returns the config for about `num_tiles` of 64 columns, `depth` deep, in use.

        Scales are `powers` of two, or multiply each product before it is added (`in_sum`).
        Weights have `eight` bits, or four.
        Products of 32 rows beside sums take more registers than sm_80's code has.
        A multiprocessor has 12 to 16 warps. With few tiles for each, two parts of the depth give
        all of them work; four in 8 bits, if each has 10 steps of 64. With powers, two parts pay
        with up to 3 tiles for each multiprocessor, or 8 steps for each of its tiles. In 8 bits 6
        programs of two parts fit, so that with a few more tiles one part is faster.
        """
        most = 16 if in_sum and not target.architecture.multiplies_from_shared else 32
        rows = max(8, min(most, blocks.power_of_two(2 * rows_per_group)))
        of_each = num_tiles / target.multiprocessors
        if rows == 8 and powers:
            return cls(rows, 2 if of_each <= 3 or 8 * of_each <= depth // 64 else 1, 4)
        if rows == 8 and of_each <= 8 and not eight:
            return cls(rows, 2, 6 if of_each <= 4 else 4)
        if rows == 8 and of_each <= 3:
            return cls(rows, 4, 3) if depth >= 40 * 64 else cls(rows, 2, 3 if in_sum else 4)
        if rows == 8 and 6 < of_each <= 8:
            return cls(rows, 1, 4)
        if eight:
            return cls(rows, 2 if rows == 8 or (rows == 16 and of_each <= 16) else 1, 3)
        return cls(rows, 1, 4 if rows == 16 else 3)
