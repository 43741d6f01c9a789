"""The memory of an interpreted kernel: arrays at virtual addresses, every access checked.

Each buffer lies in the middle of its own region of 2**48 bytes, so that an address identifies its
buffer, and addresses are the same in every run. `moved` keeps a pointer in its region, however
large the offset, so that no pointer reaches another buffer. Nothing is ever dereferenced: an access
becomes an index into a NumPy array, or an error that names the program, access and parameter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from triax.binding.launch import ArrayType
from triax.errors import OutOfBounds, ReadOnlyOperand

_REGION_BITS = 48
_REGION = np.uint64(_REGION_BITS)
_REACH = 1 << (_REGION_BITS - 1)
_FAR = _REACH - 64
"""An offset of this size or more stands for any offset that leaves the region."""


def unsigned(array: np.ndarray) -> np.ndarray:
    """Views the bits of an array as unsigned integers."""
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def _on_unsigned(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda old, new: function(unsigned(old), unsigned(new)).view(old.dtype)


def _swapped(old: np.ndarray, new: np.ndarray, expected: np.ndarray) -> np.ndarray:
    return np.where(unsigned(old) == unsigned(expected), new, old)


# The value that an atomic leaves in memory, by the name of Triton's operation.
_ATOMICS: dict[str, Callable[..., np.ndarray]] = {
    "ADD": np.add,
    "FADD": np.add,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "UMIN": _on_unsigned(np.minimum),
    "UMAX": _on_unsigned(np.maximum),
    "AND": np.bitwise_and,
    "OR": np.bitwise_or,
    "XOR": np.bitwise_xor,
    "XCHG": lambda old, new: new,
    "CAS": _swapped,
}
_SPOKEN = {"FADD": "add", "UMIN": "min", "UMAX": "max"}


@dataclasses.dataclass
class Buffer:
    """One array in memory: its bytes, and its name in errors."""

    name: str
    type: ArrayType
    data: np.ndarray
    writable: bool


@dataclasses.dataclass(frozen=True)
class Access:
    """One operation ("load", "atomic add") on ``elements[index]`` of one buffer.

    `elements` is the buffer as a vector of the accessed dtype, which need not be the buffer's own.
    `lanes` selects the lanes of the operation that access this buffer.
    """

    action: str
    lanes: slice | np.ndarray
    buffer: Buffer
    elements: np.ndarray
    index: np.ndarray

    def describe(self, lane: Any) -> str:
        """Describes the access of one lane for an error."""
        return self.describe_offset(self.index[lane] * self.elements.itemsize)

    def describe_offset(self, offset: int) -> str:
        """Describes the access at an offset, in bytes from the buffer's start, for an error."""
        preposition = "from" if self.action.endswith("load") else "to"
        if -_FAR <= offset < _FAR:
            place = f"at element {int(offset) // self.buffer.type.dtype.itemsize}"
        else:
            place = f"more than {_FAR:.0e} bytes from its start"
        return f"{self.action} {preposition} `{self.buffer.name}` {place}"


class Memory:
    """The buffers of one launch, and the program that accesses them now.

    `_before` is called before every access that is in bounds, and may refuse it; see `checking`.
    """

    def __init__(self, kernel: str, buffers: Sequence[Buffer]):
        self.program = (0, 0, 0)
        self._kernel = kernel
        self._buffers = tuple(buffers)

    def enter(self, program: tuple[int, int, int]) -> None:
        """Attributes the accesses from now on to `program`."""
        self.program = program

    def address(self, buffer: int) -> int:
        """Returns the address at which the `buffer`-th buffer begins."""
        return ((buffer + 1) << _REGION_BITS) + _REACH

    @staticmethod
    def moved(addresses: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Adds `offsets` (bytes) to `addresses`; a sum outside of its region stays at the end."""
        result = addresses + offsets
        if not int(np.bitwise_or.reduce(addresses ^ result, axis=None)) >> _REGION_BITS:
            return result
        region = addresses >> _REGION << _REGION
        edge = np.where(offsets.view(np.int64) < 0, region, region + np.uint64(2 * _REACH - 64))
        return np.where(region == result >> _REGION << _REGION, result, edge)

    def load(
        self,
        addresses: np.ndarray,
        mask: np.ndarray,
        other: np.ndarray | None,
        dtype: np.dtype,
        order: str | None = None,
    ) -> np.ndarray:
        """Returns the values at `addresses`, and `other` (default 0) where the mask is off.

        `order` is None for a plain load, "volatile" (a relaxed load), or the memory order of an
        atomic load: "relaxed", "acquire", "release" or "acquire_release".
        """
        result = np.empty(addresses.shape, dtype)
        result[...] = 0 if other is None else other
        loaded = np.empty(np.count_nonzero(mask), dtype)
        ordering = "volatile " if order == "volatile" else "atomic " if order else ""
        for access in self._locate(ordering + "load", addresses[mask], dtype):
            self._before(access, order)
            loaded[access.lanes] = access.elements[access.index]
        result[mask] = loaded
        return result

    def store(
        self, addresses: np.ndarray, values: np.ndarray, mask: np.ndarray, order: str | None = None
    ) -> None:
        """Writes `values` at `addresses` where the mask is on; the last lane of an address wins."""
        values = np.broadcast_to(values, addresses.shape)[mask]
        action = "atomic store" if order else "store"
        for access in self._locate(action, addresses[mask], values.dtype):
            self._before(access, order, values[access.lanes])
            access.elements[access.index] = values[access.lanes]

    def update(
        self,
        operation: str,
        addresses: np.ndarray,
        operands: Sequence[np.ndarray],
        mask: np.ndarray,
        order: str,
    ) -> np.ndarray:
        """Runs an atomic read-modify-write lane by lane; returns the old values, 0 if masked.

        `operands` are the values and, for "CAS", the values that memory is expected to hold.
        """
        action = "atomic " + _SPOKEN.get(operation, operation.lower())
        masked = [np.broadcast_to(operand, addresses.shape)[mask] for operand in operands]
        replaced = np.empty_like(masked[0])
        for access in self._locate(action, addresses[mask], replaced.dtype):
            self._before(access, order)
            of_lanes = [operand[access.lanes] for operand in masked]
            replaced[access.lanes] = _sequentially(_ATOMICS[operation], access, of_lanes)
        old = np.zeros(addresses.shape, replaced.dtype)
        old[mask] = replaced
        return old

    def _before(self, access: Access, order: str | None, values: np.ndarray | None = None) -> None:
        """Sees an access: atomic or volatile if it has an `order`, else a load, or a store of
        `values`."""

    def _locate(self, action: str, addresses: np.ndarray, dtype: np.dtype) -> list[Access]:
        """Splits a vector of addresses into one checked access for each buffer."""
        if addresses.size == 0:
            return []
        first, last = (self._owner(ends) for ends in (addresses.min(), addresses.max()))
        pieces: list[tuple[slice | np.ndarray, int]] = [(slice(None), int(first))]
        if first != last:
            owners = self._owner(addresses)
            pieces = [(owners == owner, owner) for owner in np.unique(owners).tolist()]
        return [self._checked(action, lanes, owner, addresses, dtype) for lanes, owner in pieces]

    def _checked(
        self,
        action: str,
        lanes: slice | np.ndarray,
        owner: int,
        addresses: np.ndarray,
        dtype: np.dtype,
    ) -> Access:
        if not 0 <= owner < len(self._buffers):
            raise OutOfBounds(
                f"{self.where()}: {action} at the address {int(addresses[lanes][0]):#x}, which "
                "belongs to no operand. The interpreter's addresses are virtual, so a number that "
                "is loaded or computed is not the address of anything: pass the array."
            )
        buffer, size = self._buffers[owner], dtype.itemsize
        offsets = (addresses[lanes] - np.uint64(self.address(owner))).view(np.int64)
        elements = buffer.data[: buffer.data.nbytes // size * size].view(dtype)
        index = offsets >> (size.bit_length() - 1)  # sizes are powers of two
        access = Access(action, lanes, buffer, elements, index)
        outside = (offsets < 0) | (offsets + size > buffer.data.nbytes)
        if outside.any():
            raise OutOfBounds(
                f"{self.where()}: {access.describe_offset(offsets[outside.argmax()])}, "
                f"outside its {buffer.type.size} elements "
                f"(shape {buffer.type.shape}, {buffer.type.dtype}); "
                f"{np.count_nonzero(outside)} of {offsets.size} active lanes are outside. "
                "Mask the access, or make the array or the grid fit."
            )
        misaligned = offsets & (size - 1) != 0
        if misaligned.any():
            offset = offsets[misaligned.argmax()]
            raise OutOfBounds(
                f"{self.where()}: misaligned {access.describe_offset(offset)}: byte {offset} of "
                f"the array is not a multiple of {size}, the size of the element accessed."
            )
        if not action.endswith("load") and not buffer.writable:
            raise ReadOnlyOperand(
                f"{self.where()}: {access.describe(0)}, an operand that no output is aliased to. "
                "XLA may share its memory with other values: alias an output to the operand, or "
                "write to a separate output."
            )
        return access

    @staticmethod
    def _owner(addresses: np.ndarray | np.uint64) -> Any:
        """Returns the index of the region that an address lies in, which may have no buffer."""
        return (addresses >> _REGION).astype(np.int64) - 1

    def where(self) -> str:
        """Names the kernel and its running program for an error."""
        return f"Kernel `{self._kernel}`, program {self.program}"


def _sequentially(
    combine: Callable[..., Any], access: Access, operands: Sequence[np.ndarray]
) -> np.ndarray:
    """Sets ``element = combine(element, *operands)`` lane by lane; returns the old elements."""
    elements, index = access.elements, access.index
    if np.unique(index).size == index.size:
        before = elements[index]
        elements[index] = combine(before, *operands)
        return before
    before = np.empty_like(operands[0])
    for lane, at in enumerate(index.tolist()):
        old, own = elements[at : at + 1], slice(lane, lane + 1)
        before[own] = old
        elements[at : at + 1] = combine(old, *(operand[own] for operand in operands))
    return before
