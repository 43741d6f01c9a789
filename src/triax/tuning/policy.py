"""Which config a kernel runs with.

In: a bound call and the launches of its candidates. Out: the launches to hand to XLA with
their compiled kernels: one, or in mode "runtime" all of them. A kernel with several
configs gets one before XLA sees it: from this process, from a store, or by measuring.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from triax.bridge import ahead, compiler, settings
from triax.bridge.compat import jax_private, versions
from triax.bridge.errors import ArgumentTypeError, CompilationError, TuningError, VersionError
from triax.bridge.launch import ArrayType, Call, CompiledKernel, Launch
from triax.tuning import agree, store
from triax.tuning.key import Device, Key, label, make_key
from triax.tuning.store import Record, Timing

logger = logging.getLogger(__name__)

Chosen = list[tuple[Launch, CompiledKernel]]


@dataclasses.dataclass(frozen=True)
class Decision:
    """A config, where it came from, and what is known of the others.

    `source` is "only config", "first config", "user store", "measured now", … ; `timings`
    are empty unless the config was measured, now or when it was stored.
    """

    config: str
    source: str
    timings: tuple[Timing, ...] = ()


_lock = threading.RLock()
_resolved: dict[str, Decision] = {}
_unmeasurable: dict[str, str] = {}  # by key: why measuring failed, so that it is tried once
_by_entry: dict[str, Decision] = {}


def forget() -> None:
    """Forgets what this process has resolved. Stores are not touched."""
    with _lock:
        _resolved.clear()
        _unmeasurable.clear()
        _by_entry.clear()


def decision(entry: str) -> Decision | None:
    """How the config of a compiled kernel was chosen, by its entry name."""
    return _by_entry.get(entry)


def tries_all_configs(mode: str) -> bool:
    """Whether a kernel with several configs is handed to XLA with all of them."""
    return mode == "runtime" and versions.RUNTIME_AUTOTUNING.passes(versions.gated_version())


def choose(
    call: Call,
    launches: Sequence[Launch],
    compute_capability: int,
    device: Device | None = None,
    inputs: Sequence[Any] | None = None,
    fallback: Launch | None = None,
) -> Chosen:
    """The launches to hand to XLA, compiled.

    Args:
      call: the bound call.
      launches: one per candidate, at least one.
      compute_capability: to compile for.
      device: the GPU to measure on, None where measuring is out of the question.
      inputs: the real operands, to measure on copies of them whatever is known already.
      fallback: what stands in for all of them where none is chosen; by default the first.

    Raises:
      CompilationError: no candidate compiles and runs; the message has every reason.
      TuningError: mode "strict", and no tuned config is known.
      VersionError: mode "runtime" below its version with ``TRIAX_ENFORCE_AUTOTUNING=1``.
    """
    if len(launches) == 1:
        kernel = ahead.compile_launch(launches[0], compute_capability)
        _note(kernel, Decision(label(launches[0]), "only config"))
        return [(launches[0], kernel)]
    mode = call.tuning
    stand_ins = [*([fallback] if fallback else []), *launches]
    if mode == "runtime" and inputs is None:
        if tries_all_configs(mode):
            return _all_that_compile(call, launches, compute_capability)
        _report_old_version(call)
    if mode in ("off", "runtime") and inputs is None:
        return _first_that_compiles(
            call, stand_ins, compute_capability, f"first config (mode {mode})"
        )
    return _ahead_of_time(call, launches, compute_capability, device, inputs, stand_ins)


def _note(kernel: CompiledKernel, decision: Decision) -> None:
    _by_entry[kernel.name] = decision


# --- ahead of time ------------------------------------------------------------------


def _ahead_of_time(
    call: Call,
    launches: Sequence[Launch],
    compute_capability: int,
    device: Device | None,
    inputs: Sequence[Any] | None,
    stand_ins: Sequence[Launch],
) -> Chosen:
    key = make_key(call, launches, compute_capability, device)
    with _lock:
        decision = None if inputs is not None else _resolved.get(key.name)
        if decision is None:
            standing_in = label(stand_ins[0])
            decision = _resolve(
                call, launches, compute_capability, device, key, inputs, standing_in
            )
            if decision is None:
                source = f"first config (mode {call.tuning})"
                return _first_that_compiles(call, stand_ins, compute_capability, source)
            _resolved[key.name] = decision
    launch = next(launch for launch in stand_ins if label(launch) == decision.config)
    kernel = ahead.compile_launch(launch, compute_capability)
    _note(kernel, decision)
    return [(launch, kernel)]


def _resolve(
    call: Call,
    launches: Sequence[Launch],
    compute_capability: int,
    device: Device | None,
    key: Key,
    inputs: Sequence[Any] | None,
    standing_in: str,
) -> Decision | None:
    """Looks a key up, else measures it; None means the mode's fallback.

    What is found is published to the job's other processes before it is used, and what
    they have published first is used instead.
    """
    if inputs is None:
        found = store.find(key)
        if found is not None:
            record, where = found
            found_here = Decision(record.config, where.name, record.timings)
            return _agreed(key, found_here, standing_in)
        if (config := agree.published(key.name)) is not None:
            return _agreed(key, Decision(config, "another process of this job"), standing_in)
        if call.tuning == "strict":
            raise TuningError(
                f"Kernel {call.display_name!r} has {len(launches)} configs and none is known to be "
                f"tuned for {key.name}, which tuning mode 'strict' asks for. Tune it with "
                "`triax tune FILE:FUNCTION`, or once under TRIAX_AUTOTUNE=auto."
            )
    reason = _why_not_measure(device)
    if inputs is None:
        if call.tuning == "cached":
            reason = "mode 'cached' does not measure"
        reason = reason or _unmeasurable.get(key.name)
    elif reason is not None:
        raise TuningError(f"Kernel {call.display_name!r} cannot be tuned: {reason}.")
    if reason is None:
        try:
            assert device is not None
            measured = _measure(call, launches, compute_capability, device, key, inputs)
            return _agreed(key, measured, standing_in)
        except TuningError as error:
            if inputs is not None:
                raise  # the caller asked for nothing but this
            reason = _unmeasurable[key.name] = str(error)
    config = standing_in
    _log_fallback(call.display_name, call.tuning, key.name, config, reason)
    # Published too: another process may have found or measured one.
    agreed = agree.agree(key.name, config)
    return None if agreed == config else Decision(agreed, "another process of this job")


def _agreed(key: Key, decision: Decision, standing_in: str) -> Decision:
    """Publishes a decision; the one that the job uses."""
    config = agree.agree(key.name, decision.config)
    if config == decision.config:
        return decision
    if config not in (*key.candidates, standing_in):
        raise TuningError(
            f"Another process of this job uses config [{config}] for {key.name}, which is not "
            f"among this process's: {'; '.join(key.candidates)}. Do all run the same program?"
        )
    return Decision(config, "another process of this job", decision.timings)


def _why_not_measure(device: Device | None) -> str | None:
    if device is None or not device.measurable:
        return "the program is not lowered to run on a GPU of this process"
    from triax.tuning import measure  # only where something is measured: it loads slowly

    return measure.problem()


@functools.cache  # one line per kernel and choice, however often it is traced
def _log_fallback(name: str, mode: str, key: str, config: str, reason: str) -> None:
    logger.warning(
        "kernel %s (%s): no tuned config is known and none is measured: %s. Its first is used: "
        "[%s]. Tune it with `triax tune FILE:FUNCTION` on the GPU it will run on.",
        name,
        key,
        reason,
        config,
    )


def _measure(
    call: Call,
    launches: Sequence[Launch],
    compute_capability: int,
    device: Device,
    key: Key,
    inputs: Sequence[Any] | None,
) -> Decision:
    from triax.tuning import measure  # only where something is measured: it loads slowly

    measure.start_worker(device)  # it starts while the candidates compile
    results = compiler.compile_all(
        launches,
        compute_capability,
        timeout_s=6 * settings.tuning_timeout_s(),
        machine_code=True,
    )
    compiled: Chosen = []
    timings: dict[str, Timing] = {}
    for launch, result in zip(launches, results, strict=True):
        if isinstance(result, CompiledKernel):
            compiled.append((launch, result))
        else:
            timings[label(launch)] = Timing(label(launch), error=_drop(launch, result))
    if not compiled:
        raise _none_left(call, [t.error or "" for t in timings.values()])
    if len(compiled) > 1:
        arrays = _tuning_arrays(call, launches[0], inputs)
        jax_private.drain(device.index)
        with measure.operand_files(arrays) as paths:
            job = measure.make_job(call, compiled, device, paths)
            for timing in measure.measure(job, device, call.display_name):
                timings[timing.config] = timing
    else:  # nothing to compare with
        timings[label(compiled[0][0])] = Timing(label(compiled[0][0]))
    usable = [t for t in timings.values() if t.error is None]
    if not usable:
        # No fall-back to the first: what faults in the worker would fault in the program.
        raise _none_left(call, [f"[{t.config}] {t.error}" for t in timings.values()])
    # Of equal times the config listed first wins, as with min() in Triton.
    best = min(usable, key=lambda t: t.median_ms or 0.0)
    ordered = [timings[label(launch)] for launch in launches]
    what = (
        "real operands"
        if inputs is not None
        else (
            "tuning_inputs"
            if call.tuning_inputs is not None
            else "random floats, zeros for integers"
        )
    )
    logger.info(
        "kernel %s (%s): measured %d configs on %s; best: [%s] %.4f ms",
        call.display_name,
        key.name,
        len(usable),
        what,
        best.config,
        best.median_ms or 0.0,
    )
    record = Record.now(key, best.config, ordered, what)
    try:
        store.user_store().put(record)
    except OSError as error:
        logger.warning("the tuned config of %s could not be stored: %s", key.name, error)
    return Decision(best.config, "measured now", tuple(ordered))


def _tuning_arrays(
    call: Call, launch: Launch, inputs: Sequence[Any] | None
) -> list[np.ndarray | None]:
    """The contents to measure on: given ones, or None for a filling by dtype."""
    if inputs is None:
        if call.tuning_inputs is None:
            return [None] * len(launch.operands)
        shapes = [jax.ShapeDtypeStruct(o.shape, o.dtype) for o in launch.operands]
        given = call.tuning_inputs(*shapes)
        inputs = given if isinstance(given, (tuple, list)) else (given,)
    arrays = [np.asarray(value) for value in inputs]
    found = [ArrayType(array.shape, array.dtype) for array in arrays]
    if found != list(launch.operands):
        raise ArgumentTypeError(
            f"Argument `tuning_inputs` of kernel {call.display_name!r} must return one array per "
            f"array operand, of its shape and dtype: {_list(launch.operands)}; got {_list(found)}."
        )
    return list(arrays)


def _list(types: Sequence[ArrayType]) -> str:
    return ", ".join(f"{t.dtype.name}{list(t.shape)}" for t in types) or "none"


# --- at run time ------------------------------------------------------------------------


def _report_old_version(call: Call) -> None:
    """Says that run-time tuning is not safe here.

    Timing configs on the program's own buffers needs aliased operands to be put back;
    jaxlib before this floor can crash doing so (see `versions.RUNTIME_AUTOTUNING`).
    """
    gate = versions.RUNTIME_AUTOTUNING
    text = (
        f"Kernel {call.display_name!r}: tuning at run time needs jaxlib {gate.stable} (nightly "
        f"{gate.nightly}) or later, {versions.gated_version()} is installed; "
    )
    if settings.enforce_autotuning():
        raise VersionError(
            text + "TRIAX_ENFORCE_AUTOTUNING=1 forbids to fall back to one config. "
            "Upgrade JAX, unset it, or use tuning mode 'auto', which tunes ahead of time."
        )
    warnings.warn(text + "its first config is used.", UserWarning, stacklevel=2)


# --- compiling ----------------------------------------------------------------------------


def _first_that_compiles(
    call: Call, launches: Sequence[Launch], compute_capability: int, source: str
) -> Chosen:
    reasons = []
    for launch in launches:
        (result,) = compiler.compile_all([launch], compute_capability)
        if isinstance(result, CompiledKernel):
            _note(result, Decision(label(launch), source))
            return [(launch, result)]
        reasons.append(_drop(launch, result))
    raise _none_left(call, reasons)


def _all_that_compile(call: Call, launches: Sequence[Launch], compute_capability: int) -> Chosen:
    chosen, reasons = [], []
    results = compiler.compile_all(launches, compute_capability)
    for launch, result in zip(launches, results, strict=True):
        if isinstance(result, CompiledKernel):
            _note(result, Decision(label(launch), "tuned by XLA at run time"))
            chosen.append((launch, result))
        else:
            reasons.append(_drop(launch, result))
    if not chosen:
        raise _none_left(call, reasons)
    return chosen


def _drop(launch: Launch, error: Exception) -> str:
    reason = compiler.failure(launch, error)
    logger.warning("config dropped: %s", reason)
    return reason


def _none_left(call: Call, reasons: Sequence[str]) -> CompilationError:
    listed = "\n  ".join(reasons)
    return CompilationError(
        f"None of the {len(reasons)} configs of kernel {call.display_name!r} compiles and runs:\n"
        f"  {listed}"
    )
