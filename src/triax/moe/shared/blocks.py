"""Cuts rows into blocks, for the configs of all ops that move rows."""

from __future__ import annotations

from typing import NamedTuple

BYTES_PER_PROGRAM = 2 * 1024
_BYTES_PER_ACCESS = 16
_THREADS_PER_WARP = 32
_MAX_WARPS = 8
_MAX_WASTE = 1 / 8


class Block(NamedTuple):
    """The rows, and elements of each row, of one program, both powers of two; and its warps."""

    rows: int
    width: int
    num_warps: int


def part(width: int, itemsize: int, max_rows: int, accesses: int = 1) -> Block:
    """Returns a block for a part of a row of `width` elements, or for several narrow rows.

    A program moves 2 KiB: one 16-byte access for each of 128 threads, or `accesses` for each of
    fewer threads. Programs this small are as fast as a copy. If a row would leave more than an
    eighth of its last block idle, blocks are narrower, down to one access per thread of a warp.
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
    """Returns a block of rows with up to `elements` in all, and `accesses` for each thread."""
    rows = min(elements // block_width, max_rows)
    threads = rows * block_width * itemsize // (_BYTES_PER_ACCESS * accesses)
    return Block(rows, block_width, max(1, min(_MAX_WARPS, threads // _THREADS_PER_WARP)))


def power_of_two(value: int) -> int:
    """Returns the least power of two that is at least `value` and 1."""
    return 1 << max(value - 1, 0).bit_length()
