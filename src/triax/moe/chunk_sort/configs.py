"""Block sizes and warps of the chunk sort's kernels."""

from __future__ import annotations

import dataclasses

from triax.moe.shared import blocks

_MAX_ROWS = 1024
_MAX_WAYS = 128
_MAX_PROBES = 1024


@dataclasses.dataclass(frozen=True)
class ChunkMoveConfig:
    """One program moves `block_rows` rows by `block_width` elements, both powers of two.

    To find a row's chunk, a program compares the row with the ends of `search_ways` chunks at once.
    """

    block_rows: int
    block_width: int
    num_warps: int

    @classmethod
    def heuristic(cls, width: int, itemsize: int) -> ChunkMoveConfig:
        """Returns the config for rows of `width` elements of `itemsize` bytes.

        It depends on nothing else, so that a new number of rows or chunks compiles nothing.
        """
        return cls(*blocks.part(width, itemsize, _MAX_ROWS))

    @property
    def search_ways(self) -> int:
        return max(2, min(_MAX_WAYS, _MAX_PROBES // self.block_rows))

    def search_steps(self, num_chunks: int) -> int:
        """Returns the number of steps, at least one, of a search among `num_chunks` chunks."""
        steps = 1
        while (num_chunks := -(-num_chunks // self.search_ways)) > 1:
            steps += 1
        return steps
