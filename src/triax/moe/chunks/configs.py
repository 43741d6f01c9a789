"""How the chunk sort's kernels are cut into programs."""

from __future__ import annotations

import dataclasses

_BYTES_PER_PROGRAM = 2 * 1024
_BYTES_PER_ACCESS = 16
_THREADS_PER_WARP = 32
_MAX_WARPS = 8
_MAX_ROWS = 1024
_MAX_WASTE = 1 / 8
_MAX_WAYS = 128
_MAX_PROBES = 1024


@dataclasses.dataclass(frozen=True)
class MoveConfig:
    """One program moves `block_rows` rows by `block_width` elements, both powers of two.

    To find a row's chunk it compares the row with the ends of `search_ways` chunks at a time.
    """

    block_rows: int
    block_width: int
    num_warps: int

    @classmethod
    def heuristic(cls, width: int, itemsize: int) -> MoveConfig:
        """The config for rows of `width` elements of `itemsize` bytes.

        It depends on nothing else, so that a new number of rows or chunks compiles nothing.
        2 KiB a program is one access of 16 bytes for each of 128 threads: programs this small
        move as fast as a copy, and more accesses in one only make it wait for the last of them. A
        row that leaves more than an eighth of its last block idle is cut into narrower blocks,
        down to one access for each thread of a warp.
        """
        elements = _BYTES_PER_PROGRAM // itemsize
        block_width = min(_power_of_two(width), elements)
        narrowest = _BYTES_PER_ACCESS // min(itemsize, _BYTES_PER_ACCESS) * _THREADS_PER_WARP
        while block_width > narrowest and -width % block_width > _MAX_WASTE * width:
            block_width //= 2
        block_rows = min(elements // block_width, _MAX_ROWS)
        accesses = block_rows * block_width * itemsize // _BYTES_PER_ACCESS
        num_warps = max(1, min(_MAX_WARPS, accesses // _THREADS_PER_WARP))
        return cls(block_rows, block_width, num_warps)

    @property
    def search_ways(self) -> int:
        return max(2, min(_MAX_WAYS, _MAX_PROBES // self.block_rows))

    def search_steps(self, num_chunks: int) -> int:
        """The steps of a search among so many chunks, at least one."""
        steps = 1
        while (num_chunks := -(-num_chunks // self.search_ways)) > 1:
            steps += 1
        return steps


@dataclasses.dataclass(frozen=True)
class MapsConfig:
    """The one program of the chunk maps walks over the chunks, `block` at a time."""

    block: int = 1024
    num_warps: int = 4


def _power_of_two(value: int) -> int:
    """The least power of two that is at least `value` and 1."""
    return 1 << max(value - 1, 0).bit_length()
