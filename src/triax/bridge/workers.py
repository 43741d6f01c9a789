"""Threads that run Triton's compiler.

The thread that asks for a kernel does not run the compiler: a signal may end what the main
thread does at any instruction, and Triton would keep what is half done. The hash of a
kernel is one such thing; it is part of the key in the disk cache.

These threads are daemons, because a thread cannot be stopped, and a program that is done
must not wait for long. Python ends a daemon where it next asks for the interpreter's
lock. In the middle of Triton's C++ that aborts the process, so its end waits a while, and
after that sees to it that an abort comes too late.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable

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
            _put_off_aborts()


def _put_off_aborts() -> None:
    """Has the process end with the exit status of the program, whatever the threads do.

    Not by `os._exit`: nobody tells what the status is, and others may have something to do still.
    """
    libc = ctypes.CDLL(None)
    # Until Python 3.14 a daemon ends by `pthread_exit`, for which Triton's C++ aborts. The signal's
    # number is taken for seconds: that long an abort waits, and the process has ended by then.
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
    # The last that is registered comes first: no destructor takes from the threads what they use.
    libc.on_exit.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
    libc.on_exit(ctypes.cast(libc.fcloseall, ctypes.c_void_p), None)


atexit.register(_finish)
