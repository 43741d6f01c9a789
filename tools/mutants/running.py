"""Runs pytest in forks of one process that has imported JAX and Triton, but not Triax.

A fork is ready in milliseconds, and a change to the source is there before anything imports it.
"""

from __future__ import annotations

import collections
import functools
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
_OPTIONS = ["-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist"]
_OPTIONS += ["-W", "ignore::pytest.PytestAssertRewriteWarning", "--hypothesis-profile=mutants"]

FAILED = 99  # the status of a fork that could not run pytest


def prepare() -> None:
    """Imports what tests need, with the environment of the tests, and starts no thread."""
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    importlib.import_module("tests.conftest")  # sets what must be set before JAX is imported
    import hypothesis
    import jax  # noqa: F401
    import scipy.special  # noqa: F401
    import triton.language  # noqa: F401

    if sys.platform == "linux" and len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("There are threads, which a fork would not have.")
    hypothesis.settings.register_profile(
        "mutants", deadline=None, max_examples=4, derandomize=True, database=None
    )
    warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")


class Slot:
    """A copy of the sources that one fork at a time may change."""

    def __init__(self, folder: Path) -> None:
        self.src, self.tmp = folder / "src", folder / "tmp"
        self.result, self.log = folder / "result.json", folder / "log"
        shutil.copytree(ROOT / "src", self.src)

    def write(self, file: str, code: bytes) -> None:
        path = ROOT / file
        copy = self.src / path.relative_to(ROOT / "src")
        copy.write_bytes(code)
        for compiled in copy.parent.glob(f"__pycache__/{copy.stem}.*.pyc"):
            compiled.unlink()

    def fork(self, arguments: list[str], plugin: Any) -> int:
        """Starts pytest on the copy; the plugin's `result` is written at its end."""
        self.result.unlink(missing_ok=True)
        shutil.rmtree(self.tmp, ignore_errors=True)
        if child := os.fork():
            return child
        try:
            os.setsid()
            log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.path.insert(0, str(self.src))
            os.environ["PYTHONPATH"] = str(self.src)
            import pytest

            status = pytest.main([*_OPTIONS, f"--basetemp={self.tmp}", *arguments], [plugin])
            self.result.write_text(json.dumps(plugin.result))
            sys.stdout.flush()
            os._exit(status)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(FAILED)


class Job(NamedTuple):
    name: str
    arguments: list[str]
    plugin: Any
    limit_s: float
    change: tuple[str, bytes] | None = None


class Ended(NamedTuple):
    job: Job
    status: int | None  # of pytest; None: it ran into its limit
    result: Any  # None where the fork died
    seconds: float
    log: str


def run(jobs: Iterable[Job], parallel: int, ended: Callable[[Ended], None], folder: Path) -> None:
    """Runs jobs side by side, each in a fork and in a copy of the sources under `folder`."""
    with tempfile.TemporaryDirectory(dir=folder) as copies:
        free = [Slot(Path(copies) / str(i)) for i in range(parallel)]
        running: dict[int, tuple[Slot, Job, float]] = {}
        waiting = iter(jobs)
        try:
            while True:
                while free and (job := next(waiting, None)) is not None:
                    slot = free.pop()
                    if job.change is not None:
                        slot.write(*job.change)
                    pid = slot.fork(job.arguments, job.plugin)
                    running[pid] = slot, job, time.monotonic()
                if not running:
                    return
                time.sleep(0.02)
                for pid, (slot, job, start) in list(running.items()):
                    seconds = time.monotonic() - start
                    late = seconds > job.limit_s
                    found, status = os.waitpid(pid, 0 if late and _kill(pid) else os.WNOHANG)
                    if not found:
                        continue
                    del running[pid]
                    _kill(pid)  # what the tests may have left
                    known = slot.result.exists()
                    result = json.loads(slot.result.read_text()) if known else None
                    code = None if late else os.waitstatus_to_exitcode(status)
                    if job.change is not None:
                        slot.write(job.change[0], (ROOT / job.change[0]).read_bytes())
                    free.append(slot)
                    ended(Ended(job, code, result, seconds, slot.log.read_text()))
        finally:
            for pid in running:
                _kill(pid)
                os.waitpid(pid, 0)


def _kill(group: int) -> bool:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


class Killer:
    """Runs tests in a given order, and says which one failed first."""

    def __init__(self, tests: list[str], kernels: Path) -> None:
        self.result: str | None = None
        self.order = {test: i for i, test in enumerate(tests)}
        self.kernels = kernels

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        items.sort(key=lambda item: self.order.get(item.nodeid, 0))
        if self.kernels.exists():  # compiled before, and never changed in place
            to = config._tmp_path_factory.getbasetemp() / "triton-cache"
            shutil.copytree(self.kernels, to, copy_function=os.link)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and self.result is None:
            self.result = report.nodeid


class Coverage:
    """Notes which lines of some files each test runs; `result` is by test: seconds and lines."""

    def __init__(self, files: list[str], kernels: Path) -> None:
        self.files, self.kernels = files, kernels
        self.result: dict[str, tuple[float, dict[str, list[int]]]] = {}
        self.lines: dict[str, set[int]] = collections.defaultdict(set)
        self.last = ""

    def pytest_sessionstart(self) -> None:
        monitoring = sys.monitoring
        monitoring.use_tool_id(monitoring.COVERAGE_ID, "mutants")
        monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.LINE, self._line)
        monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.LINE)

    def _line(self, code: Any, line: int) -> Any:
        if name := _name(code.co_filename):
            self.lines[name].add(line)
        return sys.monitoring.DISABLE

    def pytest_runtest_setup(self, item: Any) -> None:
        import jax

        test = item.nodeid.partition("[")[0]
        if test != self.last:  # what JAX has traced is not traced again
            jax.clear_caches()
            self.last = test
        self.lines.clear()
        sys.monitoring.restart_events()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" and report.passed:
            lines = {file: sorted(self.lines[file]) for file in self.files if self.lines[file]}
            if lines:
                self.result[report.nodeid] = report.duration, lines

    def pytest_sessionfinish(self, session: Any) -> None:
        found = session.config._tmp_path_factory.getbasetemp() / "triton-cache"
        if found.exists():
            shutil.copytree(found, self.kernels, dirs_exist_ok=True)


@functools.cache
def _name(file: str) -> str | None:
    """A source's name, whichever copy it is of."""
    return f"src{file.rpartition('/src')[2]}" if "/src/triax/" in file else None
