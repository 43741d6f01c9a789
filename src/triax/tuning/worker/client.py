"""The program's side of the tuning worker: starts it, talks to it, ends it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from triax.errors import TuningError
from triax.tuning.worker import messages

_START_TIMEOUT_S = 60.0
_LAST_BYTES = 12_000


class Ended(TuningError):
    """The worker has ended, or no longer answers."""


class Worker:
    """A process that does one job on a GPU, and the connection to it.

    It also ends with its parent. After `close` it can be started again, for another job.
    """

    def __init__(self, device: int):
        self.device, self.uuid = device, ""
        self._process: subprocess.Popen[bytes] | None = None
        self._files = contextlib.ExitStack()

    def start(self) -> None:
        """Starts the process, if it is not; returns before it is ready.

        Raises:
          TuningError: the process cannot be started.
        """
        if self._process is not None:
            return
        try:
            if not sys.executable:
                raise OSError("there is no Python to run")
            self._connection, theirs = map(self._files.enter_context, multiprocessing.Pipe())
            # A file, because a pipe would have to be read.
            self._printed = tempfile.TemporaryFile()  # noqa: SIM115
            self._files.enter_context(self._printed)
            program = Path(__file__).with_name("process.py")
            arguments = (program, theirs.fileno(), os.getpid(), self.device)
            self._process = subprocess.Popen(
                [sys.executable, "-P", *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C goes to the program, which ends the worker
            )
            theirs.close()
        except OSError as error:
            self._files.close()
            raise TuningError(f"the tuning worker cannot be started: {error}") from error

    def ready(self) -> None:
        """Starts the process, if it is not, and waits for its GPU, which then has a `uuid`.

        Raises:
          TuningError: the process cannot be started, or ended or sent nothing instead.
        """
        self.start()
        self.uuid = self.uuid or self.answer(_START_TIMEOUT_S)

    def send(self, job: messages.Job) -> None:
        with contextlib.suppress(OSError):  # `answer` reports that the worker ended
            self._connection.send(job)

    def answer(self, timeout_s: float) -> Any:
        """The next answer.

        Raises:
          Ended: the worker ended, or sent nothing in that time and was killed.
        """
        assert self._process is not None
        try:
            if self._connection.poll(timeout_s):
                return self._connection.recv()
            reason = f"said nothing for {timeout_s:g} s"
        except (OSError, EOFError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            self._printed.seek(0)
            last = self._printed.read()[-_LAST_BYTES:].decode(errors="replace").strip()
            reason = f"ended{': ' * bool(last)}{last}"
        self.close()
        raise Ended(f"the tuning worker {reason}")

    def close(self) -> None:
        """Ends the process, if there is one."""
        process, self._process, self.uuid = self._process, None, ""
        with self._files:
            if process is not None:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
