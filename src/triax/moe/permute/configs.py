"""How the kernels of permute and unpermute are cut into programs."""

from __future__ import annotations

import dataclasses

from triax.moe import blocks

_MAX_TOKENS = 256
_MAX_ROW_ELEMENTS = 8 * 1024
_MAX_ROW_BYTES = 32 * 1024


@dataclasses.dataclass(frozen=True)
class MoveConfig:
    """One program handles `block_tokens` tokens and `block_width` elements of each.

    Both are powers of two. Everything follows from the width and the size of an element, so
    that a new number of tokens, rows or experts compiles nothing.
    """

    block_tokens: int
    block_width: int
    num_warps: int

    @classmethod
    def for_parts(cls, width: int, itemsize: int) -> MoveConfig:
        """A part of each row, as `blocks.part` has it."""
        return cls(*blocks.part(width, itemsize, _MAX_TOKENS))

    @classmethod
    def for_rows(cls, width: int, itemsize: int) -> MoveConfig:
        """Whole rows, so that a program can reduce over them; very wide ones in several steps."""
        widest = min(_MAX_ROW_ELEMENTS, _MAX_ROW_BYTES // itemsize)
        block_width = min(blocks.power_of_two(width), widest)
        elements = max(block_width, blocks.BYTES_PER_PROGRAM // itemsize)
        return cls(*blocks.filled(block_width, elements, itemsize, _MAX_TOKENS))


@dataclasses.dataclass(frozen=True)
class ZeroConfig:
    """At most `max_programs` programs share the empty rows: two for each multiprocessor of an H200.

    They read the group sizes `block_experts` at a time.
    """

    max_programs: int = 264
    block_experts: int = 256
