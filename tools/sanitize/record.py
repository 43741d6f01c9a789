"""Compiles the kernels of the cases, and keeps their launches with the operands' values.

Needs no GPU: the cases run in the interpreter, and before each kernel the launch is compiled for
compute capability 9.0 and written as a job of the tuning worker.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from triax.binding.launch import ArrayType, BoundCall
from triax.compiling import compiler
from triax.primitive import eager_listener
from triax.tuning import measure

CAPABILITY = 90


def _bytes(array: Any) -> bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).tobytes()


def record(cases: Iterable[tuple[str, Callable[[], None]]], folder: Path) -> int:
    """Writes a job for each launch of the cases, once for equal operands; returns how many.

    Operands are in files of their own in `folder`, by names relative to it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    jobs: dict[Any, tuple[str, Any]] = {}

    def listen(call: BoundCall, operands: Sequence[Any], result_avals: Any) -> None:
        types = tuple(map(ArrayType.of, operands))
        launch = call.launches(types, tuple(map(ArrayType.of, result_avals)))[0]
        if 0 in launch.grid:
            return
        (kernel,) = compiler.compile_all([launch], CAPABILITY, machine_code=True)
        if isinstance(kernel, Exception):
            raise kernel
        contents = [_bytes(operand) for operand in operands]
        key = kernel.name, launch.grid, types, *(hash(content) for content in contents)
        if key in jobs:
            return
        files = [f"{len(jobs)}-{index}.bin" for index in range(len(contents))]
        for file, content in zip(files, contents, strict=True):
            (folder / file).write_bytes(content)
        jobs[key] = name, measure.make_job(call, [(launch, kernel)], files)

    token = eager_listener.set(listen)
    try:
        for name, run in cases:
            before = len(jobs)
            with jax.disable_jit():
                run()
            print(f"{name}: {len(jobs) - before} launches", file=sys.stderr, flush=True)
    finally:
        eager_listener.reset(token)
    (folder / "jobs.pickle").write_bytes(pickle.dumps([*jobs.values()]))
    return len(jobs)
