"""Shows the progress of tuning: a bar with tqdm on a terminal, else log lines."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from typing import Any

logger = logging.getLogger(__name__)

_QUIET_S = 2.0
_LINE_EVERY_S = 5.0


class Progress:
    """Shows the steps of a tuning that takes longer than two seconds.

    Every config takes two steps: compiling and timing.
    """

    def __init__(self, name: str, configs: int):
        self.name, self._total, self._done = name, 2 * configs, 0
        self._start = self._shown = time.monotonic()
        self._bar: Any = None

    def step(self) -> None:
        """Counts one more step as done."""
        self._done += 1
        now = time.monotonic()
        if now - self._start < _QUIET_S:
            return
        # Tuning must not fail because of what the program uses as standard error.
        with contextlib.suppress(Exception):
            if self._bar is None and sys.stderr.isatty():
                from tqdm import tqdm

                self._bar = tqdm(desc=f"tuning {self.name}", total=self._total, leave=False)
            if self._bar is not None:
                self._bar.update(self._done - self._bar.n)
        if self._bar is not None:
            return
        if now - self._shown > _LINE_EVERY_S or self._shown == self._start:
            self._shown = now
            # A warning, so that it is shown even if logging is not set up.
            logger.warning(
                "tuning %s: %d of %d steps after %.0f s",
                self.name,
                self._done,
                self._total,
                now - self._start,
            )

    def close(self) -> None:
        if self._bar is not None:
            with contextlib.suppress(Exception):
                self._bar.close()
