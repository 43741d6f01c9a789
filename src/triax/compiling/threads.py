"""Threads that run Triton's compiler.

The thread that asks for a kernel does not run the compiler: a signal may end what the main
thread does at any instruction, and Triton would keep what is half done. The hash of a
kernel is one such thing; it is part of the key in the disk cache.

These threads are daemons, because a thread cannot be stopped, and a program that is done
must not wait for long. Python ends a daemon where it next asks for the interpreter's
lock. In the middle of Triton's C++ that aborts the process: so its end waits a while, and then
leaves them where they are.
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
    """Has a new thread, one more of `team`, do `work`; False where there can be no more."""
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
    """Waits until the threads have ended, and no longer than `timeout_s`."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    for thread in list(team):
        if thread.is_alive():
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))


def _finish() -> None:
    try:
        join(_all, _EXIT_TIMEOUT_S)
    finally:
        if any(thread.is_alive() for thread in _all):
            _leave_running()


def _leave_running() -> None:
    """Has the process end with the exit status of the program, whatever the threads do.

    Not by `os._exit`: nobody tells what the status is, and others may have something to do still.
    """
    libc, libstdcpp = ctypes.CDLL(None), ctypes.CDLL("libstdc++.so.6")
    # Until Python 3.14 a daemon thread ends by `pthread_exit`, which unwinds the stack, and where
    # C++ allows no exception that ends in `std::terminate`. Now it stops there instead.
    libstdcpp["_ZSt13set_terminatePFvvE"](_pointer(libc.pause))  # std::set_terminate
    # When all of Python's own end is done. The last that is registered comes first, so that no
    # destructor takes from the threads what they use; files are closed before that.
    libc.on_exit(_pointer(libc._exit), None)
    libc.on_exit(_pointer(libc.fcloseall), None)


def _pointer(function: Any) -> ctypes.c_void_p:
    return ctypes.cast(function, ctypes.c_void_p)


atexit.register(_finish)
