"""The program's side of the tuning worker: starts it, talks to it, ends it.

One worker per GPU serves the whole process. It ends after a minute without work, or with its
parent, and is started again when needed; it is killed only if it hangs.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from triax.errors import TuningError
from triax.tuning.worker import messages

_START_TIMEOUT_S = 60.0
_IDLE_S = 60.0


class Ended(TuningError):
    """The worker has ended, or no longer answers."""


class Worker:
    """A worker process and the connection to it.

    Raises:
      TuningError: the process cannot be started.
    """

    def __init__(self, device: int):
        if not sys.executable:
            raise TuningError("the tuning worker cannot be started: there is no Python to run")
        try:
            self._connection, theirs = multiprocessing.Pipe()
        except OSError as error:
            raise TuningError(f"the tuning worker cannot be started: {error}") from error
        arguments = (Path(__file__).with_name("process.py"), theirs.fileno(), os.getpid(), device)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", *map(str, arguments), str(_IDLE_S)],
                bufsize=0,  # no locks: closing a pipe must not wait for its reader
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C goes to the program, which ends the worker
            )
        except OSError as error:
            self._connection.close()
            raise TuningError(f"the tuning worker cannot be started: {error}") from error
        finally:
            theirs.close()
        self._printed: list[bytes] = []
        self._ready: messages.Ready | None = None
        self._reader = threading.Thread(target=self._read_printed, daemon=True)
        try:
            self._reader.start()
        except RuntimeError as error:  # there are as many threads as may be
            self.kill()
            raise TuningError(f"the tuning worker cannot be started: {error}") from error

    def _read_printed(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            while text := self._process.stdout.read(4096):
                self._printed[:] = [*self._printed[-20:], text]

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ready(self) -> messages.Ready:
        """The worker's first message: its GPU answers, and this is its UUID.

        Raises: Ended: it ended or sent nothing instead.
        """
        if self._ready is None:
            found = self.answer(_START_TIMEOUT_S)
            assert isinstance(found, messages.Ready)
            self._ready = found
        return self._ready

    def send(self, job: messages.Job) -> None:
        with contextlib.suppress(OSError):  # `answer` reports that the worker ended
            self._connection.send(job)

    def answer(self, timeout_s: float) -> Any:
        """The next answer.

        Raises:
          Ended: the worker ended, or sent nothing in that time and was killed.
        """
        try:
            if self._connection.poll(timeout_s):
                return self._connection.recv()
        except (OSError, EOFError):
            self._reader.join(1.0)  # one of its own children may keep the pipe open
            self.kill()
            last = b"".join(self._printed[-3:]).decode(errors="replace").strip()
            raise Ended(f"the tuning worker ended{': ' * bool(last)}{last}") from None
        self.kill()
        raise Ended(f"the tuning worker said nothing for {timeout_s:g} s")

    def kill(self) -> None:
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._close()

    def leave_to_parent(self) -> None:
        """In a forked child: the worker is the parent's, and the connection is a copy."""
        self._process.returncode = 0  # or Python would wait for it here
        self._close()

    def _close(self) -> None:
        assert self._process.stdout is not None
        for end in (self._connection, self._process.stdout):
            with contextlib.suppress(OSError):
                end.close()


_workers: dict[int, Worker] = {}
_lock = threading.Lock()


def _start_afresh() -> None:
    global _lock
    _lock = threading.Lock()
    for worker in _workers.values():
        worker.leave_to_parent()
    _workers.clear()


os.register_at_fork(after_in_child=_start_afresh)


def start(device: int) -> Worker:
    """The worker of a GPU, started if there is none. Returns before it is ready.

    Raises:
      TuningError: the process cannot be started.
    """
    with _lock:
        worker = _workers.get(device)
        if worker is None or not worker.alive:
            if worker is not None:
                worker.kill()  # it ended by itself: its pipes are still open
            worker = _workers[device] = Worker(device)
        return worker


def stop_all() -> None:
    """Ends all workers of this process."""
    with _lock:
        for worker in _workers.values():
            worker.kill()
        _workers.clear()


atexit.register(stop_all)
