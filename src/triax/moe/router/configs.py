"""What a router computes, and how its kernels are cut into programs."""

from __future__ import annotations

import dataclasses

from triax.moe.blocks import power_of_two

MAX_EXPERTS = 1024
_ELEMENTS = 1024


@dataclasses.dataclass(frozen=True)
class RouterSpec:
    """The static arguments of `route`, checked.

    `num_groups` is 1 where the choice is not limited to groups. A group's score is the sum of its
    `group_best` best scores, or of its best logits with `group_by_logits`.
    """

    top_k: int
    score: str = "softmax"
    normalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    group_by_logits: bool = False


@dataclasses.dataclass(frozen=True)
class RouteConfig:
    """One program routes `block_tokens` tokens, whose rows of logits it holds in registers.

    One warp, so that no row is spread over several and maxima need no shared memory; and up to
    32 logits for each of its threads. Nothing depends on the number of tokens.
    """

    block_tokens: int
    block_groups: int
    block_size: int
    block_slots: int
    num_warps: int = 1

    @classmethod
    def heuristic(cls, num_experts: int, top_k: int, num_groups: int = 1) -> RouteConfig:
        groups = power_of_two(num_groups)
        size = power_of_two(num_experts // num_groups)
        slots = power_of_two(top_k)
        tokens = max(1, _ELEMENTS // max(groups * size, 2 * slots))
        return cls(min(tokens, 32), groups, size, slots)

    @property
    def bits(self) -> int:
        """What it takes to write down a place in a row."""
        return (self.block_groups * self.block_size).bit_length() - 1
