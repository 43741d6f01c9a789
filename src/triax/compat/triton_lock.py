"""Compiling and interpreting exclude each other in one process.

Triton's interpreter replaces functions of `triton.language` while it runs, and
its grid index is a global: compiling, or interpreting a second kernel, in that
window gives nonsense. Any number of threads may compile together; a thread that
interprets is alone. Nothing here may be held while waiting on JAX: a callback on
another device may be what JAX is waiting for.

Ctrl-C may end what the main thread does between any two instructions, those of a `finally`
and of Python's own locks included, so nothing here relies on a clean-up that has run. A turn
is over when one lock is free. A `with` statement holds it, and both of its ends are written
in C: no exception comes between the end of the block and the release. What a turn has left
replaced in Triton is put back by whoever is next.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from triax.compat import patching, triton_patches

T = TypeVar("T")

_LONGEST_NAP_S = 0.02


class _Turn:
    """What one thread does in a line. It holds `held` until it is done, or torn."""

    def __init__(self, alone: bool):
        self.alone = alone
        self.thread = threading.get_ident()
        self.held = threading.Lock()

    @property
    def is_over(self) -> bool:
        return not self.held.locked()

    def wait(self) -> None:
        """Waits until it is over."""
        # It looks again and again, after a tenth of the time that it has waited: a signal may end
        # a turn before it has woken those who wait for it.
        began = time.monotonic()
        while not self.is_over:
            time.sleep(min(_LONGEST_NAP_S, 1e-5 + (time.monotonic() - began) / 10))


class _Line:
    """Turns in the order in which they come; one that is alone overlaps with no other."""

    def __init__(self) -> None:
        self._turns: list[_Turn] = []

    def run(self, work: Callable[[_Turn], T], *, alone: bool) -> T:
        mine = _Turn(alone)
        with mine.held:
            self._turns.append(mine)
            try:
                for other in list(self._turns):
                    if other is mine:
                        break
                    if alone or other.alone:
                        other.wait()
                    if other.is_over:
                        self._forget(other)
                return work(mine)
            finally:
                self._forget(mine)

    def _forget(self, turn: _Turn) -> None:
        with contextlib.suppress(ValueError):  # another thread did
            self._turns.remove(turn)

    def keep_only(self, thread: int) -> bool:
        """Drops the turns of other threads, which are gone; whether there is one left."""
        self._turns = [t for t in self._turns if t.thread == thread and not t.is_over]
        return bool(self._turns)


class SharedLock:
    """Work that is shared by threads, and work that a thread does alone; first come, first served.

    `prepare` is called before the first of those who share begins; `undo` before anyone begins
    alone, and whenever nobody is left. Either may be torn, and is called again then.
    """

    def __init__(self, prepare: Callable[[], None], undo: Callable[[], None]):
        self._prepare = prepare
        self._undo = undo
        self._line = _Line()
        self._door = _Line()  # those who share pass it one by one, on their way in and out
        self._inside: list[_Turn] = []
        os.register_at_fork(after_in_child=self._after_fork)

    def shared(self, work: Callable[[], T]) -> T:
        return self._line.run(functools.partial(self._share, work), alone=False)

    def alone(self, work: Callable[[], T]) -> T:
        return self._line.run(lambda _: self._undoing(work), alone=True)

    def _share(self, work: Callable[[], T], turn: _Turn) -> T:
        try:
            self._door.run(lambda _: self._enter(turn), alone=True)
            return work()
        finally:
            self._door.run(lambda _: self._leave(turn), alone=True)

    def _enter(self, turn: _Turn) -> None:
        self._inside = [o for o in self._inside if not o.is_over]
        if not self._inside:
            self._undo()  # what a torn turn left
            self._prepare()
        self._inside.append(turn)

    def _leave(self, turn: _Turn) -> None:
        self._inside = [o for o in self._inside if o is not turn and not o.is_over]
        if not self._inside:
            self._undo()

    def _undoing(self, work: Callable[[], T]) -> T:
        self._undo()  # what a torn turn left
        try:
            try:
                return work()
            finally:
                self._undo()
        finally:
            self._undo()  # where a signal has torn the first

    def _after_fork(self) -> None:
        thread = threading.get_ident()
        self._door.keep_only(thread)
        self._inside = [turn for turn in self._inside if turn.thread == thread]
        if not self._line.keep_only(thread):
            self._undo()


TRITON = SharedLock(triton_patches.prepare, patching.undo)
"""Shared by the threads that compile in this process; a thread that interprets is alone."""
