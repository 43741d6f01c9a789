"""The router's options, and block sizes of its kernels."""

from __future__ import annotations

import dataclasses

from triax.moe.shared.blocks import power_of_two

MAX_EXPERTS = 1024


@dataclasses.dataclass(frozen=True)
class RouterSpec:
    """The static arguments of `route`, checked.

    `num_groups` is 1 if the choice is not limited to groups. A group's score is the sum of its
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

    A program has one warp, so that maxima of a row need no shared memory. The block size was
    measured on an H200. Configs do not depend on the number of tokens, so a new number compiles
    nothing.
    """

    block_tokens: int
    block_groups: int
    block_size: int
    block_slots: int
    num_warps: int = 1

    @classmethod
    def for_choice(
        cls, num_experts: int, top_k: int, num_groups: int, exact: bool, by_score: bool
    ) -> RouteConfig:
        """Returns the config of `route`.

        With `exact` a single integer orders choices, by score and then by place, so programs take
        more tokens. `by_score` is whether choosing takes more than the order of the logits.
        """
        groups, size = power_of_two(num_groups), power_of_two(num_experts // num_groups)
        tokens = _tokens(groups * size, top_k, 1024 if exact else 256)
        if groups * size == 256 and not by_score:
            tokens = max(tokens, 2)
        return cls(tokens, groups, size, power_of_two(top_k))

    @classmethod
    def for_gradient(cls, num_experts: int, top_k: int, reads_rows: bool) -> RouteConfig:
        """Returns the config of the gradient; programs that read whole rows take fewer tokens."""
        size = power_of_two(num_experts)
        tokens = _tokens(size, top_k, 512 if reads_rows else 1024)
        return cls(tokens, 1, size, power_of_two(top_k))


def place_bits(num_experts: int, num_groups: int) -> int:
    """Returns how many bits number the places of a row, if groups are padded to powers of two."""
    places = power_of_two(num_groups) * power_of_two(num_experts // num_groups)
    return places.bit_length() - 1


def _tokens(block: int, top_k: int, elements: int) -> int:
    """Returns the number of tokens, up to 32, whose logits or choices fill about `elements`."""
    return min(max(1, elements // max(block, 2 * power_of_two(top_k))), 32)
