"""Runs the kernels of the MoE ops under NVIDIA's compute-sanitizer, in a host of canaries, and
under Triton's own sanitizers.

    python -m tools.sanitize record FOLDER     # needs no GPU
    python -m tools.sanitize run FOLDER [--tools TOOL ...] [--output FILE]
    python -m tools.sanitize all                # both
    python -m tools.sanitize triton [--cases NAME ...] [--jobs N]     # Triton's, in JAX

Every launch is run as it was recorded, without JAX, on buffers of exact size. Triton's sanitizers,
ConSan and FpSan, need Triton 3.9: they run cases in JAX, by default those that launch every kernel
with every combination of dtypes. A fault is planted for each tool first; if one goes unseen the run
is void. Writes `benchmarks/sanitizers.json`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.sanitize import planted, report, triton_sanitizers

ROOT = Path(__file__).resolve().parents[2]
REPLAY = Path(__file__).with_name("replay.py")
_LIMIT_S = 1800.0


def replay(tool: str, folder: Path, log: Path) -> report.Found:
    """Runs the jobs of a folder under a tool; its output stays in `log`."""
    quiet = "--show-backtrace", "no"  # of the host
    command = [sys.executable, str(REPLAY), str(folder)]
    if tool == "canaries":
        command.append("--canaries")
    else:
        command = ["compute-sanitizer", "--tool", tool, "--print-limit", "1000", *quiet, *command]
    with log.open("w") as file:
        status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=_LIMIT_S)
    return report.read(tool, log.read_text(errors="replace"), status.returncode)


Runner = Callable[[str, Path, Path], report.Found]


def sanitize(folder: Path, logs: Path, tools: list[str], run: Runner = replay) -> dict[str, Any]:
    """What each tool found of the planted faults and of the recorded launches, and what is wrong.

    Tools run side by side.
    """
    logs.mkdir(parents=True, exist_ok=True)

    def both(tool: str) -> tuple[report.Found, report.Found]:
        fault = planted.REPORTED_BY[tool]
        planted.plant(fault, logs / tool)
        seen = run(tool, logs / tool, logs / f"{tool}-planted.log")
        return seen, run(tool, folder, logs / f"{tool}.log")

    with concurrent.futures.ThreadPoolExecutor() as pool:
        results = dict(zip(tools, pool.map(both, tools), strict=True))
    problems = []
    for tool, (seen, found) in results.items():
        fault = planted.REPORTED_BY[tool]
        if not seen.findings[fault]:
            problems.append(f"void: {tool} did not report {fault}")
        if not found.complete:
            problems.append(f"void: {tool} did not come to its end")
        elif found.total:
            problems.append(f"{tool}: {found.total} findings")
    by_tool = {
        tool: {
            "planted": seen.findings[planted.REPORTED_BY[tool]],
            "launches": sum(found.ran.values()),
            "kernels": len(found.ran),
            "findings": dict(found.findings),
        }
        for tool, (seen, found) in results.items()
    }
    lines = report.table({tool: found for tool, (_, found) in results.items()})
    return {"tools": by_tool, "problems": problems, "table": lines}


def version(command: list[str]) -> str:
    """The last line that a command prints."""
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip().rpartition("\n")[2]


def write(output: Path, part: str, found: dict[str, Any]) -> int:
    """Writes a part of the record, and prints its problems; returns the exit status."""
    smi = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    of = {
        "written": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "device": version(smi),
        **found,
    }
    parts = json.loads(output.read_text()) if output.exists() else {}
    output.write_text(json.dumps(parts | {part: of}, indent=1) + "\n")
    for problem in found["problems"]:
        print(problem)
    return 1 if found["problems"] else 0


def sanitize_in_jax(names: list[str] | None, jobs: int, output: Path) -> int:
    """Runs Triton's sanitizers."""
    import jax
    import triton
    from tools.sanitize.in_jax import covering

    found = triton_sanitizers.sanitize(covering() if names is None else names, jobs)
    versions = {"jax": jax.__version__, "triton": triton.__version__}
    return write(output, "triton", {"versions": versions, **found})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("command", choices=("record", "run", "all", "triton"))
    parser.add_argument("folder", nargs="?", type=Path, help="of the recorded launches")
    parser.add_argument("--tools", nargs="+", choices=report.TOOLS, default=list(report.TOOLS))
    parser.add_argument("--logs", type=Path, help="a folder for what the tools print")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "sanitizers.json")
    parser.add_argument("--cases", nargs="+", help="of the tests, for Triton's sanitizers")
    parser.add_argument("--jobs", type=int, default=8, help="processes of Triton's sanitizers")
    options = parser.parse_args(arguments)
    if options.command == "triton":
        return sanitize_in_jax(options.cases, options.jobs, options.output)
    if options.command != "all" and options.folder is None:
        parser.error("FOLDER is missing")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary) / "launches"
        if options.command != "run":
            from tools.sanitize.cases import cases
            from tools.sanitize.record import record

            print(f"{record(cases(), folder)} launches in {folder}")
        if options.command == "record":
            return 0
        if shutil.which("compute-sanitizer") is None:
            sys.exit("compute-sanitizer is not on PATH; it is part of the CUDA toolkit.")
        found = sanitize(folder, options.logs or Path(temporary) / "logs", options.tools)
    print(found.pop("table"))
    found = {"compute_sanitizer": version(["compute-sanitizer", "--version"]), **found}
    failed = write(options.output, "nvidia", found)
    if options.command == "all":
        failed |= sanitize_in_jax(options.cases, options.jobs, options.output)
    return failed


if __name__ == "__main__":
    sys.exit(main())
