"""Mutation testing of what decides, checks and plans: makes small changes that some test must see.

    python -m tools.mutants --jobs 2           # goes on where the last run stopped
    python -m tools.mutants --again            # once more, with more tests, those that survived

Draws a seeded sample of all changes (`operators.py`), runs for each the quick tests that run its
line, those that mirror its file first, and writes `benchmarks/mutants.json`. Changes that cannot be
told apart are in `equivalent.json`, each with its reason.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import functools
import hashlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.mutants.operators import Mutant, mutants
from tools.mutants.running import FAILED, ROOT, Coverage, Ended, Job, Killer, prepare, run

MUTATED = (
    "src/triax/binding",
    "src/triax/emitting",
    "src/triax/moe/plans",
    "src/triax/moe/router",
    "src/triax/moe/products",
    "src/triax/tuning/policy.py",
)
EQUIVALENT = Path(__file__).with_name("equivalent.json")
_START_S = 30.0  # what a fork may take beside its tests
_FIXED_S = 0.01  # what each test takes for pytest and its fixtures
_SLOW_S = 5.0  # no test that takes longer
_QUICK_S = 0.05
_FEW = 5
_NEAR = 12
Covered = dict[str, tuple[float, dict[str, list[int]]]]


def sources() -> list[Path]:
    """The files that are mutated: kernels are Triton's language."""
    found = [file for name in MUTATED for file in sorted((ROOT / name).rglob("*.py"))]
    found += [ROOT / name for name in MUTATED if name.endswith(".py")]
    return [file for file in found if "kernels" not in file.name]


def sample(seed: int, count: int) -> list[Mutant]:
    """A sample that stays nearly the same when the sources change a little."""
    every = population()
    return sorted(every, key=lambda of: hashlib.sha256(f"{seed}{of.key}".encode()).digest())[:count]


@functools.cache
def population() -> list[Mutant]:
    return [mutant for file in sources() for mutant in mutants(file, ROOT)]


def cover(folder: Path, jobs: int) -> Covered:
    """Which lines each test runs; only of test files that have changed since the last time."""
    file = folder / "coverage.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    names = [path.relative_to(ROOT).as_posix() for path in sources()]
    tests = [
        path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "gpu" not in path.parts
    ]
    hashes = {
        path.relative_to(ROOT).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in tests
    }
    known = {name: of for name, of in known.items() if name in hashes}

    def ended(end: Ended) -> None:
        if end.status not in (0, 5):  # all passed; all left out
            print(f"pytest's status {end.status}: {end.job.name}, whose tests are not all used")
        known[end.job.name] = {"hash": hashes[end.job.name], "tests": end.result or {}}
        file.write_text(json.dumps(known))
        print(f"{end.seconds:6.1f} s  {len(end.result or ())} tests of {end.job.name}", flush=True)

    kernels = folder / "kernels"
    missing = [name for name in hashes if known.get(name, {}).get("hash") != hashes[name]]
    chosen = ["-m", "not slow and not gpu"]
    run(
        (Job(name, [*chosen, name], Coverage(names, kernels), 600.0) for name in missing),
        jobs,
        ended,
        folder,
    )
    return {name: of for tests in known.values() for name, of in tests["tests"].items()}


def tests_for(mutant: Mutant, covered: Covered, budget_s: float) -> tuple[list[str], float]:
    """The tests that run the line, the closest and quickest first; those of the file if few do.

    After half of the budget, those that run other lines nearby come before those that do not.
    """
    of_file = {name: of[mutant.file] for name, (_, of) in covered.items() if mutant.file in of}
    found = [name for name, lines in of_file.items() if mutant.line in lines]
    if len(found) < _FEW or not mutant.function.rpartition(".")[2].strip("_")[:1].islower():
        found = list(of_file)  # what runs at import is noticed only in the first test
    mirror = f"tests/{mutant.file.removeprefix('src/triax/').rpartition('/')[0]}/"
    same = f"{mirror}test_{Path(mutant.file).name}"

    def distance(name: str) -> tuple[bool, bool, bool, float]:
        runs_it = mutant.line in of_file[name]
        return not runs_it, not name.startswith(same), not name.startswith(mirror), covered[name][0]

    closest = [name for name in sorted(found, key=distance) if covered[name][0] < _SLOW_S]
    cases: collections.Counter[Any] = collections.Counter()
    ranked = []
    for name in closest:
        near = frozenset(line for line in of_file[name] if abs(line - mutant.line) < _NEAR)
        kinds = (name.partition("[")[0], near), near
        ranked.append((*(cases[kind] for kind in kinds), distance(name), name))
        cases.update(kinds)
    quick = [name for name in closest if covered[name][0] < _QUICK_S]
    chosen: dict[str, float] = {}
    for names, limit_s in ((quick, budget_s / 2), ([of[-1] for of in sorted(ranked)], budget_s)):
        for name in names:
            cost_s = covered[name][0] + _FIXED_S
            if name not in chosen and sum(chosen.values()) + cost_s < limit_s:
                chosen[name] = cost_s
    chosen = chosen or dict.fromkeys(closest[:1], 0.0)
    return list(chosen), sum(chosen.values())


def _place(mutant: Mutant) -> tuple[str, ...]:
    return mutant.file, mutant.code, mutant.change


def _reasons() -> dict[tuple[str, ...], str]:
    """Why changes cannot be told apart."""
    return {tuple(of[:3]): of[3] for of in json.loads(EQUIVALENT.read_text())}


def report(drawn: list[Mutant], state: dict[str, Any], seed: int) -> dict[str, Any]:
    """What the record says."""
    reasons = _reasons()
    modules: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    survivors = []
    for mutant in sorted(drawn):
        if (done := state.get(mutant.key)) is None:
            continue
        counts = modules["/".join(mutant.file.split("/")[2:-1])]
        counts["mutants"] += 1
        counts[done["status"]] += 1
        if done["status"] == "survived":
            why = reasons.get(_place(mutant))
            counts["explained"] += why is not None
            shown = {name: getattr(mutant, name) for name in ("file", "line", "code", "change")}
            survivors.append(shown | ({} if why is None else {"equivalent": why}))
    counted = sum(modules.values(), collections.Counter())
    return {
        "written": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "python": sys.version.split()[0],
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "triton")},
        "seed": seed,
        "population": len(population()),
        "all": counted,
        "modules": dict(modules),
        "survivors": survivors,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=28)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=8.0, help="of tests for one mutant")
    parser.add_argument(
        "--again", action="store_true", help="what was not killed, 5 times --seconds"
    )
    parser.add_argument("--only", default="", help="mutants of files with this in their names")
    parser.add_argument("--state", type=Path, default=ROOT / "build" / "mutants")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "mutants.json")
    options = parser.parse_args(arguments)
    if sys.version_info < (3, 12):
        sys.exit("Python 3.12 or newer is needed, to see which lines a test runs.")
    options.state.mkdir(parents=True, exist_ok=True)
    prepare()
    covered = cover(options.state, options.jobs)
    drawn = sample(options.seed, options.count)
    file = options.state / "state.json"
    state: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    reasons = _reasons()
    budget_s = options.seconds * (5 if options.again else 1)

    def jobs() -> Iterator[Job]:
        for mutant in drawn:
            done = state.get(mutant.key)
            again = options.again and done is not None and done["status"] != "killed"
            again &= _place(mutant) not in reasons
            if options.only not in mutant.file or (done is not None and not again):
                continue
            tests, expected_s = tests_for(mutant, covered, budget_s)
            code = (ROOT / mutant.file).read_bytes()
            changed = code[: mutant.start] + mutant.text.encode() + code[mutant.end :]
            killer = Killer(tests, options.state / "kernels")
            limit_s = _START_S + 3 * expected_s
            limit_s *= max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))  # shared machines
            compile(changed, mutant.file, "exec")
            yield Job(mutant.key, ["-x", *tests], killer, limit_s, (mutant.file, changed))

    by_key = {mutant.key: mutant for mutant in drawn}

    def ended(end: Ended) -> None:
        if end.status == FAILED:
            raise RuntimeError(f"The fork failed before it ran a test: {end.log}")
        mutant, tests = by_key[end.job.name], len(end.job.plugin.order)
        status = {None: "timed out", 0: "survived"}.get(end.status, "killed")
        by = end.result if end.result else f"pytest's status {end.status}"
        state[mutant.key] = {"status": status, "seconds": round(end.seconds, 1), "tests": tests}
        state[mutant.key] |= {"by": by} if status == "killed" else {}
        file.with_suffix(".tmp").write_text(json.dumps(state))
        file.with_suffix(".tmp").replace(file)
        where = f"{mutant.file}:{mutant.line}: {mutant.change}"
        print(f"{status:9} {end.seconds:5.1f} s {tests:3} {where}", flush=True)

    run(jobs(), options.jobs, ended, options.state)
    found = report(drawn, state, options.seed)
    options.output.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    print(found["all"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
