"""How the kernels of permute and unpermute are cut into programs."""

from __future__ import annotations

import dataclasses

_BYTES_PER_PROGRAM = 2 * 1024
_BYTES_PER_ACCESS = 16
_THREADS_PER_WARP = 32
_MAX_WARPS = 8
_MAX_TOKENS = 256
_MAX_WASTE = 1 / 8
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
        """A part of each row: 2 KiB a program, one access of 16 bytes for each of 128 threads.

        A row that leaves more than an eighth of its last block idle is cut into narrower
        blocks, down to one access for each thread of a warp.
        """
        elements = _BYTES_PER_PROGRAM // itemsize
        block_width = min(_power_of_two(width), elements)
        narrowest = _BYTES_PER_ACCESS // min(itemsize, _BYTES_PER_ACCESS) * _THREADS_PER_WARP
        while block_width > narrowest and -width % block_width > _MAX_WASTE * width:
            block_width //= 2
        return cls._fill(block_width, elements, itemsize)

    @classmethod
    def for_rows(cls, width: int, itemsize: int) -> MoveConfig:
        """Whole rows, so that a program can reduce over them; very wide ones in several steps."""
        widest = min(_MAX_ROW_ELEMENTS, _MAX_ROW_BYTES // itemsize)
        block_width = min(_power_of_two(width), widest)
        return cls._fill(block_width, max(block_width, _BYTES_PER_PROGRAM // itemsize), itemsize)

    @classmethod
    def _fill(cls, block_width: int, elements: int, itemsize: int) -> MoveConfig:
        block_tokens = min(elements // block_width, _MAX_TOKENS)
        accesses = block_tokens * block_width * itemsize // _BYTES_PER_ACCESS
        num_warps = max(1, min(_MAX_WARPS, accesses // _THREADS_PER_WARP))
        return cls(block_tokens, block_width, num_warps)


@dataclasses.dataclass(frozen=True)
class ZeroConfig:
    """At most `max_programs` programs share the empty rows: two for each multiprocessor of an H200.

    They read the group sizes `block_experts` at a time.
    """

    max_programs: int = 264
    block_experts: int = 256


def _power_of_two(value: int) -> int:
    """The least power of two that is at least `value` and 1."""
    return 1 << max(value - 1, 0).bit_length()
