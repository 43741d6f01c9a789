"""The tuning worker: a process with its own CUDA context that times kernels.

It imports neither JAX nor the rest of Triax. It reports as it goes, so that the program always
knows which candidate is running, and keeps earlier timings. A candidate that faults breaks this
process's context, and one that never ends blocks its device queue; both end this process, not the
program. The process also ends with its parent, and after some time without work.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
import types
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":  # an empty package, so that triax/__init__.py does not run
    _package = sys.modules["triax"] = types.ModuleType("triax")
    _package.__path__ = [str(Path(__file__).resolve().parents[2])]

from triax.tuning.worker import driver, messages

_FIRST_RUNS = 15
_FINAL_RUNS = 60
_FINALISTS = 3
_FINAL_MARGIN = 1.15
# Seconds for the first round's runs of one kernel, and for the whole final round. Slow kernels
# therefore run fewer times, which is enough, because their times vary less.
_FIRST_S = 1.0
_FINAL_S = 2.0
# A kernel's first run is not counted, because it also loads the code, which takes a few
# milliseconds. It is counted if it took longer than this.
_SLOW_MS = 50.0
_REPORT_EVERY_S = 0.25


class Rounds:
    """Times the candidates of a job in two rounds: all of them, then the best again in turns."""

    def __init__(self, bench: driver.Bench, answer: Callable[[Any], None]):
        self.bench, self.job, self.answer = bench, bench.job, answer
        self.deadline = time.monotonic() + self.job.budget_s
        self.loaded: dict[int, tuple[Any, Any]] = {}
        self.samples: dict[int, list[float]] = {}

    def first(self) -> None:
        """Runs each candidate, slow ones fewer times, as long as there is time."""
        count = len(self.job.candidates)
        for index in range(count):
            now = time.monotonic()
            if index and now >= self.deadline:
                return
            share = max(0.0, self.deadline - now) / (count - index)
            self.time(index, _FIRST_RUNS, until=now + min(share, _FIRST_S))

    def final(self) -> None:
        """Runs the fastest candidates again in turns, so that a drifting clock favours none."""
        ranked = sorted(self.samples, key=self.median)
        margin = _FINAL_MARGIN * self.median(ranked[0]) if ranked else 0.0
        close = [index for index in ranked[:_FINALISTS] if self.median(index) <= margin]
        until = min(self.deadline, time.monotonic() + _FINAL_S)
        for _ in range(_FINAL_RUNS // 5 if len(close) > 1 else 0):
            for index in close:
                if time.monotonic() > until:
                    return
                if index in self.samples:
                    self.time(index, 5, until=until)

    def time(self, index: int, runs: int, *, until: float) -> None:
        """Runs a candidate up to `runs` more times, and reports its median so far."""
        bench, candidate = self.bench, self.job.candidates[index]
        self.answer(messages.Started(index))
        reported = time.monotonic()
        try:
            if index not in self.loaded:
                self.loaded[index] = (bench.load(candidate), bench.parameters(candidate))
                first = bench.run(candidate, *self.loaded[index])
                self.samples[index] = [first] if first > _SLOW_MS else []
            samples = self.samples[index]
            for _ in range(runs):
                if samples and (time.monotonic() > until or self.is_slow(index)):
                    break
                if samples and time.monotonic() > reported + _REPORT_EVERY_S:
                    self.report(index)
                    reported = time.monotonic()
                samples.append(bench.run(candidate, *self.loaded[index]))
        except driver.KernelError as error:
            self.samples.pop(index, None)
            fatal = bench.device.is_broken()
            self.answer(messages.Failed(index, str(error), fatal))
            if fatal:
                leave(3)
        except driver.HungError as error:
            self.answer(messages.Failed(index, str(error), fatal=True, late=True))
            leave(4)
        else:
            self.report(index)

    def is_slow(self, index: int) -> bool:
        """Whether a candidate is so much slower than another that more runs are pointless."""
        samples = self.samples[index]
        others = [statistics.median(s) for i, s in self.samples.items() if i != index and s]
        sure = len(samples) >= 3 or samples[0] > _SLOW_MS
        return sure and statistics.median(samples) > 4 * min(others, default=float("inf"))

    def report(self, index: int) -> None:
        self.answer(messages.Timed(index, self.median(index), len(self.samples[index])))

    def median(self, index: int) -> float:
        return statistics.median(self.samples[index])


def work(device: driver.Context, job: messages.Job, answer: Callable[[Any], None]) -> None:
    """Times the candidates of a job and reports on each."""
    bench = driver.Bench(device, job)
    allowed = device.free_bytes() // 2
    if job.limit_bytes is not None:
        allowed = min(allowed, job.limit_bytes)
    if bench.needed_bytes() > allowed:
        answer(
            f"measuring needs {bench.needed_bytes()} bytes of GPU memory, but may use {allowed} "
            "(half of the free memory, or TRIAX_TUNING_BYTES)"
        )
        return
    try:
        bench.allocate()
        rounds = Rounds(bench, answer)
        rounds.first()
        rounds.final()
    finally:
        bench.release()
    answer(None)


def leave(status: int) -> NoReturn:
    """Ends the process immediately: a context that is broken or busy does not shut down."""
    os._exit(status)


def follow_parent(parent: int) -> None:
    """Ends this process when its parent has ended, even while a kernel runs."""
    while os.getppid() == parent:
        time.sleep(0.25)
    leave(5)


def main() -> None:
    descriptor, parent, index = map(int, sys.argv[1:4])
    threading.Thread(target=follow_parent, args=(parent,), daemon=True).start()
    connection = Connection(descriptor)
    device = driver.Context(index)
    connection.send(device.uuid)
    while True:
        try:
            if not connection.poll(float(sys.argv[4])):
                return  # without work for too long
            job = connection.recv()
        except (OSError, EOFError):  # the program has closed the connection
            return
        try:
            work(device, job, connection.send)
        except (driver.DriverError, OSError) as error:  # not a candidate's fault: mostly memory
            connection.send(str(error))
            if device.is_broken():
                leave(6)


if __name__ == "__main__":
    main()
