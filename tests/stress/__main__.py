"""Runs the scenarios, each in a process of its own, some at a time.

    make stress ARGS="--seconds 60 --jobs 4"
    python -m tests.stress --only threads forks --output stress.json

A scenario that does not end in time is stopped, and is a finding, with the stacks of its threads.
Ends with status 1 if anything was found.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.interrupts import ROOT
from tests.stress import scenarios

AFTER_S = 240  # for its start, and for what it has begun when its time is over


def run(name, seconds, seed, after=AFTER_S):
    """A scenario in a process of its own."""
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.stress", "--run", name]
    start = time.monotonic()
    process = subprocess.Popen(
        [*command, "--seconds", str(seconds), "--seed", str(seed)],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            "TRIAX_CUDA_ARCH": os.environ.get("TRIAX_CUDA_ARCH", "90"),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.05",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, errors = process.communicate(timeout=seconds + after)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        _, errors = process.communicate()
        found = {"count": 0, "findings": [f"it did not end: {errors[-2000:]}"]}
    else:
        if process.returncode:
            found = {
                "count": 0,
                "findings": [f"it ended with {process.returncode}: {errors[-2000:]}"],
            }
        else:
            found = json.loads(out.splitlines()[-1])
    return found | {"seconds": round(time.monotonic() - start)}


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=__doc__)
    known = [*scenarios.SCENARIOS, *scenarios.PLANTED]
    parser.add_argument("--only", nargs="+", choices=known, default=[*scenarios.SCENARIOS])
    parser.add_argument("--seconds", type=float, default=60, help="of each scenario")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="a JSON file; keeps others' results")
    parser.add_argument("--run", choices=known, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.run:
        function = (scenarios.SCENARIOS | scenarios.PLANTED)[options.run]
        print(json.dumps(function(options.seconds, random.Random(options.seed))), flush=True)
        os._exit(0)  # without waiting for what a wrong scenario left
    results = {}
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        jobs = {
            name: pool.submit(run, name, options.seconds, options.seed) for name in options.only
        }
        for name, job in jobs.items():
            results[name] = found = job.result()
            state = found.get("skipped") or f"{found['count']:,} done, {found['seconds']} s"
            print(f"{name:20} {state}, {len(found['findings'])} wrong", flush=True)
            for finding in found["findings"]:
                print(f"    {finding}", flush=True)
    if options.output:
        from benchmarks.harness import record

        known = json.loads(options.output.read_text()) if options.output.exists() else {}
        today = {"written": record.environment()["written"]}
        every = known.get("results", {}) | {name: of | today for name, of in results.items()}
        record.write(options.output, seed=options.seed, results=every)
    return int(any(found["findings"] for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
