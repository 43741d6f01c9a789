"""The lock that keeps compiling and interpreting apart in one process.

Triton's interpreter replaces functions of `triton.language` while it runs, and its grid index is a
global: compiling meanwhile, or interpreting a second kernel, gives nonsense. Any number of threads
may compile together; a thread that interprets is alone. Do not wait on JAX while holding the lock:
JAX may be waiting for a callback on another device, which needs it.

Ctrl-C can interrupt the main thread between any two instructions, even in a `finally`, so nothing
here relies on clean-up code having run: `with` releases a plain lock in any case, because both of
its ends are written in C, and the next thread undoes the patches that an interrupted thread left.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

from triax.compat import patching, triton_patches

T = TypeVar("T")


class SharedLock:
    """Runs work that threads may share, and work that a thread does alone.

    `prepare` is called before the first sharing thread begins; `undo` before any work alone, and
    when the last thread has left. If a signal interrupts one of them, it is called again.
    """

    def __init__(self, prepare: Callable[[], None], undo: Callable[[], None]):
        self._prepare = prepare
        self._undo = undo
        self._renew()
        os.register_at_fork(after_in_child=self._after_fork)

    def _renew(self) -> None:
        self._entry = threading.Lock()  # held while a thread enters, or is alone
        self._list_lock = threading.Lock()
        self._inside: list[threading.Lock] = []  # one per sharing thread, held until it leaves

    def shared(self, work: Callable[[], T]) -> T:
        mine = threading.Lock()
        with mine:
            with self._entry, self._list_lock:
                self._enter(mine)
            try:
                return work()
            finally:
                with self._list_lock:
                    self._leave(mine)

    def alone(self, work: Callable[[], T]) -> T:
        # Workaround: python >=3.13: the jump of a loop is compiled outside of the `with` around the
        # loop, and an interrupt there would not release the lock. So the loop is in a function.
        with self._entry:
            self._wait_until_all_have_left()
            self._undo()  # patches that an interrupted thread left
            try:
                try:
                    return work()
                finally:
                    self._undo()
            finally:
                self._undo()  # again, as a signal may have interrupted it: tests/interrupts.py

    def _wait_until_all_have_left(self) -> None:
        with self._list_lock:  # a leaving thread holds this lock until its `undo` is done
            inside = list(self._inside)
        for lock in inside:
            with lock:
                pass

    def _enter(self, mine: threading.Lock) -> None:
        self._inside = [other for other in self._inside if other.locked()]
        if not self._inside:
            self._undo()  # patches that an interrupted thread left
            try:
                self._prepare()
            except BaseException:
                self._undo()
                raise
        self._inside.append(mine)

    def _leave(self, mine: threading.Lock) -> None:
        self._inside = [o for o in self._inside if o is not mine and o.locked()]
        if not self._inside:
            self._undo()

    def _after_fork(self) -> None:
        """Renews the locks, which no other thread is left to release in a forked child."""
        self._renew()
        self._undo()


TRITON = SharedLock(triton_patches.prepare, patching.undo)
"""The lock of this process: threads that compile share it, a thread that interprets is alone."""
