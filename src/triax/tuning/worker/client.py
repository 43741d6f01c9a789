"""The program's side of the tuning worker: starts it, talks to it, ends it.

One worker per GPU serves the whole process. It ends after a minute without work, or with its
parent, and is started again when needed.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from triax.errors import TuningError
from triax.tuning.worker import messages

_START_TIMEOUT_S = 60.0
_IDLE_S = 60.0
_LAST_BYTES = 12_000


class Ended(TuningError):
    """The worker has ended, or no longer answers."""


class Killed(Ended):
    """Another program has killed the worker, or the system has, as when memory is short."""


class Worker:
    """A worker process and the connection to it.

    Raises:
      OSError: the process cannot be started.
    """

    def __init__(self, device: int):
        if not sys.executable:
            raise OSError("there is no Python to run")
        self._connection, theirs = multiprocessing.Pipe()
        # A file, because a pipe must be read, and the worker's own children could hold it open.
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 (`_close` closes it)
        arguments = (Path(__file__).with_name("process.py"), theirs.fileno(), os.getpid(), device)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", *map(str, arguments), str(_IDLE_S)],
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C goes to the program, which ends the worker
            )
        except BaseException:
            self._close()
            raise
        finally:
            theirs.close()
        self._uuid = ""

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ready(self) -> str:
        """Waits for the worker's first message, its GPU's UUID, which shows that it responds.

        Raises:
          Ended: the worker ended or sent nothing.
        """
        self._uuid = self._uuid or self.answer(_START_TIMEOUT_S)
        return self._uuid

    def send(self, job: messages.Job) -> None:
        with contextlib.suppress(OSError):  # `answer` reports that the worker ended
            self._connection.send(job)

    def answer(self, timeout_s: float) -> Any:
        """Waits for the worker's next message.

        Raises:
          Ended: the worker ended, or sent nothing in `timeout_s` and was killed.
        """
        error_class, reason = Ended, f"said nothing for {timeout_s:g} s"
        try:
            if self._connection.poll(timeout_s):
                return self._connection.recv()
        except (OSError, EOFError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            self._printed.seek(0)
            last = self._printed.read()[-_LAST_BYTES:].decode(errors="replace").strip()
            reason = f"ended{': ' * bool(last)}{last}"
            if -(self._process.returncode or 0) in (signal.SIGKILL, signal.SIGTERM):
                error_class, reason = Killed, "ended: another program or the system killed it"
        self.kill()
        raise error_class(f"the tuning worker {reason}")

    def kill(self) -> None:
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._close()

    def leave_to_parent(self) -> None:
        """Gives the worker up in a forked child: it belongs to the parent."""
        self._process.returncode = 0  # or Python would wait for the process here
        self._close()

    def _close(self) -> None:
        self._connection.close()
        self._printed.close()


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
    """Returns the worker of a GPU, started if there is none, before it is ready.

    Raises:
      TuningError: the process cannot be started.
    """
    with _lock:
        worker = _workers.get(device)
        if worker is None or not worker.alive:
            if worker is not None:
                worker.kill()  # the worker ended by itself, but its files are still open
            try:
                worker = _workers[device] = Worker(device)
            except OSError as error:
                raise TuningError(f"the tuning worker cannot be started: {error}") from error
        return worker


def stop_all() -> None:
    """Ends all workers of this process."""
    with _lock:
        for worker in _workers.values():
            worker.kill()
        _workers.clear()


atexit.register(stop_all)
