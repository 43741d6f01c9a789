"""What has been run: a small JSON file that a second run goes on from, and that can be merged.

Every program has one entry, under its path, seed and number. So a file holds no program twice, and
those of several processes or machines are merged by putting their entries together.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
from typing import NamedTuple


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

    @classmethod
    def load(cls, file: pathlib.Path) -> State:
        if not file.exists():
            return cls()
        found = json.loads(file.read_text())
        done = {name: Done(*of) for name, of in found["done"].items()}
        return cls(done, {name: Failure(*of) for name, of in found["failures"].items()})

    def save(self, file: pathlib.Path) -> None:
        """By way of another file, so that one that is cut off is never left."""
        text = json.dumps({"done": self.done, "failures": self.failures}, indent=0)
        other = file.with_suffix(".tmp")
        other.write_text(text)
        other.replace(file)

    def merge(self, other: State) -> None:
        self.done |= other.done
        self.failures |= other.failures

    def add(self, name: str, done: Done, failure: Failure | None) -> None:
        self.done[name] = done
        if failure is not None:
            self.failures[name] = failure

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
