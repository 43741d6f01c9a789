"""Decodes jaxlib's Triton calls.

jaxlib writes protocol buffers and offers no reader. The field numbers below come from its
`triton.proto`, and are the same from 0.8.0 to 0.12.
"""

from __future__ import annotations

import collections
import zlib
from collections.abc import Mapping
from typing import Any


def decode(opaque: bytes) -> dict[str, Any]:
    """Decodes the compressed payload of one custom call.

    Returns:
      `kernel`, the name to show; `entries`, `ptx`, `grid`, `zeroed_bytes` of each array parameter,
      `shared_bytes` and `num_warps`, with an entry for each config that XLA may run; and `saved`,
      the buffers that run-time tuning saves: (input buffer, other buffer, bytes), numbered over
      inputs followed by outputs.
    """
    message = _fields(zlib.decompress(opaque))
    kernel = message[4][0].decode() if message[4] else ""
    launches, saved = message[1][:1], []
    if not launches:
        tuned = _fields(message[2][0])
        launches = [_fields(config)[1][0] for config in tuned[2]]
        saved = [_numbers(buffer, 1, 2, 3) for buffer in tuned[3]]
    names = "entries", "ptx", "grid", "zeroed_bytes", "shared_bytes", "num_warps"
    of_configs = dict(zip(names, zip(*map(_launch, launches), strict=True), strict=True))
    return {"kernel": kernel, **of_configs, "saved": tuple(saved)}


def _launch(data: bytes) -> tuple[Any, ...]:
    """The entry name, PTX, grid, zeroed bytes, shared bytes and warps of one launch."""
    launch = _fields(data)
    code = _fields(launch[1][0])
    num_warps, shared_bytes = _numbers(launch[1][0], 2, 3)
    arrays = [array for parameter in launch[5] for array in _fields(parameter)[1]]
    zeroed_bytes = tuple(_numbers(array, 1)[0] for array in arrays)
    texts = code[1][0].decode(), code[4][0].decode()
    return *texts, _numbers(data, 2, 3, 4), zeroed_bytes, shared_bytes, num_warps


def _numbers(data: bytes, *fields: int) -> Any:
    """Returns the values of some fields; a field that is left out is 0."""
    values = _fields(data)
    return tuple(values[field][0] if values[field] else 0 for field in fields)


def _fields(data: bytes) -> Mapping[int, list[Any]]:
    """Returns the values of a message's fields, ints or bytes, by field number."""
    values: collections.defaultdict[int, list[Any]] = collections.defaultdict(list)
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
        field, wire_type = divmod(varint(), 8)
        if wire_type == 0:
            values[field].append(varint())
            continue
        # Fixed 64 (1) or 32 (5) bits are floating-point scalars.
        size = varint() if wire_type == 2 else 8 if wire_type == 1 else 4
        values[field].append(data[position : position + size])
        position += size
    return values
