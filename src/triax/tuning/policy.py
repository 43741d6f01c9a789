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
from collections.abc import Collection, Sequence
from typing import Any

from triax.bridge import ahead, compiler, settings
from triax.bridge.compat import versions
from triax.bridge.errors import TuningError, VersionError
from triax.bridge.launch import Call, CompiledKernel, Launch
from triax.tuning import agree, failures, store
from triax.tuning.key import Device, Key, label, make_key
from triax.tuning.store import Timing

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Decision:
    """A config, where it came from, and what is known of the others.

    `source` is "only config", "first config", "user store", "measured now", … ; `timings`
    are empty unless the config was measured, now or when it was stored, on a call that moved
    `measured_bytes`.
    """

    config: str
    source: str
    timings: tuple[Timing, ...] = ()
    measured_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class Choice:
    """What XLA is given: launches with their compiled kernels, and how they were chosen.

    `key` is the name under which a decision was looked up, "" where there was none to make.
    """

    chosen: list[tuple[Launch, CompiledKernel]]
    decision: Decision
    key: str = ""


_lock = threading.RLock()
_resolved: dict[str, list[tuple[Key, Decision]]] = {}  # by the key's family
# By the key's name: what measuring failed of, so that it is tried once, and the fallbacks that
# this process has published.
_unmeasurable: dict[str, Fallback] = {}
_fallbacks: dict[str, Fallback] = {}
_noted: dict[str, Decision] = {}


def forget() -> None:
    """Forgets what this process has resolved. Stores are not touched."""
    with _lock:
        _resolved.clear()
        _unmeasurable.clear()
        _fallbacks.clear()
        _noted.clear()


def decision(name: str) -> Decision | None:
    """The last decision on a key, by its name; for kernels with one config, by entry name."""
    return _noted.get(name)


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
) -> Choice:
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
        choice = Choice([(launches[0], kernel)], Decision(label(launches[0]), "only config"))
    else:
        stand_ins = [*([fallback] if fallback else []), *launches]
        choice = _choose_of_many(call, launches, compute_capability, device, inputs, stand_ins)
    for name in [choice.key] if choice.key else [kernel.name for _, kernel in choice.chosen]:
        _noted[name] = choice.decision
    return choice


def _choose_of_many(
    call: Call,
    launches: Sequence[Launch],
    compute_capability: int,
    device: Device | None,
    inputs: Sequence[Any] | None,
    stand_ins: Sequence[Launch],
) -> Choice:
    mode = call.tuning
    if mode == "runtime" and inputs is None:
        if tries_all_configs(mode):
            return _all_that_compile(call, launches, compute_capability)
        _report_old_version(call)
    if mode in ("off", "runtime") and inputs is None:
        return _first_that_compiles(call, stand_ins, compute_capability, _first_config(mode))
    key = make_key(call, launches, compute_capability, device)
    with _lock:
        labels = [label(launch) for launch in stand_ins]
        known: Decision | Fallback | None = None if inputs is not None else _known(key, labels)
        if known is None:
            request = _Request(call, launches, compute_capability, device, key, inputs)
            known = request.resolve(labels)
            if isinstance(known, Decision):
                _resolved.setdefault(key.family, []).insert(0, (key, known))
        if isinstance(known, Fallback):
            left = [launch for launch in stand_ins if label(launch) not in known.failed]
            source = _first_config(mode)
            choice = _first_that_compiles(call, left, compute_capability, source)
            return dataclasses.replace(choice, key=key.name)
    launch = next(launch for launch in stand_ins if label(launch) == known.config)
    kernel = ahead.compile_launch(launch, compute_capability)
    return Choice([(launch, kernel)], known, key.name)


def _first_config(mode: str) -> str:
    return f"first config (mode {mode})"


def _known(key: Key, labels: Collection[str]) -> Decision | None:
    """What this process has resolved for a key, or one near it, the nearest first."""
    resolved = _resolved.get(key.family, ())
    near = [(k, d) for k, d in resolved if k.is_near(key) and d.config in labels]
    return min(near, key=lambda pair: key.ratio(pair[0].moved_bytes))[1] if near else None


# --- ahead of time ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Fallback:
    """Why no config is chosen, and which of them are known not to run."""

    reason: str
    failed: Collection[str] = ()


@dataclasses.dataclass(frozen=True)
class _Request:
    """A call whose config is to be found, in a store, by another process, or by measuring."""

    call: Call
    launches: Sequence[Launch]
    compute_capability: int
    device: Device | None
    key: Key
    inputs: Sequence[Any] | None

    def resolve(self, stand_ins: Sequence[str]) -> Decision | Fallback:
        """Looks the key up, else measures it.

        What is found is published to the job's other processes before it is used, and what
        they have published first is used instead. So is the first of the `stand_ins`, where
        nothing is found.
        """
        name = self.key.name
        if self.inputs is not None:
            return self._agreed(self._measured_for_real(), stand_ins)
        if (found := store.find(self.key)) is not None:
            record, where = found
            sure = Decision(record.config, where.name, record.timings, record.key.moved_bytes)
            return self._agreed(sure, stand_ins)
        if (config := agree.published(name)) is not None:
            own = _fallbacks.get(name)
            return own or self._agreed(Decision(config, _ELSEWHERE), stand_ins)
        if self.call.tuning == "strict":
            raise TuningError(
                f"Kernel {self.call.display_name!r} has {len(self.launches)} configs and none is "
                f"known to be tuned for {name}, which tuning mode 'strict' asks for. Tune it with "
                "`triax tune FILE:FUNCTION`, or once under TRIAX_AUTOTUNE=auto."
            )
        problem = self._problem()
        config = agree.settle(name, able=problem is None)
        if config is not None:
            return self._agreed(Decision(config, _ELSEWHERE), stand_ins)
        if problem is None:
            try:
                measured = self._measured()
            except BaseException:
                agree.release(name)
                raise
            if isinstance(measured, Decision):
                return self._agreed(measured, stand_ins)
            problem = _unmeasurable[name] = measured
        config = next(c for c in stand_ins if c not in problem.failed)
        _log_fallback(self.call.display_name, name, config, problem.reason)
        # Published too: the job has one config per key, measured or not.
        agreed = agree.agree(name, config)
        if agreed != config:
            return self._agreed(Decision(agreed, _ELSEWHERE), stand_ins)
        _fallbacks[name] = problem
        return problem

    def _agreed(self, found: Decision, stand_ins: Sequence[str]) -> Decision:
        """Publishes a decision; the one that the job uses."""
        config = agree.agree(self.key.name, found.config)
        if config == found.config:
            return found
        if config not in stand_ins:
            raise TuningError(
                f"Another process of this job uses config [{config}] for {self.key.name}, which "
                f"is not among this process's: {'; '.join(self.key.candidates)}. Do all run the "
                "same program?"
            )
        return dataclasses.replace(found, config=config, source=_ELSEWHERE)

    def _problem(self) -> Fallback | None:
        """Why nothing is measured, or None."""
        if self.call.tuning == "cached":
            return Fallback("mode 'cached' does not measure")
        if (known := _unmeasurable.get(self.key.name)) is not None:
            return known
        problem = _problem(self.device)
        return None if problem is None else Fallback(problem)

    def _measured(self) -> Decision | Fallback:
        from triax.tuning.search import Undecided  # only where something is measured: it is slow

        try:
            return self._search()
        except Undecided as error:
            return Fallback(str(error), error.failed)
        except (TuningError, OSError, MemoryError) as error:
            return Fallback(str(error) or type(error).__name__)

    def _measured_for_real(self) -> Decision:
        """On the real operands, because the caller asks for nothing but this."""
        if (problem := _problem(self.device)) is not None:
            raise TuningError(f"Kernel {self.call.display_name!r} cannot be tuned: {problem}.")
        try:
            return self._search()
        except (OSError, MemoryError) as error:
            raise TuningError(
                f"Kernel {self.call.display_name!r} cannot be tuned: {error or 'no memory'}."
            ) from error

    def _search(self) -> Decision:
        from triax.tuning.search import search  # only where something is measured: it is slow

        assert self.device is not None
        record = search(
            self.call, self.launches, self.compute_capability, self.device, self.key, self.inputs
        )
        return Decision(record.config, "measured now", record.timings, self.key.moved_bytes)


_ELSEWHERE = "another process of this job"


def _problem(device: Device | None) -> str | None:
    """Why nothing can be measured on a device, or None."""
    if device is None or not device.measurable:
        return "the program is not lowered to run on a GPU of this process"
    from triax.tuning import measure  # only where something is measured: it loads slowly

    return measure.problem()


@functools.cache  # one line per kernel and choice, however often it is traced
def _log_fallback(name: str, key: str, config: str, reason: str) -> None:
    logger.warning(
        "kernel %s (%s): no tuned config is known and none is measured: %s. Its first is used: "
        "[%s]. Tune it with `triax tune FILE:FUNCTION` on the GPU it will run on.",
        name,
        key,
        reason,
        config,
    )


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
) -> Choice:
    reasons = []
    for launch in launches:
        (result,) = compiler.compile_all([launch], compute_capability)
        if isinstance(result, CompiledKernel):
            return Choice([(launch, result)], Decision(label(launch), source))
        reasons.append(failures.dropped(launch, result))
    raise failures.none_left(call, reasons)


def _all_that_compile(call: Call, launches: Sequence[Launch], compute_capability: int) -> Choice:
    chosen, reasons = [], []
    results = compiler.compile_all(launches, compute_capability)
    for launch, result in zip(launches, results, strict=True):
        if isinstance(result, CompiledKernel):
            chosen.append((launch, result))
        else:
            reasons.append(failures.dropped(launch, result))
    if not chosen:
        raise failures.none_left(call, reasons)
    return Choice(chosen, Decision(label(chosen[0][0]), "tuned by XLA at run time"))
