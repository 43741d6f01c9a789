"""Shows the progress of tuning: a bar with tqdm on a terminal, else log lines."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from typing import Any

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
        self._bar: Any = None

    def step(self) -> None:
        """Counts one more step as done."""
        self._done += 1
        now = time.monotonic()
        if now < self._speaks:
            return
        # Tuning must not fail because of what the program uses as standard error.
        with contextlib.suppress(Exception):
            if self._bar is None and sys.stderr.isatty():
                from tqdm import tqdm

                self._bar = tqdm(desc=f"tuning {self.name}", total=self._total, leave=False)
            if self._bar is not None:
                self._bar.update(self._done - self._bar.n)
        if self._bar is None and now >= self._next_line:
            self._next_line = now + _LINE_EVERY_S
            done, seconds = f"{self._done} of {self._total} steps", f"{now - self._start:.0f} s"
            # A warning, so that it is shown even if logging is not set up.
            logger.warning("tuning %s: %s after %s", self.name, done, seconds)

    def close(self) -> None:
        if self._bar is not None:
            with contextlib.suppress(Exception):
                self._bar.close()
