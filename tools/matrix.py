"""Runs the tests on every supported JAX and Triton, each in its own environment under .matrix.

    make matrix                                             # all of them
    make matrix ARGS="-s 'matrix(0.8.0)' 'matrix(0.12.*)'"   # some
    make matrix ARGS="-- --last-failed"                     # what failed the last time
    make matrix ARGS="-- tests/binding -k scalars"          # other tests, options for pytest

It is a file for nox, which lists the environments (`-l`) and says in the end which of them failed.
How many tests of each passed, of all and after those that failed, is in `benchmarks/matrix.json`.
"""

from __future__ import annotations

import datetime
import json
import os
import xml.etree.ElementTree as ET
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.envdir = "../.matrix"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True

# JAX, Triton and Python: every release of Triton from 3.5 on is there, and every Python.
VERSIONS = (
    ("0.8.0", "3.5.1", "3.11"),
    ("0.8.3", "3.5.1", "3.12"),
    ("0.9.2", "3.7.1", "3.11"),
    ("0.10.0", "3.8.0", "3.13"),
    ("0.10.2", "3.9.0", "3.11"),
    ("0.11.2", "3.6.0", "3.12"),
    ("0.12.*", "3.9.0", "3.12"),
)
TESTS = (
    *("tests/test_call.py", "tests/test_cases.py", "tests/test_lowering.py"),
    *("tests/test_primitive.py", "tests/test_settings.py"),
    *("tests/binding", "tests/compat", "tests/compiling", "tests/emitting", "tests/interpreting"),
    *("tests/moe", "tests/tuning"),
)


@nox.session
@nox.parametrize("jax,triton,python", VERSIONS, ids=[jax for jax, *_ in VERSIONS])
def matrix(session: nox.Session, jax: str, triton: str) -> None:
    """The tests that need no GPU and are not slow, or those named after `--`."""
    folder = Path(session.create_tmp()).resolve()
    session.chdir("..")
    tools = ("pytest", "pytest-xdist", "hypothesis", "numpy", "packaging")
    session.install(f"jax=={jax}", f"triton=={triton}", *tools)
    # Without its dependencies: what lowering for CUDA needs, and none of NVIDIA's libraries.
    version = session.run_install("python", "-c", "import jax; print(jax.__version__)", silent=True)
    session.install("--no-deps", f"jax-cuda13-plugin=={str(version).strip()}")
    # The plugin is there by construction, so that its absence is a failure, as in CI.
    environment = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.path.abspath("src"), "CI": "true"}
    tests = ("python", "-m", "pytest", "-q", "-m", "not gpu and not slow")
    tests += ("-n", "auto", "--maxprocesses=8", "--dist=worksteal")
    tests += ("-o", f"cache_dir={folder / 'cache'}")
    again = session.posargs == ["--last-failed"]
    if session.posargs and not again:
        named = any(word.startswith("tests") for word in session.posargs)
        session.run(*tests, *session.posargs, *(() if named else TESTS), env=environment)
        return
    report = folder / "tests.xml"
    tests += (f"--junitxml={report}", *session.posargs)
    session.run(*tests, *TESTS, env=environment, success_codes=[0, 1])
    found = {"jax": str(version).strip(), "triton": triton, "python": str(session.python)}
    if failed := write(found, report, again):
        session.error(f"{failed} tests failed")


def write(found: dict[str, str | int], report: Path, again: bool) -> int:
    """Adds pytest's counts to the record, and returns how many tests failed.

    They take the place of this JAX's, or of those of them that had failed and now ran `again`.
    """
    suites = list(ET.parse(report).iter("testsuite"))
    of = {
        name: sum(int(suite.get(name, 0)) for suite in suites)
        for name in ("tests", "failures", "errors", "skipped")
    }
    failed = of["failures"] + of["errors"]
    counts = {"passed": of["tests"] - failed - of["skipped"], "skipped": of["skipped"]}
    today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    record = Path("benchmarks/matrix.json")
    known = json.loads(record.read_text()) if record.exists() else []
    if again:
        (before,) = (each for each in known if each["jax"] == found["jax"])
        counts = {name: before[name] + count for name, count in counts.items()}
    known = [each for each in known if each["jax"] != found["jax"]]
    known.append({**found, **counts, "failed": failed, "written": today})
    known.sort(key=lambda each: [int(part) for part in each["jax"].split(".")])
    record.write_text(json.dumps(known, indent=1) + "\n")
    return failed
