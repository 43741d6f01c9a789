"""The program's side of the tuning worker: starts it, talks to it, ends it.

One worker per GPU serves the whole process. It ends by itself after a minute without work
and is started anew when there is some; it is killed only when it hangs. It goes with its parent.
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

from triax.bridge.errors import TuningError
from triax.tuning.worker import messages

_START_TIMEOUT_S = 60.0
_IDLE_S = 60.0


class Ended(TuningError):
    """The worker is gone, or does not answer any more."""


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
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the program; it ends the worker itself
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
        assert stream is not None
        with contextlib.suppress(OSError, ValueError, EOFError, pickle.UnpicklingError):
            while len(header := stream.read(8)) == 8:
                (size,) = struct.unpack("<q", header)
                self._answers.put(pickle.loads(stream.read(size)))
        self._answers.put(None)

    def _drain_errors(self) -> None:
        assert self._process.stderr is not None
        with contextlib.suppress(OSError, ValueError):
            for line in self._process.stderr:
                self._errors[:] = [*self._errors[-20:], line]

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def ready(self) -> messages.Ready:
        """What the worker says first: that its GPU answers, and which it is.

        Raises:
          Ended: it ended, or says nothing, instead.
        """
        if self._ready is None:
            found = self.answer(_START_TIMEOUT_S)
            assert isinstance(found, messages.Ready)
            self._ready = found
        return self._ready

    def send(self, job: messages.Job) -> None:
        data = pickle.dumps(job)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # its end shows in the answers
            self._process.stdin.write(struct.pack("<q", len(data)) + data)
            self._process.stdin.flush()

    def answer(self, timeout_s: float) -> Any:
        """The next answer.

        Raises:
          Ended: the worker ended, or said nothing for so long; it is killed then.
        """
        try:
            found = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            self.kill()
            raise Ended(f"the tuning worker said nothing for {timeout_s:g} s") from None
        if found is None:
            self.kill()  # it is gone, but its pipes are still open
            last = b"".join(self._errors[-3:]).decode(errors="replace").strip()
            raise Ended(f"the tuning worker ended{': ' * bool(last)}{last}")
        return found

    def kill(self) -> None:
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


_workers: dict[int, Worker] = {}
_lock = threading.Lock()


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
