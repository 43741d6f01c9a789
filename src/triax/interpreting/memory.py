"""The memory of an interpreted kernel: arrays at virtual addresses, every access checked.

Each buffer lies in the middle of a region of 2**48 bytes of its own, so that an address
tells its buffer and addresses are the same in every run. `moved` keeps a pointer in its
region whatever is added to it, so that no offset reaches another buffer. Nothing is ever
dereferenced: an access becomes an index into a NumPy array, or an error that says which
program did what to which parameter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from triax.binding.launch import ArrayType
from triax.errors import OutOfBounds, ReadOnlyOperand

_REGION_BITS = 48
_REGION = np.uint64(_REGION_BITS)
_REACH = 1 << (_REGION_BITS - 1)
_FAR = _REACH - 64
"""Offsets of this size or more represent all that leave the region."""


def unsigned(array: np.ndarray) -> np.ndarray:
    """The bits of an array as unsigned integers."""
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def _on_unsigned(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda old, new: function(unsigned(old), unsigned(new)).view(old.dtype)


# What an atomic leaves in memory, by the name of Triton's operation.
_ATOMICS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
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
}
_SPOKEN = {"FADD": "add", "UMIN": "min", "UMAX": "max"}


@dataclasses.dataclass
class Buffer:
    """One array in memory: its bytes, and what to call it in an error."""

    name: str
    type: ArrayType
    data: np.ndarray
    writable: bool

    def elements(self, dtype: np.dtype) -> np.ndarray:
        """The buffer as a vector of `dtype`, which need not be its own type."""
        whole = self.data.nbytes // dtype.itemsize * dtype.itemsize
        return self.data[:whole].view(dtype)


class Memory:
    """The buffers of one launch. `program` is the one that accesses them now.

    `_loading`, `_storing` and `_updating` are told of every access that is in bounds, before
    it happens, and may refuse it: `triax.interpreting.checking`.
    """

    def __init__(self, kernel: str, buffers: Sequence[Buffer]):
        self.program = (0, 0, 0)
        self._kernel = kernel
        self._buffers = tuple(buffers)

    def enter(self, program: tuple[int, int, int]) -> None:
        """From here on, accesses are those of `program`."""
        self.program = program

    def address(self, buffer: int) -> int:
        """Where the `buffer`-th buffer begins."""
        return ((buffer + 1) << _REGION_BITS) + _REACH

    @staticmethod
    def moved(addresses: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """`addresses` plus `offsets` in bytes; what would leave a region stays at its end."""
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
        """The values at `addresses`, and `other` (default 0) where the mask is off.

        An atomic load has an `order`: "relaxed", "acquire", "release" or "acquire_release", in
        which it orders the accesses of programs. A volatile one is "volatile", which is relaxed.
        """
        if mask.all():
            return self._read(addresses.reshape(-1), dtype, order).reshape(addresses.shape)
        if other is None:
            result = np.zeros(addresses.shape, dtype)
        else:
            result = np.array(np.broadcast_to(other, addresses.shape), dtype)
        result[mask] = self._read(addresses[mask], dtype, order)
        return result

    def store(
        self, addresses: np.ndarray, values: np.ndarray, mask: np.ndarray, order: str | None = None
    ) -> None:
        """Writes `values` at `addresses` where the mask is on; of equal addresses the last wins."""
        values = np.broadcast_to(values, addresses.shape)[mask]
        access = "atomic store" if order else "store"
        for lanes, buffer, elements, index in self._locate(access, addresses[mask], values.dtype):
            if order:
                self._updating(access, buffer, elements, index, order)
            else:
                self._storing(buffer, elements, index, values[lanes])
            elements[index] = values[lanes]

    def update(
        self,
        operation: str,
        addresses: np.ndarray,
        values: np.ndarray,
        mask: np.ndarray,
        order: str,
    ) -> np.ndarray:
        """An atomic read-modify-write, lane after lane; returns what was there, 0 if masked."""
        combine = _ATOMICS[operation]
        access = "atomic " + _SPOKEN.get(operation, operation.lower())
        old = np.zeros(addresses.shape, values.dtype)
        values = np.broadcast_to(values, addresses.shape)[mask]
        before = np.empty_like(values)
        located = self._locate(access, addresses[mask], values.dtype)
        for lanes, buffer, elements, index in located:
            self._updating(access, buffer, elements, index, order)
            before[lanes] = _sequentially(combine, elements, index, values[lanes])
        old[mask] = before
        return old

    def compare_and_swap(
        self, addresses: np.ndarray, expected: np.ndarray, values: np.ndarray, order: str
    ) -> np.ndarray:
        """Writes each value where memory holds the expected bits; returns what was there."""
        shape, dtype = addresses.shape, values.dtype
        expected = unsigned(np.broadcast_to(expected, shape).reshape(-1))
        values = unsigned(np.broadcast_to(values, shape).reshape(-1))
        before = np.empty_like(values)
        located = self._locate("atomic cas", addresses.reshape(-1), values.dtype)
        for lanes, buffer, elements, index in located:
            self._updating("atomic cas", buffer, elements, index, order)
            for lane, at in zip(np.arange(values.size)[lanes], index, strict=True):
                before[lane] = elements[at]
                if before[lane] == expected[lane]:
                    elements[at] = values[lane]
        return before.view(dtype).reshape(shape)

    def _read(self, addresses: np.ndarray, dtype: np.dtype, order: str | None) -> np.ndarray:
        values = np.empty(addresses.shape, dtype)
        kind = "volatile " if order == "volatile" else "atomic " if order else ""
        access = kind + "load"
        for lanes, buffer, elements, index in self._locate(access, addresses, dtype):
            if order:
                self._updating(access, buffer, elements, index, order)
            else:
                self._loading(buffer, elements, index)
            if isinstance(lanes, slice):
                return elements[index]
            values[lanes] = elements[index]
        return values

    def _loading(self, buffer: Buffer, elements: np.ndarray, index: np.ndarray) -> None:
        """A plain load of ``elements[index]``."""

    def _storing(
        self, buffer: Buffer, elements: np.ndarray, index: np.ndarray, values: np.ndarray
    ) -> None:
        """A plain store: ``elements[index] = values``."""

    def _updating(
        self, access: str, buffer: Buffer, elements: np.ndarray, index: np.ndarray, order: str
    ) -> None:
        """An atomic, or a volatile load, of each of ``elements[index]``."""

    def _locate(
        self, access: str, addresses: np.ndarray, dtype: np.dtype
    ) -> Iterator[tuple[slice | np.ndarray, Buffer, np.ndarray, np.ndarray]]:
        """The buffers behind a vector of addresses, all checked before the first is yielded.

        Yields which lanes fall into a buffer, the buffer, the same as a vector of `dtype`,
        and the lanes' indices into it.
        """
        if addresses.size == 0:
            return
        first, last = (self._owner(ends) for ends in (addresses.min(), addresses.max()))
        if first == last:
            pieces = [(slice(None), int(first))]
        else:
            owners = self._owner(addresses)
            pieces = [(owners == owner, owner) for owner in np.unique(owners).tolist()]
        located = []
        for lanes, owner in pieces:
            if not 0 <= owner < len(self._buffers):
                raise OutOfBounds(
                    f"{self.where()}: {access} at the address {int(addresses[lanes][0]):#x}, "
                    "which belongs to no operand. A loaded or computed number is no valid "
                    "address here, because arrays are not where a GPU has them: pass the array."
                )
            buffer = self._buffers[owner]
            offsets = (addresses[lanes] - np.uint64(self.address(owner))).view(np.int64)
            elements = buffer.elements(dtype)
            index = offsets >> (dtype.itemsize.bit_length() - 1)  # sizes are powers of two
            misaligned = (offsets & (dtype.itemsize - 1)).any()
            if index.min() < 0 or index.max() >= elements.size or misaligned:
                self._refuse(access, buffer, offsets, dtype)
            if not access.endswith("load") and not buffer.writable:
                raise ReadOnlyOperand(
                    f"{self.where()}: {access} to {self._element(buffer, offsets[0])}, an operand "
                    "that no output is aliased to. XLA may share its memory with other values: "
                    "alias an output to the operand, or write to an output of its own."
                )
            located.append((lanes, buffer, elements, index))
        yield from located

    @staticmethod
    def _owner(addresses: np.ndarray | np.uint64) -> Any:
        """The index of the buffer in whose region an address lies; there may be none."""
        return (addresses >> _REGION).astype(np.int64) - 1

    def _refuse(self, access: str, buffer: Buffer, offsets: np.ndarray, dtype: np.dtype) -> None:
        outside = (offsets < 0) | (offsets + dtype.itemsize > buffer.data.nbytes)
        if outside.any():
            first = offsets[outside.argmax()]
            raise OutOfBounds(
                f"{self.where()}: {access} {preposition(access)} {self._element(buffer, first)}, "
                f"outside its {buffer.type.size} elements "
                f"(shape {buffer.type.shape}, {buffer.type.dtype}); "
                f"{np.count_nonzero(outside)} of {offsets.size} active lanes are outside. "
                "Mask the access, or make the array or the grid fit."
            )
        first = offsets[(offsets % dtype.itemsize != 0).argmax()]
        raise OutOfBounds(
            f"{self.where()}: misaligned {access} {preposition(access)} "
            f"{self._element(buffer, first)}: byte {first} of the array is not a multiple of "
            f"{dtype.itemsize}, the size of the element accessed."
        )

    def where(self) -> str:
        """Which program is running, for an error."""
        return f"Kernel `{self._kernel}`, program {self.program}"

    def _element(self, buffer: Buffer, offset: int) -> str:
        if not -_FAR <= offset < _FAR:
            return f"`{buffer.name}` more than {_FAR:.0e} bytes from its start"
        return f"`{buffer.name}` at element {int(offset) // buffer.type.dtype.itemsize}"


def preposition(access: str) -> str:
    """What stands between an access and what it accesses."""
    return "from" if access.endswith("load") else "to"


def _sequentially(
    combine: Callable[..., Any], elements: np.ndarray, index: np.ndarray, values: np.ndarray
) -> np.ndarray:
    """``elements[i] = combine(elements[i], value)`` one by one; returns the old elements."""
    if np.unique(index).size == index.size:
        before = elements[index]
        elements[index] = combine(before, values)
        return before
    before = np.empty_like(values)
    for lane, at in enumerate(index.tolist()):
        before[lane : lane + 1] = elements[at : at + 1]
        elements[at : at + 1] = combine(elements[at : at + 1], values[lane : lane + 1])
    return before
