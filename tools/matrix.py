"""Runs the tests on every supported JAX and Triton, each in a virtual environment of its own.

What comes in: a table of versions, a folder for the environments, a selection of
tests. What goes out: one line per environment, and a non-zero exit where any
failed. An environment that holds the right versions already is used as it is.
Only the standard library is needed.

    python tools/matrix.py                              # all of them
    python tools/matrix.py --only 0.8.0,0.12            # some
    python tools/matrix.py tests/binding -- -k scalars   # other tests, options for pytest
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_TESTS = (
    *("tests/test_call.py", "tests/test_cases.py", "tests/test_lowering.py"),
    *("tests/test_primitive.py", "tests/test_settings.py"),
    *("tests/binding", "tests/compat", "tests/compiling", "tests/emitting", "tests/interpreting"),
    *("tests/moe", "tests/tuning"),
)
TOOLS = ("pytest", "hypothesis", "numpy", "packaging")
KNOWN_PYTHONS = ((3, 11), (3, 12), (3, 13))


@dataclass(frozen=True)
class Environment:
    """One column of the matrix. `jax` may end in ``.*``; `python` is the oldest that will do."""

    name: str
    jax: str
    triton: str
    python: tuple[int, int] = (3, 11)


ENVIRONMENTS = (
    Environment("0.8.0", "0.8.0", "3.5.1"),
    Environment("0.9.2", "0.9.2", "3.6.0"),
    Environment("0.10.0", "0.10.0", "3.7.1"),
    Environment("0.10.2", "0.10.2", "3.9.0"),
    Environment("0.11.2", "0.11.2", "3.6.0", python=(3, 12)),
    Environment("0.12", "0.12.*", "3.9.0", python=(3, 12)),
)

PROBE = """
import importlib.metadata as metadata, json, sys
found = {"python": "%d.%d.%d" % sys.version_info[:3]}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


class MatrixError(Exception):
    """An environment that cannot be made."""


@dataclass
class Outcome:
    """What the tests did in one environment; `problem` where they could not run to their end."""

    environment: Environment
    versions: dict[str, str] = field(default_factory=dict)
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    problem: str = ""

    @property
    def ok(self) -> bool:
        return not self.problem and not self.failed

    def row(self) -> tuple[str, ...]:
        """The line of the table."""
        return (
            self.versions.get("jax", self.environment.jax),
            self.versions.get("triton", self.environment.triton),
            self.versions.get("python", "-"),
            str(self.passed),
            str(self.failed),
            str(self.skipped),
            f"{self.seconds:.0f} s",
            self.problem or ("ok" if self.ok else "FAILED"),
        )


def python_version(executable: str) -> tuple[int, int] | None:
    """The version of a Python, or None where it does not start (as a pyenv shim may not)."""
    command = [executable, "-c", "import sys; print(*sys.version_info[:2])"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    major, minor = done.stdout.split()
    return int(major), int(minor)


def find_python(oldest: tuple[int, int]) -> str:
    """The oldest Python installed that is at least `oldest`, on PATH or under pyenv.

    Raises:
      MatrixError: there is none.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for wanted in (version for version in KNOWN_PYTHONS if version >= oldest):
        name = f"{wanted[0]}.{wanted[1]}"
        candidates = [shutil.which(f"python{name}"), sys.executable]
        # By patch number: 3.12.10 is newer than 3.12.9.
        folders = [path for path in pyenv.glob(f"{name}.*") if path.name.split(".")[-1].isdigit()]
        folders.sort(key=lambda path: int(path.name.split(".")[-1]), reverse=True)
        candidates += [str(path / "bin" / "python") for path in folders]
        for candidate in candidates:
            if candidate and python_version(candidate) == wanted:
                return candidate
    raise MatrixError(
        f"needs Python {oldest[0]}.{oldest[1]} or later, and none was found on PATH or in {pyenv}"
    )


def installed(python: Path) -> dict[str, str]:
    """The versions in an environment that bear on the tests; empty where there is none."""
    if not python.exists():
        return {}
    names = ("jax", "jaxlib", "triton", "jax-cuda13-plugin", *TOOLS)
    command = [str(python), "-c", PROBE, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else {}


def missing(environment: Environment, found: dict[str, str]) -> list[str]:
    """What an environment with the versions `found` lacks, as words to show."""
    jax = found.get("jax", "")
    wanted = environment.jax
    right_jax = jax.startswith(wanted[:-1]) if wanted.endswith(".*") else jax == wanted
    lacks = [] if right_jax else [f"jax {wanted}"]
    if found.get("triton") != environment.triton:
        lacks.append(f"triton {environment.triton}")
    if not jax or found.get("jax-cuda13-plugin") != jax:
        lacks.append("the CUDA plugin of that jax")
    return lacks + [name for name in TOOLS if name not in found]


def prepare(environment: Environment, folder: Path) -> Path:
    """Makes the environment where it is not there yet; returns its Python.

    Raises:
      MatrixError: no Python will do, or an installation failed.
    """
    python = folder / "bin" / "python"
    if not missing(environment, installed(python)):
        return python
    if not python.exists():
        _run([find_python(environment.python), "-m", "venv", str(folder)])
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    _run([*pip, f"jax=={environment.jax}", f"triton=={environment.triton}", *TOOLS])
    # Without its dependencies: what lowering for CUDA needs, and none of NVIDIA's libraries.
    _run([*pip, "--no-deps", f"jax-cuda13-plugin=={installed(python).get('jax')}"])
    if lacks := missing(environment, installed(python)):
        raise MatrixError(f"{folder} lacks {', '.join(lacks)} after installing")
    return python


def _run(command: list[str]) -> None:
    print("+", *command, flush=True)
    if subprocess.run(command, check=False).returncode:
        raise MatrixError(f"failed: {' '.join(command)}")


def run_tests(python: Path, tests: list[str], options: list[str], outcome: Outcome) -> None:
    """Runs pytest in one environment and writes what came of it into `outcome`."""
    variables = dict(os.environ, JAX_PLATFORMS="cpu", PYTHONPATH=str(ROOT / "src"))
    # The plugin is there by construction, so that its absence is a failure, as in CI.
    variables["CI"] = "true"
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [str(python), "-m", "pytest", "-q", "-m", "not gpu", "-p", "no:cacheprovider"]
        command += [f"--junitxml={report}", *options, *tests]
        code = subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode
        if report.exists():
            for suite in ElementTree.parse(report).getroot().iter("testsuite"):
                total, bad, skipped = (
                    int(suite.get(name, "0")) for name in ("tests", "failures", "skipped")
                )
                bad += int(suite.get("errors", "0"))
                outcome.passed += total - bad - skipped
                outcome.failed += bad
                outcome.skipped += skipped
    if code == 5:
        outcome.problem = "no tests"
    elif code and not outcome.failed:
        outcome.problem = f"pytest exit status {code}"


def table(outcomes: list[Outcome]) -> str:
    """The outcomes in columns."""
    heads = ("JAX", "Triton", "Python", "passed", "failed", "skipped", "time", "")
    rows = [heads, *(outcome.row() for outcome in outcomes)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def choose(only: str | None) -> list[Environment]:
    """The environments named in a comma-separated list; all of them for None."""
    if only is None:
        return list(ENVIRONMENTS)
    by_name = {environment.name: environment for environment in ENVIRONMENTS}
    names = re.split(r"[,\s]+", only.strip(", "))
    if unknown := [name for name in names if name not in by_name]:
        raise SystemExit(f"--only: no {', '.join(unknown)}; there are {', '.join(by_name)}")
    return [by_name[name] for name in names]


def main(arguments: list[str]) -> int:
    options: list[str] = []
    if "--" in arguments:
        cut = arguments.index("--")
        arguments, options = arguments[:cut], arguments[cut + 1 :]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tests", nargs="*", help=f"default: {' '.join(DEFAULT_TESTS)}")
    parser.add_argument("--only", metavar="NAMES", help="some of the environments, by comma")
    parser.add_argument("--env-root", type=Path, default=ROOT / ".matrix", metavar="DIR")
    parser.add_argument("--list", action="store_true", help="show the environments and stop")
    chosen = parser.parse_args(arguments)
    environments = choose(chosen.only)
    if chosen.list:
        for one in environments:
            python = f"{one.python[0]}.{one.python[1]}"
            print(f"{one.name}: JAX {one.jax}, Triton {one.triton}, Python {python} or later")
        return 0
    tests = chosen.tests or [path for path in DEFAULT_TESTS if (ROOT / path).exists()]

    outcomes = []
    for environment in environments:
        print(f"\n=== JAX {environment.jax}, Triton {environment.triton}", flush=True)
        outcome = Outcome(environment)
        start = time.monotonic()
        try:
            python = prepare(environment, chosen.env_root / environment.name)
            outcome.versions = installed(python)
            start = time.monotonic()
            run_tests(python, tests, options, outcome)
        except MatrixError as error:
            outcome.problem = str(error)
            print(f"matrix: {error}", file=sys.stderr)
        outcome.seconds = time.monotonic() - start
        outcomes.append(outcome)
    print(f"\n{table(outcomes)}")
    return 0 if all(outcome.ok for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
