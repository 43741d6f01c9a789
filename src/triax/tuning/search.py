"""Finds the best of a call's candidates: compiles and times them, and stores the result."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from triax import messages, settings
from triax.binding.launch import ArrayType, BoundCall, CompiledKernel, Launch
from triax.errors import ArgumentTypeError, CompilationTimeout, TriaxError, TuningError
from triax.tuning import measure, store
from triax.tuning.key import label
from triax.tuning.progress import Progress
from triax.tuning.request import Fallback, Request, dropped
from triax.tuning.store import Record, Timing
from triax.tuning.worker import client

logger = logging.getLogger(__name__)

# Errors from compiling that are not the kernel's. The program itself needs less: no machine code.
_ABOUT_THE_MACHINE = (OSError, MemoryError)


def search(request: Request) -> Record | Fallback:
    """Compiles and times the candidates of a call; stores the result and returns it.

    Returns a `Fallback` if no candidate could be timed for lack of time, or if this machine lacked
    something, such as memory, for any candidate: the other times do not say which is best.

    Raises:
      CompilationError: every candidate fails to compile or to run.
    """
    call, key = request.call, request.key
    timings: dict[str, Timing] = {}
    progress = Progress(call.display_name, len(request.launches))
    compiled, problem = _compile(request, timings, progress)
    if compiled and not problem:
        problem = _measure(request, compiled, timings, progress)
    if problem:
        return _fallback(problem, timings)
    ordered = [timings[label(launch)] for launch in request.launches]
    timed = [timing for timing in ordered if timing.error is None]
    if not timed:
        reasons = [f"[{timing.config}] {timing.error}" for timing in ordered]
        if not any(timing.out_of_time for timing in ordered):
            # No fallback to the first: a config that fails in the worker would fail in the program.
            raise request.none_left(reasons)
        failed = f"no config could be timed ({'; '.join(reasons)})"
        return _fallback(f"{failed}; TRIAX_TUNING_TIMEOUT gives a run more time", timings)
    # The config listed first wins ties, as with min() in Triton.
    best = min(timed, key=lambda timing: timing.median_ms or 0.0)
    filled = "random floats, zeros for integers" if call.tuning_inputs is None else "tuning_inputs"
    inputs = filled if request.inputs is None else "real operands"
    logger.info(
        f"kernel {call.display_name} ({key.name}): measured {len(timed)} configs on {inputs}; "
        f"best: [{best.config}] {best.median_ms:.4f} ms"
    )
    record = Record.now(key, best.config, ordered, inputs)
    try:
        store.user_store().put(record)
    except OSError as error:
        remedy = "; set TRIAX_CACHE_DIR" if error.filename else ""  # else the error says so
        logger.warning("the tuned config of %s could not be stored: %s%s", key.name, error, remedy)
    return record


def _compile(
    request: Request, timings: dict[str, Timing], progress: Progress
) -> tuple[list[tuple[Launch, CompiledKernel]], str]:
    """The candidates that compile, and what this machine lacks to compile all of them, or "".

    `timings` gets the reasons for the candidates that do not compile.
    """
    with contextlib.suppress(Exception):  # `measure` will raise the error again
        assert request.device is not None
        client.start(request.device.index)  # the worker starts while the candidates compile
    timeout_s = 6 * settings.tuning_timeout_s()
    options: Any = {"timeout_s": timeout_s, "machine_code": True, "on_each": progress.step}
    results = request.compile_all(request.launches, request.compute_capability, **options)
    compiled, problem = [], ""
    for launch, result in zip(request.launches, results, strict=True):
        if isinstance(result, CompiledKernel):
            compiled.append((launch, result))
        else:
            late = isinstance(result, (CompilationTimeout, *_ABOUT_THE_MACHINE))
            reason = dropped(launch, result)
            timings[label(launch)] = Timing(label(launch), error=reason, out_of_time=late)
            problem = reason if isinstance(result, _ABOUT_THE_MACHINE) else problem
    return compiled, problem


def _measure(
    request: Request,
    compiled: Sequence[tuple[Launch, CompiledKernel]],
    timings: dict[str, Timing],
    progress: Progress,
) -> str:
    """Times the compiled candidates; returns why this machine cannot measure them, or ""."""
    assert request.device is not None
    try:
        arrays = _tuning_arrays(request.call, request.launches[0], request.inputs)
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return f"no memory for its operands: {error}"
    try:
        # The program's own work on the GPU would distort the timings.
        measure.drain(request.device.index)
        with measure.operand_files(arrays) as paths:
            job = measure.make_job(request.call, compiled, paths)
            measure.measure(job, request.device, progress, timings)
    except (TuningError, OSError) as error:
        return str(error)
    except TriaxError:  # an invalid setting
        raise
    except Exception as error:  # a machine's failure may have any type
        return f"{type(error).__name__}: {error}"
    return ""


def _fallback(reason: str, timings: dict[str, Timing]) -> Fallback:
    errors = [t for t in timings.values() if t.error not in (None, measure.NOT_TRIED)]
    failed = frozenset(t.config for t in errors if not t.out_of_time)
    return Fallback(reason, failed, doubtful=frozenset(t.config for t in errors if t.out_of_time))


def _tuning_arrays(
    call: BoundCall, launch: Launch, inputs: Sequence[Any] | None
) -> list[np.ndarray | None]:
    """The contents of the operands to measure on, or None for operands to be filled by dtype."""
    if inputs is None:
        if call.tuning_inputs is None:
            return [None] * len(launch.operands)
        shapes = [jax.ShapeDtypeStruct(o.shape, o.dtype) for o in launch.operands]
        where = f"argument `tuning_inputs` of kernel {call.display_name!r}"
        takes = f"the shapes of the operands, {len(shapes)} jax.ShapeDtypeStructs"
        returned = messages.call(call.tuning_inputs, where, takes, *shapes)
        inputs = returned if isinstance(returned, (tuple, list)) else (returned,)
    arrays = [np.asarray(value) for value in inputs]
    types = [ArrayType.of(array) for array in arrays]
    if types != list(launch.operands):
        raise ArgumentTypeError(
            f"Argument `tuning_inputs` of kernel {call.display_name!r} must return one array per "
            f"array operand, of its shape and dtype: {_list(launch.operands)}; got {_list(types)}."
        )
    return list(arrays)


def _list(types: Sequence[ArrayType]) -> str:
    return ", ".join(f"{t.dtype.name}{list(t.shape)}" for t in types) or "none"
