"""Lists the workarounds for faults in other projects, from the comments that mark them.

Such a comment is `Workaround: <project> <versions>[, <issue>]: <why>.`, where the versions
are "<3.7" (fixed in 3.7), "3.5 and 3.6", "all" and the like.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

_BEGINS = re.compile(r"# Workaround\b")
_FORM = re.compile(r"Workaround: (jax|jaxlib|triton|xla|python) ([^:,]+)(?:, ([^:]+))?: (.+)")


@dataclasses.dataclass(frozen=True)
class Workaround:
    """One comment that marks a workaround."""

    place: str
    project: str
    versions: str
    issue: str
    why: str

    def has_passed(self, floors: Mapping[str, Version]) -> bool:
        """Whether no supported version has the fault any more.

        `floors` has each project's oldest supported version.
        """
        numbers = [Version(number) for number in re.findall(r"\d+(?:\.\d+)*", self.versions)]
        floor = floors.get(self.project)
        if floor is None or not numbers or re.search(r">|\bon\b|\+", self.versions):
            return False
        last = max(numbers)
        if re.search(r"<(?!=)", self.versions):
            return floor >= last
        return floor.release[: len(last.release)] > last.release


def find(folder: Path) -> tuple[list[Workaround], list[str]]:
    """Returns the workarounds in a folder's Python files, and the places of malformed comments."""
    valid, malformed = [], []
    for path in sorted(folder.rglob("*.py")):
        lines = path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines):
            if (begin := _BEGINS.search(line)) is None or '"' in line[: begin.start()]:
                continue
            text = [line[begin.start() :]]
            for more in lines[number + 1 :]:
                if not more.strip().startswith("#") or _BEGINS.search(more):
                    break
                text.append(more)
            place = f"{path.relative_to(folder)}:{number + 1}"
            match = _FORM.match(" ".join(part.strip().lstrip("# ") for part in text))
            if match is None:
                malformed.append(place)
            else:
                valid.append(Workaround(place, match[1], match[2], match[3] or "", match[4]))
    return valid, malformed


def floors(python: str, requirements: Iterable[str]) -> dict[str, Version]:
    """Returns the oldest supported version of each project, from a package's metadata."""
    lowest = {"python": _floor(SpecifierSet(python))}
    for requirement in map(Requirement, requirements):
        is_extra = "extra" in str(requirement.marker)  # as Triton is
        if requirement.name == "triton" or (requirement.name == "jax" and not is_extra):
            lowest[requirement.name] = _floor(requirement.specifier)
    return {**lowest, "jaxlib": lowest["jax"], "xla": lowest["jax"]}


def _floor(specifiers: SpecifierSet) -> Version:
    return max(Version(s.version) for s in specifiers if s.operator in (">=", "~=", "=="))


def listed() -> str:
    """Lists all workarounds of the installed package, one per line, and marks those that can go."""
    oldest: dict[str, Version] = {}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # run from its sources
        data = importlib.metadata.metadata("triax")
        oldest = floors(data["Requires-Python"], data.get_all("Requires-Dist") or [])
    workarounds, _ = find(Path(__file__).parents[1])
    return "\n".join(
        f"{w.place}: {w.project} {w.versions}{f', {w.issue}' * bool(w.issue)}: {w.why}"
        + " (can go: no supported version has the fault)" * w.has_passed(oldest)
        for w in sorted(workarounds, key=lambda w: (w.project, w.place))
    )
