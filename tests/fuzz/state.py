"""What has been run: a small JSON file that a second run goes on from, and that can be merged.

Every program has one entry, under its path, seed and number. So a file holds no program twice, and
those of several processes or machines are merged by putting their entries together.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import json
import pathlib
from typing import Any, NamedTuple


class Done(NamedTuple):
    """A program that ran: how many of its cases were compared, and how many were wrong."""

    op: str
    key: str
    cases: int
    wrong: int
    seconds: float


class Failure(NamedTuple):
    """One of its cases that was wrong, and a program that shows it; of each program one."""

    text: str
    reproduction: str


@dataclasses.dataclass
class State:
    done: dict[str, Done] = dataclasses.field(default_factory=dict)
    failures: dict[str, Failure] = dataclasses.field(default_factory=dict)
    ran_on: dict[str, str] = dataclasses.field(default_factory=dict)  # by path, the last time

    @classmethod
    def load(cls, file: pathlib.Path) -> State:
        if not file.exists():
            return cls()
        found = json.loads(file.read_text())
        done = {name: Done(*of) for name, of in found["done"].items()}
        failures = {name: Failure(*of) for name, of in found["failures"].items()}
        return cls(done, failures, found.get("ran_on", {}))

    def save(self, file: pathlib.Path) -> None:
        """By way of another file, so that one that is cut off is never left."""
        text = json.dumps(vars(self), indent=0)
        other = file.with_suffix(".tmp")
        other.write_text(text)
        other.replace(file)

    def merge(self, other: State) -> None:
        self.done |= other.done
        self.failures |= other.failures
        self.ran_on |= other.ran_on

    def add(self, name: str, done: Done, failure: Failure | None) -> None:
        self.done[name] = done
        if failure is not None:
            self.failures[name] = failure

    def record(self) -> dict[str, Any]:
        """What was run, by path and op, without the single programs."""
        results: dict[str, dict[str, dict[str, int]]] = {}
        keys = set()
        for name, done in sorted(self.done.items(), key=lambda of: (of[0].split("/")[0], of[1].op)):
            path = name.partition("/")[0]
            zero = {"cases": 0, "programs": 0, "wrong": 0}
            found = results.setdefault(path, {}).setdefault(done.op, zero)
            found["cases"] += done.cases
            found["programs"] += (path, done.key) not in keys
            found["wrong"] += done.wrong
            keys.add((path, done.key))
        written = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {"written": written, "ran_on": self.ran_on, "results": results}

    def table(self) -> str:
        """Cases by op, distinct programs, seconds, and how many cases were wrong."""
        by_op: dict[str, list[Done]] = collections.defaultdict(list)
        for done in self.done.values():
            by_op[done.op].append(done)
        rows = [*sorted(by_op.items()), ("all", [*self.done.values()])]
        lines = [f"{'op':32}{'cases':>10}{'programs':>10}{'seconds':>9}{'wrong':>7}"]
        for op, all_done in rows:
            cases, wrong = sum(d.cases for d in all_done), sum(d.wrong for d in all_done)
            programs = len({d.key for d in all_done})
            seconds = sum(d.seconds for d in all_done)
            lines.append(f"{op:32}{cases:10,}{programs:10,}{seconds:9.0f}{wrong:7,}")
        return "\n".join(lines)
