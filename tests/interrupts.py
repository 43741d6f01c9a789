"""Programs in a process of their own, and what interrupts them at random moments."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_program(program, *arguments, timeout=300, **environment):
    """Runs Python code that may import Triax and its tests, and whose lines nothing counts.

    A variable of the `environment` that is None is unset.
    """
    inherited = {name: it for name, it in os.environ.items() if not name.startswith("COVERAGE_")}
    own = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "JAX_PLATFORMS": "cpu"}
    values = {**inherited, **own, **environment}.items()
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env={name: value for name, value in values if value is not None},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


class Storm:
    """Interrupts what the main thread does for `hit`, as Ctrl-C would."""

    def __init__(self, seed):
        self._random = random.Random(seed)
        self._left = 0
        self.caught = 0
        signal.signal(signal.SIGALRM, self._strike)

    def _strike(self, signum, frame):
        # Anywhere but here, which must be able to end, and in what a library hooks into every
        # access to code, where exceptions are lost. (So no code is looked at here.)
        module = frame.f_globals.get("__name__", "").partition(".")[0]
        if self._left and frame.f_globals is not globals() and module != "filelock":
            self._left -= 1
            raise KeyboardInterrupt

    def hit(self, work, within_s, burst=1):
        """Does `work` until `burst` interrupts have struck, which come in quick succession."""
        delay, pause = self._random.uniform(1e-5, within_s), self._random.uniform(2e-5, 3e-4)
        self._left = burst  # a late signal of the last time may strike from here on
        signal.setitimer(signal.ITIMER_REAL, delay, pause)
        while self._left:
            try:  # not `contextlib.suppress`: that can be interrupted itself
                work()
            except KeyboardInterrupt:
                self.caught += 1
            except Exception:  # NumPy makes some interrupts errors of its own
                if self._left == burst:
                    raise
        signal.setitimer(signal.ITIMER_REAL, 0)
