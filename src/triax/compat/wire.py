"""Reads back the bytes that jaxlib's Triton calls are made of.

jaxlib writes protocol buffers and offers no reader. The field numbers below are those of
its `triton.proto`, the same from 0.8.0 to 0.12.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """One launch: entry name, PTX, grid, and bytes zeroed for each array parameter."""

    entry: str
    ptx: str
    num_warps: int
    shared_bytes: int
    compute_capability: int
    grid: tuple[int, int, int]
    zeroed_bytes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Opaque:
    """A custom call's payload: its launches, and for run-time tuning what is saved.

    `saved` are triples of input buffer, other buffer and bytes, buffers counted over
    inputs followed by outputs.
    """

    name: str
    calls: tuple[KernelCall, ...]
    saved: tuple[tuple[int, int, int], ...]


def decode(opaque: bytes) -> Opaque:
    """Reads the compressed bytes of one custom call."""
    message = _Message(zlib.decompress(opaque))
    name = message.text(4)
    fixed = message.messages(1)
    if fixed:
        return Opaque(name, (_kernel_call(fixed[0]),), ())
    (tuned,) = message.messages(2)
    configs = tuned.messages(2)
    return Opaque(
        name,
        tuple(_kernel_call(config.messages(1)[0]) for config in configs),
        tuple((a.number(1), a.number(2), a.number(3)) for a in tuned.messages(3)),
    )


def _kernel_call(message: _Message) -> KernelCall:
    (kernel,) = message.messages(1)
    arrays = [a for parameter in message.messages(5) for a in parameter.messages(1)]
    return KernelCall(
        entry=kernel.text(1),
        ptx=kernel.text(4),
        num_warps=kernel.number(2),
        shared_bytes=kernel.number(3),
        compute_capability=kernel.number(6),
        grid=(message.number(2), message.number(3), message.number(4)),
        zeroed_bytes=tuple(array.number(1) for array in arrays),
    )


class _Message:
    """The fields of one protocol-buffer message; absent numbers are 0."""

    def __init__(self, data: bytes):
        self._fields = list(_fields(data))

    def number(self, field: int) -> int:
        return next((v for f, v in self._fields if f == field and isinstance(v, int)), 0)

    def text(self, field: int) -> str:
        found = [v for f, v in self._fields if f == field and isinstance(v, bytes)]
        return found[0].decode() if found else ""

    def messages(self, field: int) -> list[_Message]:
        return [_Message(v) for f, v in self._fields if f == field and isinstance(v, bytes)]


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
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

    def take(count: int) -> bytes:
        nonlocal position
        position += count
        return data[position - count : position]

    while position < len(data):
        key = varint()
        kind = key & 7
        if kind == 0:
            yield key >> 3, varint()
        elif kind == 2:
            yield key >> 3, take(varint())
        else:  # fixed 64 (1) or 32 (5) bits: floating-point scalars, which nobody asks for
            yield key >> 3, take(8 if kind == 1 else 4)
