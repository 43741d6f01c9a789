"""Fuzzes the MoE ops: `make fuzz ARGS="--cases 10000 --seed 7"`, or python -m tests.fuzz.

A second run with the same --state goes on where the first stopped. Files of other processes or
machines, which ran other seeds or numbers (--first), are merged by --merge. See docs/checking.md.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import pathlib
import shutil
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.fuzz.state import State


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", choices=("triton", "xla", "interpret"))
    parser.add_argument("--cases", type=int, default=10_000, help="stop after so many")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="or after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first program")
    parser.add_argument("--each", type=int, help="cases of each program")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--state", type=pathlib.Path, help="a JSON file of what has been run")
    parser.add_argument("--merge", type=pathlib.Path, nargs="+", help="others to put into --state")
    parser.add_argument("--again", action="store_true", help="what was wrong in --state first")
    parser.add_argument("--record", type=pathlib.Path, help="a JSON file for the counts of --state")
    asked = parser.parse_args()
    # Before JAX and NumPy start, here and in the processes that this one starts, one for a core.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if shutil.which("nvidia-smi") is None:
        from tests import conftest  # noqa: F401  # several devices, and programs that compile soon
    from tests.fuzz import known, many, state

    kept = state.State.load(asked.state) if asked.state else state.State()
    if asked.merge:
        for file in asked.merge:
            kept.merge(state.State.load(file))
        return finish(asked, kept)
    import jax

    path = asked.path or ("triton" if jax.default_backend() == "gpu" else "xla")
    if path == "triton" and jax.default_backend() != "gpu":
        parser.error("--path triton needs a GPU that JAX can use")
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("jax", "triton"))
    kept.ran_on[path] = ", ".join((jax.devices()[0].device_kind, *versions))
    each = asked.each or (8 if path == "interpret" else 256)
    for name, text in known.run_all(path):
        kept.failures.pop(f"{path}/known/{name}", None)
        print(f"known bug: {name}: {text}", flush=True)
        if text.startswith("wrong"):
            where = f"# tests/fuzz/known.py: {name}"
            kept.failures[f"{path}/known/{name}"] = state.Failure(text, where)

    again = []
    if asked.again:
        again = [many.Job.named(name, each) for name in kept.failures if name in kept.done]
        again = [job for job in again if job.path == path]
        for job in again:
            del kept.done[job.name], kept.failures[job.name]

    def todo() -> Iterator[many.Job]:
        yield from again
        left = asked.cases - sum(job.cases for job in again)
        for number in itertools.count(asked.first):
            job = many.Job(path, asked.seed, number, min(each, left), path == "triton")
            if left <= 0:
                return
            if job.name not in kept.done and job not in again:
                left -= job.cases
                yield job

    saved = start = time.monotonic()
    for job, done, failure in many.run_all(todo(), asked.jobs, start + asked.seconds):
        kept.add(job.name, done, failure)
        if failure:
            print(f"\n# wrong, {job.name}\n{failure.reproduction}\n", flush=True)
        if asked.state and time.monotonic() > saved + 5:
            kept.save(asked.state)
            saved = time.monotonic()
    print(f"{path}, seed {asked.seed}, {time.monotonic() - start:.0f} s, JAX {jax.__version__}")
    return finish(asked, kept)


def finish(asked: argparse.Namespace, kept: State) -> int:
    if asked.state:
        kept.save(asked.state)
    if asked.record:
        asked.record.write_text(json.dumps(kept.record(), indent=1) + "\n")
    print(kept.table())
    for name, failure in kept.failures.items():
        print(f"wrong: {name}: {failure.text}")
    return 1 if kept.failures else 0


if __name__ == "__main__":
    sys.exit(main())
