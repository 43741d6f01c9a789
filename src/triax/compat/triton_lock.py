"""The lock that keeps compiling and interpreting apart in one process.

Triton's interpreter replaces functions of `triton.language` while it runs, and its grid index is a
global: compiling meanwhile, or interpreting a second kernel, gives nonsense. Any number of threads
may compile together; a thread that interprets is alone. Do not wait on JAX while holding the lock:
JAX may be waiting for a callback on another device, which needs it.

Ctrl-C can interrupt the main thread between any two instructions, even in a `finally` or in
Python's own locks, so nothing here relies on clean-up code having run. A turn ends when its lock is
released. A `with` statement holds that lock, and both of its ends are written in C, so no exception
comes between the end of the block and the release. If an interrupted turn leaves Triton patched,
the next turn undoes it.
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
    """One thread's turn. It holds `held` until it ends or is interrupted."""

    def __init__(self, alone: bool):
        self.alone = alone
        self.thread = threading.get_ident()
        self.held = threading.Lock()

    @property
    def is_over(self) -> bool:
        return not self.held.locked()

    def wait(self) -> None:
        """Waits until it is over."""
        # By polling, because a signal can end a turn before it wakes those who wait for it. The
        # pauses are a tenth of the time waited so far.
        began = time.monotonic()
        while not self.is_over:
            time.sleep(min(_LONGEST_NAP_S, 1e-5 + (time.monotonic() - began) / 10))


class _Line:
    """Turns, first come, first served; a turn that is `alone` overlaps with no other."""

    def __init__(self) -> None:
        self._turns: list[_Turn] = []

    def run(self, work: Callable[[_Turn], T], *, alone: bool) -> T:
        mine = _Turn(alone)
        with mine.held:
            self._turns.append(mine)
            try:  # no loop here: Python 3.13 compiles a jump in it to be outside of the `with`
                self._wait_for_others(mine)
                return work(mine)
            finally:
                self._forget(mine)

    def _wait_for_others(self, mine: _Turn) -> None:
        for other in list(self._turns):
            if other is mine:
                break
            if mine.alone or other.alone:
                other.wait()
            if other.is_over:
                self._forget(other)

    def _forget(self, turn: _Turn) -> None:
        with contextlib.suppress(ValueError):  # another thread did
            self._turns.remove(turn)

    def keep_only(self, thread: int) -> bool:
        """Drops the turns of other threads, which are gone; returns whether any is left."""
        self._turns = [t for t in self._turns if t.thread == thread and not t.is_over]
        return bool(self._turns)


class SharedLock:
    """Runs work that threads may share, and work that a thread does alone.

    `prepare` is called before the first sharing thread begins; `undo` before any work alone, and
    when the last thread has left. A signal may interrupt either, which is then called again.
    """

    def __init__(self, prepare: Callable[[], None], undo: Callable[[], None]):
        self._prepare = prepare
        self._undo = undo
        self._line = _Line()
        self._door = _Line()  # sharing threads enter and leave one by one
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
            self._undo()  # what an interrupted turn left
            self._prepare()
        self._inside.append(turn)

    def _leave(self, turn: _Turn) -> None:
        self._inside = [o for o in self._inside if o is not turn and not o.is_over]
        if not self._inside:
            self._undo()

    def _undoing(self, work: Callable[[], T]) -> T:
        self._undo()  # what an interrupted turn left
        try:
            try:
                return work()
            finally:
                self._undo()
        finally:
            self._undo()  # if a signal interrupted the first

    def _after_fork(self) -> None:
        thread = threading.get_ident()
        self._door.keep_only(thread)
        self._inside = [turn for turn in self._inside if turn.thread == thread]
        if not self._line.keep_only(thread):
            self._undo()


TRITON = SharedLock(triton_patches.prepare, patching.undo)
"""Shared by the threads that compile in this process; a thread that interprets is alone."""
