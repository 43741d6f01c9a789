"""Memory that also finds races between programs, and uninitialised reads.

Programs run one after another here but at the same time on a GPU, so a kernel can be right here and
wrong there. Two programs race if both access one element, one changes it, not both use atomics, and
nothing orders the two. The last access to each element is kept as the number of a segment, the part
of a program between two of its atomics. Atomics order programs as on a GPU: everything before a
release comes before everything after an acquire of the same address by a later program.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

import numpy as np

from triax.errors import DataRace, UninitializedRead
from triax.interpreting.memory import Access, Buffer, Memory, unsigned

_Program = tuple[int, int, int]
_Address = tuple[int, int]
_WRITES_ONLY = ("atomic xchg", "atomic store")
_IT = "it finds the old value or the new one"
_THAT_ONE = "that one finds the old value or the new one"
_STORED = ("stored", True, "which program {} stored without an atomic: either may come first")
# For each kind of access: the kinds of earlier access by another program that conflict with it,
# whether an access of that earlier kind by the program itself orders the two, and the error's text.
# "Polled" is a volatile or an atomic load.
_CONFLICTS = {
    "loaded": [
        ("stored", True, f"which program {{}} stored: {_IT}"),
        ("updated", True, f"which program {{}} updated with an atomic: {_IT}"),
    ],
    "stored": [
        ("stored", False, "where program {} stored another value: either may stay"),
        ("loaded", False, f"which program {{}} loaded: {_THAT_ONE}"),
        ("polled", False, f"which program {{}} loaded as volatile or with an atomic: {_THAT_ONE}"),
        ("updated", True, "which program {} updated with an atomic: either value may stay"),
    ],
    "polled": [_STORED],
    "updated": [
        _STORED,
        ("loaded", False, "which program {} loaded without an atomic: either may come first"),
    ],
}


class _Trace:
    """For each element, the last segment with one kind of access to it; 0 means none.

    Also keeps the last segment of an earlier program, which the running program's would hide.
    """

    def __init__(self, size: int):
        self.latest = np.zeros(size, np.int32)
        self._earlier = np.zeros(size, np.int32)

    def mark(self, at: np.ndarray, segment: int, first: int) -> None:
        """Records `segment` of the running program, whose first segment is `first`."""
        latest = self.latest[at]
        is_earlier = latest < first
        self._earlier[at[is_earlier]] = latest[is_earlier]
        self.latest[at] = segment

    def of_others(self, at: np.ndarray, first: int, own_orders: bool) -> np.ndarray:
        """Returns other programs' last segments, or 0 if `own_orders` and the own one is later."""
        latest = self.latest[at]
        return np.where(latest < first, latest, 0 if own_orders else self._earlier[at])

    def split(self, parts: int) -> None:
        self.latest, self._earlier = (np.repeat(a, parts) for a in (self.latest, self._earlier))


class _Shadow:
    """The accesses so far to the elements of one writable buffer."""

    def __init__(self, buffer: Buffer, is_fresh: bool):
        self.is_fresh = is_fresh
        self._itemsize = buffer.type.dtype.itemsize
        self.traces = {d: _Trace(buffer.data.nbytes // self._itemsize) for d in _CONFLICTS}

    def at(self, access: Access) -> np.ndarray:
        """Returns the tracked positions that an access covers, one row per accessed element."""
        itemsize = access.elements.itemsize
        if itemsize < self._itemsize:
            # For a pointer to a narrower type, every part is tracked separately from now on.
            for trace in self.traces.values():
                trace.split(self._itemsize // itemsize)
            self._itemsize = itemsize
        parts = itemsize // self._itemsize
        return access.index[:, None] * parts + np.arange(parts)


class CheckedMemory(Memory):
    """`Memory` that raises `DataRace` and `UninitializedRead`.

    `fresh` has the indices of the buffers that start uninitialised.
    """

    def __init__(self, kernel: str, buffers: Sequence[Buffer], fresh: Sequence[int]):
        super().__init__(kernel, buffers)
        self._shadows = {
            id(buffer): _Shadow(buffer, index in fresh)
            for index, buffer in enumerate(buffers)
            if buffer.writable
        }
        self._programs = [self.program]  # the program of each segment; segment 0 is unused
        self._first = 0
        # For each program, its segments with the addresses that they acquire; for each address, the
        # segments that release it.
        self._acquired: dict[_Program, list[tuple[int, _Address]]] = collections.defaultdict(list)
        self._released: dict[_Address, list[int]] = collections.defaultdict(list)

    def enter(self, program: _Program) -> None:
        super().enter(program)
        self._programs.append(program)
        self._first = self._segment

    @property
    def _segment(self) -> int:
        return len(self._programs) - 1

    def _before(self, access: Access, order: str | None, values: np.ndarray | None = None) -> None:
        shadow = self._shadows.get(id(access.buffer))
        if shadow is None:
            return
        at = shadow.at(access)
        changes: bool | np.ndarray = True
        if order:
            does = "polled" if access.action.endswith("load") else "updated"
            places = np.unique(access.index * access.elements.itemsize).tolist()
            addresses = [(id(access.buffer), place) for place in places]
            if "acquire" in order:
                acquired = ((self._segment, address) for address in addresses)
                self._acquired[self.program].extend(acquired)
        elif values is None:
            does = "loaded"
        else:
            does = "stored"
            self._expect_one_value(access, values)
            # A store that changes nothing does not race.
            changes = (_bits(access.elements[access.index]) != _bits(values))[:, None]
        if shadow.is_fresh and does != "stored" and access.action not in _WRITES_ONLY:
            self._expect_written(access, shadow, at)
        for did, own_orders, what in _CONFLICTS[does]:
            segments = shadow.traces[did].of_others(at, self._first, own_orders)
            self._expect_ordered(access, np.where(changes, segments, 0), what)
        shadow.traces[does].mark(at.reshape(-1), self._segment, self._first)
        if order:
            if "release" in order:
                for address in addresses:
                    self._released[address].append(self._segment)
            self._programs.append(self.program)

    def _expect_written(self, access: Access, shadow: _Shadow, at: np.ndarray) -> None:
        written = shadow.traces["stored"].latest[at] | shadow.traces["updated"].latest[at]
        unwritten = (written == 0).any(1)
        if unwritten.any():
            raise UninitializedRead(
                f"{self.where()}: {access.describe(unwritten.argmax())}, which nothing has "
                "written. An output is uninitialised at first: store to it before, name it in "
                "`zeroed_outputs`, or alias it to an operand that holds the initial values."
            )

    def _expect_one_value(self, access: Access, values: np.ndarray) -> None:
        order = np.argsort(access.index, kind="stable")
        bits = _bits(values)[order]
        differs = (np.diff(access.index[order]) == 0) & (bits[1:] != bits[:-1])
        if differs.any():
            what = access.describe(order[differs.argmax()]).removeprefix("store to ")
            raise DataRace(
                f"{self.where()}: one store writes different values to {what}, and any of them may "
                "stay. Give each element one lane, or use an atomic."
            )

    def _expect_ordered(self, access: Access, segments: np.ndarray, what: str) -> None:
        """Raises if a segment of another program is not ordered before the current access."""
        if not segments.any():
            return
        before = self._ordered_before()
        for segment in np.unique(segments[segments > 0]).tolist():
            if segment <= before.get(self._programs[segment], 0):
                continue
            lane = (segments == segment).any(1).argmax()
            raise DataRace(
                f"{self.where()}: {access.describe(lane)}, "
                f"{what.format(self._programs[segment])}. On a GPU nothing orders the two "
                "programs: let one do both, use atomics, or split the kernel in two."
            )

    def _ordered_before(self) -> dict[_Program, int]:
        """Returns each program's last segment that is ordered before the current access."""
        reached: dict[_Program, int] = {}
        # How far the lists of `_acquired` and `_released` have been read.
        walked = collections.Counter[_Program | _Address]()
        todo = [(self.program, self._segment)]
        while todo:
            program, until = todo.pop()
            for segment, address in self._acquired[program][walked[program] :]:
                if segment > until:
                    break
                walked[program] += 1
                for release in self._released[address][walked[address] :]:
                    if release >= segment:
                        break
                    walked[address] += 1
                    other = self._programs[release]
                    if release > reached.get(other, 0):
                        reached[other] = release
                        todo.append((other, release))
        return reached


def _bits(values: np.ndarray) -> np.ndarray:
    return unsigned(np.ascontiguousarray(values))
