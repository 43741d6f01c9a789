"""Finds the best of a call's candidates: compiles and times them, and stores the result."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from triax import settings
from triax.binding.launch import ArrayType, Call, CompiledKernel, Launch
from triax.compat import jax_private
from triax.devices import Device
from triax.errors import ArgumentTypeError, CompilationTimeout, TriaxError, TuningError
from triax.tuning import failures, measure, store
from triax.tuning.failures import CompileAll, Fallback
from triax.tuning.key import Key, label
from triax.tuning.progress import Progress
from triax.tuning.store import Record, Timing
from triax.tuning.worker import client

logger = logging.getLogger(__name__)

# Of what compiling raises; the program itself may need less: no ptxas, no machine code.
_NOT_THE_CONFIGS_FAULT = (CompilationTimeout, OSError, MemoryError)


def search(
    call: Call,
    launches: Sequence[Launch],
    compute_capability: int,
    compile_all: CompileAll,
    device: Device,
    key: Key,
    inputs: Sequence[Any] | None,
) -> Record | Fallback:
    """Compiles and times the candidates of a call; stores the result and returns it.

    If none could be timed, for lack of time or of something on this machine, that is the answer.

    Raises:
      CompilationError: every candidate fails to compile or to run.
    """
    with contextlib.closing(Progress(call.display_name, len(launches))) as progress:
        with contextlib.suppress(Exception):  # `measure` will raise it again
            client.start(device.index)  # it starts while the candidates compile
        results = compile_all(
            launches,
            compute_capability,
            timeout_s=6 * settings.tuning_timeout_s(),
            machine_code=True,
            on_each=progress.step,
        )
        compiled: list[tuple[Launch, CompiledKernel]] = []
        timings: dict[str, Timing] = {}
        for launch, result in zip(launches, results, strict=True):
            if isinstance(result, CompiledKernel):
                compiled.append((launch, result))
            else:
                late = isinstance(result, _NOT_THE_CONFIGS_FAULT)
                reason = failures.dropped(launch, result)
                timings[label(launch)] = Timing(label(launch), error=reason, out_of_time=late)
        if compiled:
            try:
                arrays = _tuning_arrays(call, launches[0], inputs)
            except (MemoryError, jax.errors.JaxRuntimeError) as error:
                if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                return _fallback(f"no memory for its operands: {error}", timings.values())
            try:
                # The program's own work on the GPU would distort the timings.
                jax_private.drain(device.index)
                with measure.operand_files(arrays) as paths:
                    job = measure.make_job(call, compiled, paths)
                    found = measure.measure(job, device, progress)
            except (TuningError, OSError) as error:
                return _fallback(str(error), timings.values())
            except TriaxError:  # a setting
                raise
            except Exception as error:  # what a machine may lack has many names
                return _fallback(f"{type(error).__name__}: {error}", timings.values())
            timings |= {timing.config: timing for timing in found}
    ordered = [timings[label(launch)] for launch in launches]
    timed = [timing for timing in ordered if timing.error is None]
    if not timed:
        return _nothing_timed(call, ordered)
    # The config listed first wins ties, as with min() in Triton.
    best = min(timed, key=lambda timing: timing.median_ms or 0.0)
    what = _contents(call, inputs)
    logger.info(
        "kernel %s (%s): measured %d configs on %s; best: [%s] %.4f ms",
        call.display_name,
        key.name,
        len(timed),
        what,
        best.config,
        best.median_ms,
    )
    record = Record.now(key, best.config, ordered, what)
    try:
        store.user_store().put(record)
    except OSError as error:
        remedy = "; set TRIAX_CACHE_DIR" if error.filename else ""  # else it says so itself
        logger.warning("the tuned config of %s could not be stored: %s%s", key.name, error, remedy)
    return record


def _nothing_timed(call: Call, timings: Sequence[Timing]) -> Fallback:
    if not any(timing.out_of_time for timing in timings):
        # No fallback to the first: a config that fails in the worker would fail in the program.
        raise failures.none_left(call, [f"[{timing.config}] {timing.error}" for timing in timings])
    reasons = "; ".join(f"[{timing.config}] {timing.error}" for timing in timings)
    return _fallback(
        f"no config could be timed ({reasons}); TRIAX_TUNING_TIMEOUT gives a run more time", timings
    )


def _fallback(reason: str, timings: Iterable[Timing]) -> Fallback:
    errors = [t for t in timings if t.error is not None and t.error != measure.NOT_TRIED]
    failed = frozenset(t.config for t in errors if not t.out_of_time)
    return Fallback(reason, failed, slow=frozenset(t.config for t in errors if t.out_of_time))


def _tuning_arrays(
    call: Call, launch: Launch, inputs: Sequence[Any] | None
) -> list[np.ndarray | None]:
    """The given contents to measure on, or None for operands to be filled by dtype."""
    if inputs is None:
        if call.tuning_inputs is None:
            return [None] * len(launch.operands)
        shapes = [jax.ShapeDtypeStruct(o.shape, o.dtype) for o in launch.operands]
        given = call.tuning_inputs(*shapes)
        inputs = given if isinstance(given, (tuple, list)) else (given,)
    arrays = [np.asarray(value) for value in inputs]
    found = [ArrayType.of(array) for array in arrays]
    if found != list(launch.operands):
        raise ArgumentTypeError(
            f"Argument `tuning_inputs` of kernel {call.display_name!r} must return one array per "
            f"array operand, of its shape and dtype: {_list(launch.operands)}; got {_list(found)}."
        )
    return list(arrays)


def _list(types: Sequence[ArrayType]) -> str:
    return ", ".join(f"{t.dtype.name}{list(t.shape)}" for t in types) or "none"


def _contents(call: Call, inputs: Sequence[Any] | None) -> str:
    if inputs is not None:
        return "real operands"
    return "random floats, zeros for integers" if call.tuning_inputs is None else "tuning_inputs"
