"""Many programs in turn or in several processes, and what became of each."""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import multiprocessing
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

from tests.fuzz.state import Done, Failure


class Job(NamedTuple):
    """A program to run on so many cases; `repeat` is whether twice, for the same bits."""

    path: str
    seed: int
    number: int
    cases: int
    repeat: bool = False

    @property
    def name(self) -> str:
        return f"{self.path}/{self.seed}/{self.number}"

    @classmethod
    def named(cls, name: str, cases: int) -> Job:
        path, seed, number = name.split("/")
        return cls(path, int(seed), int(number), cases, path == "triton")


Result = tuple[Job, Done, Failure | None]
_BATCH = 64  # cases whose arrays are there at the same time


def run(job: Job) -> Result:
    """Runs one program here. What an op raises is a failure, too."""
    from tests.fuzz import programs  # which starts JAX
    from triax import testing

    start = time.perf_counter()
    program = programs.program(job.seed, job.number, job.path)
    wrong: dict[int, str] = {}
    compared = 0
    try:
        for first in range(0, job.cases, _BATCH):
            cases = range(first, min(first + _BATCH, job.cases))
            batch = [program.inputs(case) for case in cases]
            if job.path == "triton":
                testing.poison(1 << 26)  # what a kernel does not write shows
            results = program.run(batch)
            # A form compiles anew in each run, so its bits are compared in programs without one.
            again = program.run(batch) if job.repeat and not program.form else results
            for case, arrays, found, second in zip(cases, batch, results, again, strict=True):
                if any(found[name].tobytes() != second[name].tobytes() for name in found):
                    wrong[case] = "it has other bits in a second run"
                elif text := program.judge(arrays, found):
                    wrong[case] = text
                compared += 1
    except Exception as error:
        wrong[compared] = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
    seconds = round(time.perf_counter() - start, 2)
    done = Done(program.op, program.key, compared, len(wrong), seconds)
    if not wrong:
        return job, done, None
    case, text = next(iter(wrong.items()))
    first = case - case % _BATCH
    shown = program.reproduction(case, range(first, min(first + _BATCH, job.cases)), text)
    failure = Failure(f"{program.op}, case {case}: {text}", shown)
    return job, done, failure


def run_all(todo: Iterable[Job], processes: int, deadline: float) -> Iterator[Result]:
    """Runs programs until the deadline, of `time.monotonic`; each in a process that may end."""
    todo = itertools.takewhile(lambda _: time.monotonic() < deadline, todo)
    if processes <= 1:
        yield from map(run, todo)
        return
    local = threading.local()
    start = functools.partial(
        concurrent.futures.ProcessPoolExecutor,
        1,
        multiprocessing.get_context("spawn"),
        max_tasks_per_child=100,  # JAX keeps what it compiled
    )

    def elsewhere(job: Job) -> Result:
        local.pool = getattr(local, "pool", None) or start()
        try:
            found: Result = local.pool.submit(run, job).result()
            if found[1].cases < job.cases:  # an error, after which a GPU may be of no more use
                local.pool.shutdown(wait=False)
                local.pool = None
            return found
        except BrokenProcessPool:
            local.pool = None
            text = "The process ended."
            return job, Done("ended", job.name, 0, 1, 0.0), Failure(text, f"# {job}")

    with concurrent.futures.ThreadPoolExecutor(processes) as threads:
        running = {threads.submit(elsewhere, job) for job in itertools.islice(todo, 2 * processes)}
        while running:
            ready, running = concurrent.futures.wait(running, return_when="FIRST_COMPLETED")
            running |= {
                threads.submit(elsewhere, job) for job in itertools.islice(todo, len(ready))
            }
            yield from (future.result() for future in ready)
