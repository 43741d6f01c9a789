"""Logs how far a tuning is."""

from __future__ import annotations

import logging
import time

logger = logging.getLogger(__name__)

_QUIET_S, _EVERY_S = 2.0, 5.0


class Progress:
    """Logs the steps of a tuning that takes longer than two seconds, a line every five.

    Every config takes two steps: compiling and timing.
    """

    def __init__(self, name: str, configs: int):
        self.name, self._total, self._done = name, 2 * configs, 0
        self._start = time.monotonic()
        self._next = self._start + _QUIET_S

    def step(self) -> None:
        """Counts one more step as done."""
        self._done += 1
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _EVERY_S
        # A warning, so that it is shown even if logging is not set up.
        logger.warning(
            "tuning %s: %d of %d steps after %.0f s",
            *(self.name, self._done, self._total, now - self._start),
        )
