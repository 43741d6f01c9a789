"""Block sizes and warps of the kernels of permute and unpermute."""

from __future__ import annotations

import dataclasses

from triax.moe.shared import blocks

_MAX_TOKENS = 256
_MAX_ROW_ELEMENTS = 8 * 1024
_MAX_ROW_BYTES = 32 * 1024
# If rows do not begin at multiples of this, an H200 is faster when a program writes two rows of a
# token at once. With fewer than four rows for each token it is slower.
_PIECE_BYTES = 256
_LEAST_COPIES = 4
# Maps with more slots are visited in steps, up to the last slot with a row: a map with a slot per
# expert would compile for minutes if unrolled. Most models have no more slots than a step.
MAX_UNROLLED_SLOTS = 16
_STEP_SLOTS = 8
# The most programs that share the rows without a token, two for each multiprocessor of an H200, and
# the group sizes that such a program reads at a time.
MAX_ZEROING_PROGRAMS = 264
ZEROING_BLOCK_EXPERTS = 256


def step_slots(top_k: int) -> int:
    """Returns the number of slots that a kernel visits at a time."""
    return top_k if top_k <= MAX_UNROLLED_SLOTS else _STEP_SLOTS


@dataclasses.dataclass(frozen=True)
class MoveConfig:
    """One program handles `block_tokens` tokens and `block_width` elements of each.

    permute writes `block_slots` of a token's rows at once. All three blocks are powers of two.
    A config depends only on the width, the size of an element and the slots of a token, so that
    a new number of tokens, rows or experts compiles nothing.
    """

    block_tokens: int
    block_width: int
    num_warps: int
    block_slots: int = 1

    @classmethod
    def for_parts(cls, width: int, itemsize: int, top_k: int) -> MoveConfig:
        """Returns a config to sum the `top_k` rows of a token, a part of the width per program.

        Each thread has one access to each row in flight, or two if there is only one row.
        """
        return cls(*blocks.part(width, itemsize, _MAX_TOKENS, 2 if top_k == 1 else 1))

    @classmethod
    def for_plain_sums(cls, width: int, itemsize: int, top_k: int) -> MoveConfig:
        """Returns `for_parts` with twice the tokens and warps, for sums without weights.

        It is 4% faster for eight rows of 2,048 or 4,096 bfloat16
        (`benchmarks/default_configs.json`), and as fast elsewhere.
        """
        config = cls.for_parts(width, itemsize, top_k)
        return dataclasses.replace(
            config, block_tokens=2 * config.block_tokens, num_warps=2 * config.num_warps
        )

    @classmethod
    def for_copies(cls, width: int, itemsize: int, top_k: int) -> MoveConfig:
        """Returns a config to copy each token to `top_k` rows, a part of the width per program.

        If rows of more than 2 KiB do not start at multiples of 256 bytes, two programs write to one
        256-byte piece; writing two rows at once with twice the warps is then 4 to 5% faster.
        """
        config = cls.for_parts(width, itemsize, top_k)
        row_bytes = width * itemsize
        shares = row_bytes > blocks.BYTES_PER_PROGRAM and row_bytes % _PIECE_BYTES > 0
        if shares and top_k >= _LEAST_COPIES:
            return dataclasses.replace(config, num_warps=2 * config.num_warps, block_slots=2)
        return config

    @classmethod
    def for_rows(cls, width: int, itemsize: int) -> MoveConfig:
        """Returns a config for whole rows, so that a program can reduce over the width.

        Very wide rows take several steps. A thread makes four accesses (two for 8-bit elements,
        which take full registers), or more to stay within 8 warps. With fewer warps a reduction is
        cheaper, and more tokens are in flight where they use few of their slots.
        """
        widest = min(_MAX_ROW_ELEMENTS, _MAX_ROW_BYTES // itemsize)
        block_width = min(blocks.power_of_two(width), widest)
        elements = max(block_width, blocks.BYTES_PER_PROGRAM // itemsize)
        accesses = min(4, 2 * itemsize)
        return cls(*blocks.filled(block_width, elements, itemsize, _MAX_TOKENS, accesses))
