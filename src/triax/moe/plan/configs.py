"""How the plan's kernels are cut into programs."""

from __future__ import annotations

import dataclasses

_MAX_BLOCK_EXPERTS = 64


@dataclasses.dataclass(frozen=True)
class PlaceConfig:
    """One program counts `block_pairs` pairs, `block_experts` experts at a time, or places them.

    Pairs are counted by comparing each with every expert, and ranked by comparing each with
    each of its block, so blocks are small; all sizes are powers of two.
    """

    block_pairs: int
    block_experts: int
    num_warps: int

    @classmethod
    def heuristic(cls, num_experts: int) -> PlaceConfig:
        """Depends on the experts alone, so that a new number of tokens compiles nothing."""
        return cls(128, min(power_of_two(num_experts), _MAX_BLOCK_EXPERTS), 4)


@dataclasses.dataclass(frozen=True)
class ScanConfig:
    """One program sums up the blocks of `block_experts` experts, `block_blocks` at a time."""

    block_blocks: int = 128
    block_experts: int = 8
    num_warps: int = 4


@dataclasses.dataclass(frozen=True)
class LayOutConfig:
    """The one program that lays out the groups takes `block_experts` at a time."""

    block_experts: int
    num_warps: int

    @classmethod
    def heuristic(cls, num_experts: int) -> LayOutConfig:
        return cls(min(power_of_two(num_experts), 1024), 4)


@dataclasses.dataclass(frozen=True)
class SelectConfig:
    """One program reads the masks of `block_tokens` tokens, `block_experts` at a time."""

    block_tokens: int
    block_experts: int
    num_warps: int

    @classmethod
    def heuristic(cls, num_experts: int) -> SelectConfig:
        block_experts = min(power_of_two(num_experts), 256)
        return cls(2048 // block_experts, block_experts, 4)


def power_of_two(value: int) -> int:
    """The least power of two that is at least `value` and 1."""
    return 1 << max(value - 1, 0).bit_length()
