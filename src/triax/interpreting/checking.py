"""Memory that also finds races between programs, and uninitialised reads.

Programs run one after another here but at the same time on a GPU, so a kernel can be right here and
wrong there: if two programs access one element, one changes it, not both use atomics, and nothing
orders the two. The last access to each element is kept as the number of a segment, the part of a
program between two of its atomics. Atomics order programs as on a GPU: everything before a release
comes before everything after an acquire of the same address by a later program.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from triax.errors import DataRace, UninitializedRead
from triax.interpreting.memory import Buffer, Memory, preposition

_WRITES_ONLY = ("atomic xchg", "atomic store")


class _Trace:
    """For each element, the last segment that did one kind of thing to it; 0 is nobody.

    Also the last one of an earlier program, which the program's own would hide.
    """

    def __init__(self, size: int):
        self.latest = np.zeros(size, np.int32)
        self._before = np.zeros(size, np.int32)

    def mark(self, at: np.ndarray, segment: int, first: int) -> None:
        """Notes `segment`, of the program whose segments begin with `first`."""
        latest = self.latest[at]
        earlier = latest < first
        self._before[at[earlier]] = latest[earlier]
        self.latest[at] = segment

    def of_others(self, at: np.ndarray, first: int) -> np.ndarray:
        """The last segments of other programs."""
        latest = self.latest[at]
        return np.where(latest < first, latest, self._before[at])

    def unless_own(self, at: np.ndarray, first: int) -> np.ndarray:
        """The last segments, where they are of other programs."""
        latest = self.latest[at]
        return np.where(latest < first, latest, 0)

    def split(self, parts: int) -> None:
        self.latest, self._before = (np.repeat(a, parts) for a in (self.latest, self._before))


class _Shadow:
    """Who touched the elements of one buffer that can be written."""

    def __init__(self, buffer: Buffer, is_fresh: bool):
        self.is_fresh = is_fresh
        self.itemsize = buffer.type.dtype.itemsize
        size = buffer.data.nbytes // self.itemsize
        self.stored, self.loaded, self.updated, self.polled = (_Trace(size) for _ in range(4))

    def at(self, index: np.ndarray, itemsize: int) -> np.ndarray:
        """Positions here of elements of `itemsize` bytes, a row for each."""
        if itemsize < self.itemsize:
            # A pointer to a narrower type: from now on every part is tracked separately.
            for trace in (self.stored, self.loaded, self.updated, self.polled):
                trace.split(self.itemsize // itemsize)
            self.itemsize = itemsize
        parts = itemsize // self.itemsize
        return index[:, None] * parts + np.arange(parts)


class CheckedMemory(Memory):
    """`Memory` that raises `DataRace` and `UninitializedRead`.

    `fresh` are the indices of the buffers that are not written yet.
    """

    def __init__(self, kernel: str, buffers: Sequence[Buffer], fresh: Sequence[int]):
        super().__init__(kernel, buffers)
        self._shadows = {
            id(buffer): _Shadow(buffer, index in fresh)
            for index, buffer in enumerate(buffers)
            if buffer.writable
        }
        self._programs = [self.program]  # of each segment; the first is nobody's
        self._first = 0
        self._acquired: dict[tuple[int, ...], list[tuple[int, tuple[int, int]]]] = {}
        self._released: dict[tuple[int, int], list[int]] = {}

    def enter(self, program: tuple[int, int, int]) -> None:
        super().enter(program)
        self._programs.append(program)
        self._first = self._segment

    @property
    def _segment(self) -> int:
        return len(self._programs) - 1

    def _loading(self, buffer: Buffer, elements: np.ndarray, index: np.ndarray) -> None:
        shadow = self._shadows.get(id(buffer))
        if shadow is None:
            return
        at = shadow.at(index, elements.itemsize)
        self._expect_written("load", buffer, shadow, at, index, elements)
        for trace, did in ((shadow.stored, "stored"), (shadow.updated, "updated with an atomic")):
            what = f"which program {{}} {did}: it finds the old value or the new one"
            segments = trace.unless_own(at, self._first)
            self._expect_ordered("load", buffer, segments, index, elements, what)
        shadow.loaded.mark(at.reshape(-1), self._segment, self._first)

    def _storing(
        self, buffer: Buffer, elements: np.ndarray, index: np.ndarray, values: np.ndarray
    ) -> None:
        shadow = self._shadows[id(buffer)]
        self._expect_one_value(buffer, elements, index, values)
        at = shadow.at(index, elements.itemsize)
        # A store that changes nothing does not race.
        changed = (_bits(elements[index]) != _bits(values))[:, None]
        found = "that one finds the old value or the new one"
        for trace, what in (
            (shadow.stored, "where program {} stored another value: either may stay"),
            (shadow.loaded, f"which program {{}} loaded: {found}"),
            (shadow.polled, f"which program {{}} loaded as volatile or with an atomic: {found}"),
            (shadow.updated, "which program {} updated with an atomic: either value may stay"),
        ):
            own_counts = trace is shadow.updated  # an atomic of one's own orders the two
            last = trace.unless_own if own_counts else trace.of_others
            segments = np.where(changed, last(at, self._first), 0)
            self._expect_ordered("store", buffer, segments, index, elements, what)
        shadow.stored.mark(at.reshape(-1), self._segment, self._first)

    def _updating(
        self, access: str, buffer: Buffer, elements: np.ndarray, index: np.ndarray, order: str
    ) -> None:
        shadow = self._shadows.get(id(buffer))
        if shadow is None:
            return
        at = shadow.at(index, elements.itemsize)
        addresses = [(id(buffer), place) for place in np.unique(index * elements.itemsize)]
        if "acquire" in order:
            acquired = self._acquired.setdefault(self.program, [])
            acquired += [(self._segment, address) for address in addresses]
        if access not in _WRITES_ONLY:
            self._expect_written(access, buffer, shadow, at, index, elements)
        what = "which program {} stored without an atomic: either may come first"
        segments = shadow.stored.unless_own(at, self._first)
        self._expect_ordered(access, buffer, segments, index, elements, what)
        if not access.endswith("load"):
            what = "which program {} loaded without an atomic: either may come first"
            segments = shadow.loaded.of_others(at, self._first)
            self._expect_ordered(access, buffer, segments, index, elements, what)
        if "release" in order:
            for address in addresses:
                self._released.setdefault(address, []).append(self._segment)
        trace = shadow.polled if access.endswith("load") else shadow.updated
        trace.mark(at.reshape(-1), self._segment, self._first)
        self._programs.append(self.program)

    def _expect_written(
        self,
        access: str,
        buffer: Buffer,
        shadow: _Shadow,
        at: np.ndarray,
        index: np.ndarray,
        elements: np.ndarray,
    ) -> None:
        if not shadow.is_fresh:
            return
        unwritten = ((shadow.stored.latest[at] | shadow.updated.latest[at]) == 0).any(1)
        if unwritten.any():
            offset = index[unwritten.argmax()] * elements.itemsize
            raise UninitializedRead(
                f"{self.where()}: {access} {preposition(access)} "
                f"{self._element(buffer, offset)}, which nothing has written. An output holds "
                "anything at first: store to it before, name it in `zeroed_outputs`, or alias it "
                "to an operand that holds the first values."
            )

    def _expect_one_value(
        self, buffer: Buffer, elements: np.ndarray, index: np.ndarray, values: np.ndarray
    ) -> None:
        order = np.argsort(index, kind="stable")
        same = np.diff(index[order]) == 0
        if not same.any():
            return
        bits = _bits(values)[order]
        differs = same & (bits[1:] != bits[:-1])
        if differs.any():
            offset = index[order][differs.argmax()] * elements.itemsize
            raise DataRace(
                f"{self.where()}: one store writes different values to "
                f"{self._element(buffer, offset)}, and any of them may stay. Give each element one "
                "lane, or use an atomic."
            )

    def _expect_ordered(
        self,
        access: str,
        buffer: Buffer,
        segments: np.ndarray,
        index: np.ndarray,
        elements: np.ndarray,
        what: str,
    ) -> None:
        """Raises if a segment of another program is not ordered before the current access."""
        if not segments.any():
            return
        before = self._ordered_before()
        for segment in np.unique(segments[segments > 0]).tolist():
            if segment <= before.get(self._programs[segment], 0):
                continue
            lane = (segments == segment).any(1).argmax()
            offset = index[lane] * elements.itemsize
            raise DataRace(
                f"{self.where()}: {access} {preposition(access)} "
                f"{self._element(buffer, offset)}, {what.format(self._programs[segment])}. On a "
                "GPU nothing orders the two programs: let one do both, use atomics, or split the "
                "kernel in two."
            )

    def _ordered_before(self) -> dict[tuple[int, ...], int]:
        """For each program, its last segment that is before what the program does now."""
        reached: dict[tuple[int, ...], int] = {}
        walked: dict[tuple[int, ...], int] = {}
        scanned: dict[tuple[int, int], int] = {}
        todo = [(self.program, self._segment)]
        while todo:
            program, until = todo.pop()
            acquired = self._acquired.get(program, [])
            position = walked.get(program, 0)
            while position < len(acquired) and acquired[position][0] <= until:
                segment, address = acquired[position]
                position += 1
                released = self._released.get(address, [])
                place = scanned.get(address, 0)
                while place < len(released) and released[place] < segment:
                    other = self._programs[released[place]]
                    if released[place] > reached.get(other, 0):
                        reached[other] = released[place]
                        todo.append((other, released[place]))
                    place += 1
                scanned[address] = place
            walked[program] = position
        return reached


def _bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.dtype(f"u{values.dtype.itemsize}"))
