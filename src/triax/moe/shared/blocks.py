"""How rows are cut into blocks: what the configs of all ops that move rows have in common."""

from __future__ import annotations

from typing import NamedTuple

BYTES_PER_PROGRAM = 2 * 1024
_BYTES_PER_ACCESS = 16
_THREADS_PER_WARP = 32
_MAX_WARPS = 8
_MAX_WASTE = 1 / 8


class Block(NamedTuple):
    """Rows and elements of each that one program handles, powers of two; and its warps."""

    rows: int
    width: int
    num_warps: int


def part(width: int, itemsize: int, max_rows: int, accesses: int = 1) -> Block:
    """A part of a row of `width` elements of `itemsize` bytes, or several narrow rows.

    2 KiB a program is one access of 16 bytes for each of 128 threads, or `accesses` for each of
    fewer: programs this small move as fast as a copy. A row that leaves more than an eighth of its
    last block idle is cut into narrower blocks, down to one access for each thread of a warp.
    """
    elements = BYTES_PER_PROGRAM // itemsize
    block_width = min(power_of_two(width), elements)
    narrowest = _BYTES_PER_ACCESS // min(itemsize, _BYTES_PER_ACCESS) * _THREADS_PER_WARP
    while block_width > narrowest and -width % block_width > _MAX_WASTE * width:
        block_width //= 2
    return filled(block_width, elements, itemsize, max_rows, accesses)


def filled(
    block_width: int, elements: int, itemsize: int, max_rows: int, accesses: int = 1
) -> Block:
    """As many rows as `elements` hold, and warps whose threads have `accesses` each."""
    rows = min(elements // block_width, max_rows)
    threads = rows * block_width * itemsize // (_BYTES_PER_ACCESS * accesses)
    return Block(rows, block_width, max(1, min(_MAX_WARPS, threads // _THREADS_PER_WARP)))


def power_of_two(value: int) -> int:
    """The least power of two that is at least `value` and 1."""
    return 1 << max(value - 1, 0).bit_length()
