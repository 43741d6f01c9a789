"""Threads that run Triton's compiler.

The calling thread does not run the compiler itself: a signal can interrupt the main thread at any
instruction, and would leave Triton with half-finished state, such as the hash of a kernel, which is
part of its disk cache's key.

These threads are daemons, because a thread cannot be stopped, and a finished program must not wait
for long. Python ends a daemon when it next takes the GIL; inside Triton's C++ that aborts the
process. So the exit waits a while, and then leaves the threads running.
"""

from __future__ import annotations

import atexit
import collections
import ctypes
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from triax.errors import CompilationTimeout

logger = logging.getLogger(__name__)

_EXIT_TIMEOUT_S = 10.0

_all: list[threading.Thread] = []


def start(work: Callable[[], None], team: list[threading.Thread]) -> bool:
    """Starts a thread of `team` that does `work`; False if no thread can be started."""
    thread = threading.Thread(target=work, name="triax-compiler", daemon=True)
    _all[:] = [other for other in _all if other.is_alive()]
    _all.append(thread)
    team.append(thread)  # before the start, because a signal may come right after
    try:
        thread.start()
    except RuntimeError as error:  # too many threads, or the interpreter is about to end
        logger.debug("no thread to compile: %s", error)
        team.remove(thread)
        _all.remove(thread)
        return False
    return True


def join(team: Iterable[threading.Thread], timeout_s: float | None = None) -> None:
    """Waits until the threads have ended, at most `timeout_s`."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    for thread in list(team):
        thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))


def each(
    compile_: Callable[[Any], Any],
    launches: Sequence[Any],
    timeout_s: float | None = None,
    on_each: Callable[[], None] | None = None,
    size: int | None = None,
) -> list[Any]:
    """Compiles launches in threads; returns each result or exception (see `compiler.compile_all`).

    There are `size` threads, by default one per core. Threads suffice: Triton holds the GIL only in
    its front end.
    """
    pending = collections.deque(range(len(launches)))
    begun: dict[int, float] = {}
    finished = queue.SimpleQueue[tuple[int, Any]]()

    def work() -> None:
        while True:
            try:
                index = pending.popleft()
            except IndexError:
                return
            begun[index] = time.monotonic()
            try:
                result = compile_(launches[index])
            except BaseException as error:
                result = error
            finished.put((index, result))

    team: list[threading.Thread] = []
    results: dict[int, Any] = {}
    size, late = min(len(launches), size or os.cpu_count() or 1), 0
    try:
        try:
            for _ in range(size):
                if not start(work, team):
                    break
            if not team:
                work()
            # A late thread goes on in the background and is replaced, but only so many times.
            while len(results) < len(launches) and late <= size:
                running = {begun[index]: index for index in list(begun) if index not in results}
                oldest, now = min(running, default=None), time.monotonic()
                try:
                    age = 0.0 if oldest is None else now - oldest
                    index, result = finished.get(timeout=timeout_s and max(0.0, timeout_s - age))
                except queue.Empty:
                    if oldest is not None:
                        text = f"it was not compiled after {timeout_s} s"
                        results[running[oldest]] = CompilationTimeout(text)
                        late += 1
                        start(work, team)
                else:
                    if index not in results:
                        results[index] = result
                        if on_each is not None:
                            on_each()
        finally:
            pending.clear()
    except BaseException:  # Ctrl-C, mostly
        join(team)
        raise
    text = "it was not waited for, because other launches took too long to compile"
    outcomes = [results.get(index, CompilationTimeout(text)) for index in range(len(launches))]
    for result in outcomes:
        if isinstance(result, BaseException) and not isinstance(result, Exception):
            raise result
    return outcomes


def _finish() -> None:
    try:
        join(_all, _EXIT_TIMEOUT_S)
    finally:
        if any(thread.is_alive() for thread in _all):
            _leave_running()


def _leave_running() -> None:
    """Lets the process end with the program's exit status while threads still run.

    Not by `os._exit`: the status is not known here, and other exit handlers may still have to run.
    """
    libc, libstdcpp = ctypes.CDLL(None), ctypes.CDLL("libstdc++.so.6")
    # Workaround: python <3.14: a daemon thread ends by `pthread_exit`, which unwinds the stack, and
    # where C++ allows no exceptions that calls `std::terminate`. It is made to pause instead.
    libstdcpp["_ZSt13set_terminatePFvvE"](_pointer(libc.pause))  # std::set_terminate
    # These handlers run after Python's own exit, last registered first: files are closed, then the
    # process ends before destructors can free objects that the threads use.
    libc.on_exit(_pointer(libc._exit), None)
    libc.on_exit(_pointer(libc.fcloseall), None)


def _pointer(function: Any) -> ctypes.c_void_p:
    return ctypes.cast(function, ctypes.c_void_p)


atexit.register(_finish)
