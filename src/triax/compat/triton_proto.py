"""Decodes jaxlib's Triton calls.

jaxlib writes protocol buffers and offers no reader. The field numbers below come from its
`triton.proto`, and are the same from 0.8.0 to 0.12.
"""

from __future__ import annotations

import collections
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple


class KernelCall(NamedTuple):
    """One launch: entry name, PTX, grid, and bytes zeroed for each array parameter."""

    entry: str
    ptx: str
    grid: tuple[int, int, int]
    zeroed_bytes: tuple[int, ...]


class Opaque(NamedTuple):
    """A custom call's payload: its launches, and the buffers that run-time tuning saves.

    `saved` has triples of input buffer, other buffer and bytes; buffers are numbered over inputs
    followed by outputs.
    """

    name: str
    calls: tuple[KernelCall, ...]
    saved: tuple[tuple[int, int, int], ...]


def decode(opaque: bytes) -> Opaque:
    """Decodes the compressed payload of one custom call."""
    message = _fields(zlib.decompress(opaque))
    name = message[4][0].decode() if message[4] else ""
    if message[1]:
        return Opaque(name, (_kernel_call(message[1][0]),), ())
    tuned = _fields(message[2][0])
    configs = tuple(_kernel_call(_fields(config)[1][0]) for config in tuned[2])
    return Opaque(name, configs, tuple(_numbers(saved, 1, 2, 3) for saved in tuned[3]))


def _kernel_call(data: bytes) -> KernelCall:
    call = _fields(data)
    kernel = _fields(call[1][0])
    arrays = [array for parameter in call[5] for array in _fields(parameter)[1]]
    zeroed_bytes = tuple(_numbers(array, 1)[0] for array in arrays)
    entry, ptx = kernel[1][0].decode(), kernel[4][0].decode()
    return KernelCall(entry, ptx, _numbers(data, 2, 3, 4), zeroed_bytes)


def _numbers(data: bytes, *fields: int) -> Any:
    """Returns the values of some fields; a field that is left out is 0."""
    found = _fields(data)
    return tuple(found[field][0] if found[field] else 0 for field in fields)


def _fields(data: bytes) -> Mapping[int, list[Any]]:
    """Returns the values of a message's fields, ints or bytes, by field number."""
    found: collections.defaultdict[int, list[Any]] = collections.defaultdict(list)
    position = 0

    def varint() -> int:
        nonlocal position
        shift = value = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while position < len(data):
        field, kind = divmod(varint(), 8)
        if kind == 0:
            found[field].append(varint())
            continue
        # Fixed 64 (1) or 32 (5) bits are floating-point scalars.
        size = varint() if kind == 2 else 8 if kind == 1 else 4
        found[field].append(data[position : position + size])
        position += size
    return found
