"""Many cases, each in a process that may end, and a table of what became of them."""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import functools
import multiprocessing
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

import jax

from tests.moe.placements.case import Placement, Wrong


class Outcome(NamedTuple):
    """What became of a case; `verdict` is "right", "wrong" or "refused"."""

    seed: int
    index: int
    name: str
    verdict: str
    message: str = ""

    def __str__(self) -> str:
        place = f"--seed {self.seed} --case {self.index}"
        return f"{self.verdict} {place} {self.name}: {kind_of(self.message)}"


def outcome(seed: int, index: int) -> Outcome:
    case = Placement(seed, index)
    result = functools.partial(Outcome, seed, index, case.name)
    try:
        case.check()
    except Wrong as error:
        return result("wrong", str(error))
    except Exception as error:
        return result("refused", f"{type(error).__name__}: {error}")
    return result("right")


def outcomes(seed: int, indices: Sequence[int], jobs: int = 1) -> Iterator[Outcome]:
    """In other processes: a check that fails in XLA ends its process."""
    local = threading.local()
    start = functools.partial(
        concurrent.futures.ProcessPoolExecutor,
        1,
        multiprocessing.get_context("spawn"),
        max_tasks_per_child=200,  # JAX keeps what it compiled
    )

    def run(index: int) -> Outcome:
        local.pool = getattr(local, "pool", None) or start()
        try:
            found: Outcome = local.pool.submit(outcome, seed, index).result()
            return found
        except BrokenProcessPool:
            local.pool = None
            return Outcome(
                seed, index, Placement(seed, index).name, "refused", "The process ended."
            )

    with concurrent.futures.ThreadPoolExecutor(jobs) as threads:
        yield from threads.map(run, indices)


def kind_of(message: str) -> str:
    """A message without what differs from case to case."""
    line = next(filter(None, map(str.strip, message.splitlines())), "")
    return re.sub(r"\d+", "N", re.sub(r"\[[^\]]*\]|\([^()]*\)", "[…]", line))[:160]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--case", type=int, help="this one alone, with all its placements")
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args()
    if asked.case is not None:
        case = Placement(asked.seed, asked.case)
        print(*case.lines, sep="\n", flush=True)
        case.say = functools.partial(print, flush=True)
        case.check()
        return
    by_op: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    by_message: dict[str, list[Outcome]] = collections.defaultdict(list)
    start = time.perf_counter()
    for found in outcomes(asked.seed, range(asked.cases), asked.jobs):
        by_op[found.name][found.verdict] += 1
        by_op["all"][found.verdict] += 1
        if found.verdict != "right":
            by_message[f"{found.verdict}: {kind_of(found.message)}"].append(found)
            print(found, flush=True)
    columns = ("right", "wrong", "refused")
    print(f"{'':30}", *(f"{column:>8}" for column in columns))
    for name in [*sorted(by_op.keys() - {"all"}), "all"]:
        print(f"{name:30}", *(f"{by_op[name][column]:8}" for column in columns))
    for message, found in sorted(by_message.items(), key=lambda item: -len(item[1])):
        print(f"{len(found):4} {message}, as --case {found[0].index}")
    print(f"seed {asked.seed}, {time.perf_counter() - start:.0f} s, JAX {jax.__version__}")
