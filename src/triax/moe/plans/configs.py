"""Block sizes and warps of the plan's kernels."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from triax.moe.shared.blocks import power_of_two

_MIN_BINS = 32  # Triton's histogram needs a bin for each thread of a warp
_MAX_BINS = 512
# A mask that keeps every expert becomes expert ids, which are sorted, for up to this many experts.
# With more experts most of the pairs to sort would not be routed.
MAX_SORTED_EXPERTS = 16


@dataclasses.dataclass(frozen=True)
class FewPairsConfig:
    """One program places `block_pairs` pairs and reads all pairs, `block_others` at a time.

    The work grows with the square of the pairs: up to `max_pairs` it takes less time than
    the launches it saves. `block_experts` is the number of bins of a histogram.
    """

    block_experts: int
    block_pairs: int = 16
    block_others: int = 1024
    num_warps: int = 8
    max_pairs: ClassVar[int] = 2048

    @classmethod
    def heuristic(cls, num_experts: int) -> FewPairsConfig:
        return cls(_bins(num_experts))


@dataclasses.dataclass(frozen=True)
class SortConfig:
    """Pairs are counted and ranked in parts of `part`, and parts in at most `max_blocks` blocks.

    Pairs are ranked by comparing all pairs of a part with each other, so parts are small. The scan
    over blocks is sequential, so blocks are few: one program counts a block, part by part.
    """

    block_experts: int
    part: int = 128
    max_blocks: ClassVar[int] = 256
    count_warps: int = 4
    place_warps: int = 2

    @classmethod
    def heuristic(cls, num_experts: int) -> SortConfig:
        """Chooses by the number of experts alone: a new number of tokens compiles nothing."""
        return cls(_bins(num_experts))

    def parts_per_block(self, num_pairs: int) -> int:
        """Returns the number of parts per block that makes at most `max_blocks` blocks."""
        return max(1, -(-num_pairs // (self.part * self.max_blocks)))


@dataclasses.dataclass(frozen=True)
class MaskConfig:
    """One program reads the mask of `block_tokens` tokens, `block_experts` at a time."""

    block_tokens: int
    block_experts: int
    num_warps: int

    @classmethod
    def to_select(cls, num_experts: int) -> MaskConfig:
        """Returns a config to turn a mask into expert ids."""
        block_experts = min(power_of_two(num_experts), 256)
        return cls(2048 // block_experts, block_experts, 4)

    @classmethod
    def to_place(cls, num_experts: int) -> MaskConfig:
        """Returns a config to count the tokens of each expert in a mask, and to place them."""
        block_experts = min(power_of_two(num_experts), 256)
        return cls(8192 // block_experts, block_experts, 8)


def _bins(num_experts: int) -> int:
    return max(_MIN_BINS, min(power_of_two(num_experts), _MAX_BINS))
