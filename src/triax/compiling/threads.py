"""Threads that run Triton's compiler.

The calling thread does not run the compiler itself: a signal can interrupt the main thread at any
instruction, and would leave Triton with half-done state, such as the hash of a kernel, which is
part of the key in the disk cache.

These threads are daemons, because a thread cannot be stopped, and a finished program must not wait
for long. Python ends a daemon when it next takes the interpreter's lock; inside Triton's C++ that
aborts the process. So the exit waits a while, and then leaves the threads running.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

logger = logging.getLogger(__name__)

_EXIT_TIMEOUT_S = 10.0

_all: list[threading.Thread] = []


def start(work: Callable[[], None], team: list[threading.Thread]) -> bool:
    """Starts a thread of `team` that does `work`; False if no thread can be started."""
    thread = threading.Thread(target=work, name="triax-compiler", daemon=True)
    _all[:] = [other for other in _all if other.is_alive()]
    _all.append(thread)
    team.append(thread)  # first: a signal may come as soon as it has started
    try:
        thread.start()
    except RuntimeError as error:  # too many threads, or the interpreter is about to end
        logger.debug("no thread to compile: %s", error)
        team.remove(thread)
        return False
    return True


def join(team: Iterable[threading.Thread], timeout_s: float | None = None) -> None:
    """Waits until the threads have ended, at most `timeout_s`."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    for thread in list(team):
        thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))


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
    # These run after Python's own exit, the last one registered first: files are closed, then the
    # process ends before destructors can take away what the threads use.
    libc.on_exit(_pointer(libc._exit), None)
    libc.on_exit(_pointer(libc.fcloseall), None)


def _pointer(function: Any) -> ctypes.c_void_p:
    return ctypes.cast(function, ctypes.c_void_p)


atexit.register(_finish)
