"""How the kernels of permute and unpermute are cut into programs."""

from __future__ import annotations

import dataclasses

from triax.moe.shared import blocks

_MAX_TOKENS = 256
_MAX_ROW_ELEMENTS = 8 * 1024
_MAX_ROW_BYTES = 32 * 1024
# If rows are not a multiple of such a piece of memory, an H200 writes two rows of a token at once
# faster than one by one, but slower if a token has fewer than four.
_PIECE_BYTES = 256
_LEAST_COPIES = 4
# Maps with more slots are visited in steps, as far as tokens have rows: a map with a slot per
# expert would compile for minutes if unrolled. A step has as many slots as models choose at most.
MAX_UNROLLED_SLOTS = 16
_STEP_SLOTS = 8
# At most so many programs share the empty rows, two for each multiprocessor of an H200, and they
# read the group sizes in such blocks.
MAX_ZEROING_PROGRAMS = 264
ZEROING_BLOCK_EXPERTS = 256


def step_slots(top_k: int) -> int:
    """How many slots a kernel visits at a time."""
    return top_k if top_k <= MAX_UNROLLED_SLOTS else _STEP_SLOTS


@dataclasses.dataclass(frozen=True)
class MoveConfig:
    """One program handles `block_tokens` tokens and `block_width` elements of each.

    permute writes `block_slots` of a token's rows at once. All three are powers of two.
    Everything follows from the width, the size of an element and the slots of a token, so that
    a new number of tokens, rows or experts compiles nothing.
    """

    block_tokens: int
    block_width: int
    num_warps: int
    block_slots: int = 1

    @classmethod
    def for_parts(cls, width: int, itemsize: int, top_k: int) -> MoveConfig:
        """A part of each row, from `blocks.part`, to sum the `top_k` rows of a token.

        Each thread has one access to each of them in flight, or two if there is only one row.
        """
        return cls(*blocks.part(width, itemsize, _MAX_TOKENS, 2 if top_k == 1 else 1))

    @classmethod
    def for_plain_sums(cls, width: int, itemsize: int, top_k: int) -> MoveConfig:
        """The same with twice the tokens and warps, for sums without weights.

        4% faster for eight rows of 2,048 or 4,096 bfloat16 (`benchmarks/default_configs.json`), and
        as fast elsewhere.
        """
        config = cls.for_parts(width, itemsize, top_k)
        return dataclasses.replace(
            config, block_tokens=2 * config.block_tokens, num_warps=2 * config.num_warps
        )

    @classmethod
    def for_copies(cls, width: int, itemsize: int, top_k: int) -> MoveConfig:
        """A part of each row, to write it to `top_k` rows.

        Two at once, with twice the warps, if rows of more than 2 KiB do not start at multiples of
        256 bytes, so that two programs write to one such piece: 4 to 5% faster.
        """
        config = cls.for_parts(width, itemsize, top_k)
        row_bytes = width * itemsize
        shares = row_bytes > blocks.BYTES_PER_PROGRAM and row_bytes % _PIECE_BYTES > 0
        if shares and top_k >= _LEAST_COPIES:
            return dataclasses.replace(config, num_warps=2 * config.num_warps, block_slots=2)
        return config

    @classmethod
    def for_rows(cls, width: int, itemsize: int) -> MoveConfig:
        """Whole rows, so that a program can reduce over them; very wide ones in several steps.

        Four accesses per thread, two of 8-bit elements, whose registers are as wide as others'; or
        more if that would take over 8 warps. With fewer warps there is less to reduce over, and
        more tokens are in flight where they use few of their slots.
        """
        widest = min(_MAX_ROW_ELEMENTS, _MAX_ROW_BYTES // itemsize)
        block_width = min(blocks.power_of_two(width), widest)
        elements = max(block_width, blocks.BYTES_PER_PROGRAM // itemsize)
        accesses = min(4, 2 * itemsize)
        return cls(*blocks.filled(block_width, elements, itemsize, _MAX_TOKENS, accesses))
