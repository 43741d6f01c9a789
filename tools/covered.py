"""Writes how much of src the tests ran through, by package, after `coverage combine`."""

from __future__ import annotations

import collections
import datetime
import importlib.metadata
import json
import platform
import tempfile
from pathlib import Path

import coverage

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "coverage.json"
OF = ("num_statements", "covered_lines", "num_branches", "covered_branches")


def main() -> None:
    measured = coverage.Coverage(config_file=str(ROOT / "pyproject.toml"))
    measured.load()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "coverage.json"
        measured.json_report(outfile=str(report))
        files = json.loads(report.read_text())["files"]
    packages: dict[str, collections.Counter[str]] = {}
    for file, found in sorted(files.items()):
        folders = Path(file).parts[2:-1]  # of src/triax/…
        name = "/".join(folders[: 2 if folders[:1] == ("moe",) else 1]) or "triax"
        counts = packages.setdefault(name, collections.Counter())
        counts.update({each: found["summary"][each] for each in OF})
    found = {
        "written": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "triton")},
        "packages": packages,
    }
    RECORD.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
