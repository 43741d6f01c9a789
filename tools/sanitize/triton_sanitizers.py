"""Runs the tests' cases, and kernels with planted faults, under Triton's ConSan and FpSan.

Each process runs some cases in JAX on a GPU. A finding of ConSan ends the process; another one runs
the cases that are left.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

SANITIZERS = "consan", "fpsan"
# What a program of `planted_kernels` must end with, by its argument.
PLANTED = {
    "none": "found nothing",
    "no wait": "Assertion `Accessing buffer with pending access",
    "wrong operand": "Arrays are not equal",
}
_ASSERTION = re.compile(r"^(\S+:\d+): .*?(Assertion `.*` failed)", re.MULTILINE)
_LIMIT_S = 1800.0

Runner = Callable[..., tuple[str, str]]
"""Runs a module with arguments; returns what it printed to stdout and to stderr."""


def run(*arguments: str) -> tuple[str, str]:
    environment = os.environ | {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    keywords: dict[str, Any] = {"capture_output": True, "text": True, "env": environment}
    try:
        done = subprocess.run([sys.executable, "-m", *arguments], timeout=_LIMIT_S, **keywords)
    except subprocess.TimeoutExpired as late:
        return (late.stdout or b"").decode(), f"did not end in {_LIMIT_S:.0f} s"
    return done.stdout, done.stderr


def reason(errors: str) -> str:
    """Why a process died: the device assertion that failed, or its last line."""
    if (assertion := _ASSERTION.search(errors)) is not None:
        return f"{assertion[2]}, {assertion[1]}"
    return errors.rstrip().rpartition("\n")[2]


def run_cases(sanitizer: str, names: Sequence[str], runner: Runner = run) -> dict[str, Any]:
    """In how many cases each kernel ran, and what was found by case."""
    kernels, findings, left = Counter[str](), dict[str, str](), [*names]
    while left:
        printed, errors = runner("tools.sanitize.in_jax", sanitizer, *left)
        ended = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
        for name, case in zip(left, ended, strict=False):
            kernels.update(case["kernels"])
            if case["findings"]:
                findings[name] = "; ".join(case["findings"])
        left = left[len(ended) :]
        if left:  # it died in the first of these
            findings[left.pop(0)] = reason(errors)
    return {"kernels": kernels, "findings": findings}


def sanitize(names: Sequence[str], jobs: int, runner: Runner = run) -> dict[str, Any]:
    """What each sanitizer found of the planted faults and in the cases, and what is wrong."""
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        outputs = pool.map(lambda fault: runner("tools.sanitize.planted_kernels", fault), PLANTED)
        problems = [
            f"void: planted_kernels {fault!r} ended with {reason(''.join(output))}"
            for (fault, text), output in zip(PLANTED.items(), outputs, strict=True)
            if text not in "".join(output)
        ]
        if problems:
            return {"sanitizers": {}, "problems": problems}
        tasks = [
            (sanitizer, names[part::jobs])
            for sanitizer in SANITIZERS
            for part in range(min(jobs, len(names)))
        ]
        results = [*pool.map(lambda task: run_cases(*task, runner), tasks)]
    found: dict[str, Any] = {}
    for sanitizer in SANITIZERS:
        parts = [r for (of, _), r in zip(tasks, results, strict=True) if of == sanitizer]
        kernels = sum((part["kernels"] for part in parts), Counter[str]())
        findings = {name: text for part in parts for name, text in part["findings"].items()}
        problems += [f"{sanitizer}: {name}: {text}" for name, text in findings.items()]
        found[sanitizer] = {"cases": len(names), "kernels": len(kernels), "findings": findings}
        found[sanitizer]["by_kernel"] = dict(sorted(kernels.items()))
    return {"sanitizers": found, "problems": problems}
