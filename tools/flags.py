"""Runs the GPU tests under settings of XLA and JAX that programs run with, and writes what passed.

    make flags                            # all of them, some minutes each
    make flags ARGS="--only forms"        # the table of forms alone, two minutes each
    make flags ARGS="--only 64-bit --seconds 600"

Each file of tests is a process of its own, or several, all at once, with a part of the GPU's
memory. Flags of XLA that change loops and command buffers run the table of forms alone: each op and
each kind of kernel in every form of program.
Writes `benchmarks/flags.json` and ends with status 1 if a test failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "flags.json"
NAMES = ("jax", "jaxlib", "triton")
TESTS = ROOT / "tests" / "gpu"


@dataclasses.dataclass(frozen=True)
class Setting:
    """Environment variables, and the test files that run under them."""

    environment: dict[str, str]
    files: str = "test_*.py"


def of_forms(flag: str) -> Setting:
    """The table of forms alone, under a flag of XLA."""
    return Setting({"XLA_FLAGS": flag}, "test_forms.py")


SETTINGS = {
    "latency hiding, deterministic operations, a command buffer for every kernel": Setting(
        {
            "XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=true "
            "--xla_gpu_deterministic_ops=true --xla_gpu_graph_min_graph_size=1"
        }
    ),
    "64-bit types": Setting({"JAX_ENABLE_X64": "1"}),
    "no command buffers": Setting({"XLA_FLAGS": "--xla_gpu_enable_command_buffer="}),
    "forms, no dynamic slice fusion": of_forms("--xla_gpu_enable_dynamic_slice_fusion=false"),
    "forms, no command buffers": of_forms("--xla_gpu_enable_command_buffer="),
    "forms, a command buffer for every kernel": of_forms("--xla_gpu_graph_min_graph_size=1"),
    "forms, latency hiding": of_forms("--xla_gpu_enable_latency_hiding_scheduler=true"),
    "forms, loops double-buffered": of_forms(
        "--xla_gpu_enable_while_loop_unrolling=WHILE_LOOP_UNROLLING_DOUBLE_BUFFER"
    ),
    "forms, loops unrolled": of_forms(
        "--xla_gpu_enable_while_loop_unrolling=WHILE_LOOP_UNROLLING_FULL_UNROLL"
    ),
}
# Processes of the files that take longest.
WORKERS = {"test_cases": 4, "test_forms": 15}
# Tests of speed, which want the machine for themselves.
ALONE = (
    *("test_times", "test_warm_start_measures_nothing", "test_nearly_as_fast_as_with_top_k"),
    "test_a_run_is_right_and_times_the_device",
)


def run(
    environment: dict[str, str], seconds: float, logs: Path, files: Iterable[Path]
) -> dict[str, Any]:
    """The counts of the tests of some files under a setting, and what failed or did not end."""
    environment = {**os.environ, **environment, "PYTHONPATH": str(ROOT / "src")}
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    pytest = (sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider")
    pytest += ("-o", "junit_family=xunit1", "-k", " and ".join(f"not {name}" for name in ALONE))
    begun = {}
    for file in files:
        name = logs / file.stem
        command = (*pytest, f"--junitxml={name}.xml", f"--basetemp={name}", file)
        if file.stem in WORKERS:
            command += (f"--numprocesses={WORKERS[file.stem]}", "--dist=worksteal")
        with open(f"{name}.log", "w") as log:
            begun[name] = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    failed = []
    end = time.monotonic() + seconds
    for name, process in begun.items():
        try:
            process.wait(max(1, end - time.monotonic()))
            suites = ET.parse(f"{name}.xml")
        except (subprocess.TimeoutExpired, OSError) as error:
            process.kill()
            process.wait()
            failed.append(f"{name.name}: {type(error).__name__}")
            continue
        for suite in suites.iter("testsuite"):
            counts = {key: counts[key] + int(suite.get(key, 0)) for key in counts}
        for case in suites.iter("testcase"):
            if case.find("failure") is not None or case.find("error") is not None:
                failed.append(f"{name.name}: {case.get('name')}")
    ran = counts["tests"] - counts["skipped"]
    return {
        "passed": ran - counts["failures"] - counts["errors"],
        "skipped": counts["skipped"],
        "failed": failed,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[""], help="settings with these words")
    parser.add_argument("--seconds", type=float, default=900.0, help="for each setting")
    parser.add_argument("--output", type=Path, default=RECORD, help="keeps its other settings")
    parser.add_argument("--logs", type=Path)
    options = parser.parse_args()
    found = json.loads(options.output.read_text()) if options.output.exists() else {"results": {}}
    ask = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    found["device"] = subprocess.check_output(ask, text=True).splitlines()[0]
    found["versions"] = {name: importlib.metadata.version(name) for name in NAMES}
    found["written"] = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    wrong = False
    for name, setting in SETTINGS.items():
        if not any(words in name for words in options.only):
            continue
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            logs = (options.logs or Path(folder)) / name.replace(" ", "_").replace(",", "")
            logs.mkdir(parents=True, exist_ok=True)
            files = sorted(TESTS.glob(setting.files))
            result = run(setting.environment, options.seconds, logs, files)
        kept = {"settings": setting.environment, "files": setting.files}
        found["results"][name] = kept | result
        options.output.write_text(json.dumps(found, indent=1) + "\n")
        seconds = time.monotonic() - start
        print(f"{name}: {result['passed']} passed, {result['skipped']} skipped, {seconds:.0f} s")
        for test in result["failed"]:
            print(f"    {test}")
        wrong |= bool(result["failed"])
    return wrong


if __name__ == "__main__":
    sys.exit(main())
