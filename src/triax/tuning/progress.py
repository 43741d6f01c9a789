"""Shows the progress of tuning: a line on a terminal or in a notebook, else log lines."""

from __future__ import annotations

import contextlib
import logging
import sys
import time

logger = logging.getLogger(__name__)

_LINE_EVERY_S = 5.0


class Progress:
    """Shows the steps of a tuning that takes longer than `quiet_s` seconds.

    Every config takes two steps: compiling and timing.
    """

    def __init__(self, name: str, configs: int, quiet_s: float = 2.0):
        self.name, self._total, self._done = name, 2 * configs, 0
        self._start = time.monotonic()
        self._speaks = self._next_line = self._start + quiet_s
        self._width = 0  # of the line that stands on the terminal

    def step(self) -> None:
        """Counts one more step as done."""
        self._done += 1
        now = time.monotonic()
        if now < self._speaks:
            return
        done, seconds = f"{self._done} of {self._total} steps", f"{now - self._start:.0f} s"
        text = f"tuning {self.name}: {done} after {seconds}"
        # Tuning must not fail because the program has replaced standard error.
        with contextlib.suppress(Exception):
            if _rewrites_lines():
                self._write(text)
                return
        if now >= self._next_line:
            self._next_line = now + _LINE_EVERY_S
            # A warning, so that it is shown even if logging is not set up.
            logger.warning("%s", text)

    def close(self) -> None:
        """Removes the progress line from the terminal."""
        if self._width:
            with contextlib.suppress(Exception):
                self._write("")
                sys.stderr.write("\r")
                sys.stderr.flush()

    def _write(self, text: str) -> None:
        sys.stderr.write("\r" + text.ljust(self._width))
        sys.stderr.flush()
        self._width = len(text)


def _rewrites_lines() -> bool:
    """Whether "\\r" lets the line be overwritten: on a terminal, and in a notebook's output."""
    # IPython's kernel replaces standard error by a class of its own.
    in_notebook = type(sys.stderr).__module__.partition(".")[0] == "ipykernel"
    return in_notebook or sys.stderr.isatty()
