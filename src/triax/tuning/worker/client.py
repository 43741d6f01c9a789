"""The program's side of the tuning worker: starts it, talks to it, ends it.

One worker per GPU serves the whole process. It ends after a minute without work, or with its
parent, and is started again when needed; it is killed only if it hangs.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import queue
import struct
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
    """A worker process and the pipes to it.

    Raises:
      TuningError: the process cannot be started.
    """

    def __init__(self, device: int):
        command = [str(Path(__file__).with_name("process.py")), *map(str, (os.getpid(), device))]
        if not sys.executable:
            raise TuningError("the tuning worker cannot be started: there is no Python to run")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", *command, str(_IDLE_S)],
                bufsize=0,  # no locks: closing a pipe must not wait for its reader
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C goes to the program, which ends the worker
            )
        except OSError as error:
            raise TuningError(f"the tuning worker cannot be started: {error}") from error
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._errors: list[bytes] = []
        self._ready: messages.Ready | None = None
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._drain_errors, daemon=True).start()

    def _read(self) -> None:
        stream = self._process.stdout
        with contextlib.suppress(OSError, ValueError, EOFError, pickle.UnpicklingError):
            while len(header := _read(stream, 8)) == 8:
                (size,) = struct.unpack("<q", header)
                self._answers.put(pickle.loads(_read(stream, size)))
        self._answers.put(None)

    def _drain_errors(self) -> None:
        assert self._process.stderr is not None
        with contextlib.suppress(OSError, ValueError):
            while line := self._process.stderr.read(4096):
                self._errors[:] = [*self._errors[-20:], line]

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
        data = pickle.dumps(job)
        rest = memoryview(struct.pack("<q", len(data)) + data)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # `answer` reports that the worker ended
            while rest:
                rest = rest[self._process.stdin.write(rest) :]

    def answer(self, timeout_s: float) -> Any:
        """The next answer.

        Raises:
          Ended: the worker ended, or sent nothing in that time and was killed.
        """
        try:
            found = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            self.kill()
            raise Ended(f"the tuning worker said nothing for {timeout_s:g} s") from None
        if found is None:
            self.kill()  # it has ended, but its pipes are still open
            last = b"".join(self._errors[-3:]).decode(errors="replace").strip()
            raise Ended(f"the tuning worker ended{': ' * bool(last)}{last}")
        return found

    def kill(self) -> None:
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._close()

    def leave_to_parent(self) -> None:
        """In a forked child: the worker is the parent's, and these pipes are copies."""
        self._process.returncode = 0  # or Python would wait for it here
        self._close()

    def _close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def _read(stream: Any, size: int) -> bytes:
    """Reads `size` bytes from an unbuffered stream, or fewer at its end."""
    parts = []
    while size and (part := stream.read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


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
