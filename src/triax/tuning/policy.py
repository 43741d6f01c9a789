"""Decides which config a kernel runs with.

In: a bound call, the launches of its candidates, and the compiler. Out: the launches for XLA: one,
or in mode "runtime" all of them. A kernel with several configs gets one before XLA sees it: known
to this process, found in a store, or measured.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import threading
import warnings
from collections.abc import Collection, Sequence
from typing import Any

from triax import settings
from triax.binding.launch import Call, CompiledKernel, Launch
from triax.compat import versions
from triax.devices import Device
from triax.errors import TuningError, VersionError
from triax.tuning import agree, failures, store
from triax.tuning.failures import CompileAll, Fallback
from triax.tuning.key import SIZE_FACTOR, Key, label, make_key
from triax.tuning.store import Timing

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Decision:
    """A config, where it came from, and the timings of all candidates.

    `source` is "only config", "first config", "user store", "measured now", … `timings` is empty
    unless the config was measured, now or before it was stored, on a call that moved
    `measured_bytes`.
    """

    config: str
    source: str
    timings: tuple[Timing, ...] = ()
    measured_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class Choice:
    """The launches for XLA, which compile, and how they were chosen.

    `key` is the name under which the decision was looked up, "" if there was nothing to decide.
    """

    launches: list[Launch]
    decision: Decision
    key: str = ""


_lock = threading.RLock()
_resolved: dict[str, Decision] = {}  # by the key's name
_measured: dict[str, list[Decision]] = {}  # by the key's family
_unmeasurable: dict[str, Fallback] = {}  # by the key's name, so that it is tried once
_noted: dict[str, Decision] = {}


def _renew_lock() -> None:
    """In a forked child no thread is left to release it."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def forget() -> None:
    """Forgets what this process has resolved. Stores are not touched."""
    with _lock:
        for memory in (_resolved, _measured, _unmeasurable, _noted):
            memory.clear()


def decision(name: str) -> Decision | None:
    """The last decision on a key, by its name; for kernels with one config, by entry name."""
    return _noted.get(name)


def choose(
    call: Call,
    launches: Sequence[Launch],
    compute_capability: int,
    compile_all: CompileAll,
    device: Device | None = None,
    inputs: Sequence[Any] | None = None,
    fallback: Launch | None = None,
) -> Choice:
    """The launches to hand to XLA.

    Args:
      call: the bound call.
      launches: one per candidate, at least one.
      compute_capability: to compile for.
      compile_all: the compiler.
      device: the GPU to measure on, or None to measure nothing.
      inputs: the real operands; if given, measure on copies of them, even if a config is known.
      fallback: the launch to use if none is chosen; by default the first.

    Raises:
      CompilationError: none of several candidates compiles and runs; the message has every reason.
      TuningError: in mode "strict", no tuned config is known.
      VersionError: jaxlib is too old for mode "runtime", with ``TRIAX_ENFORCE_AUTOTUNING=1``.
    """
    if len(launches) == 1:
        return Choice([launches[0]], Decision(label(launches[0]), "only config"))
    stand_ins = [*([fallback] if fallback else []), *launches]
    mode = call.tuning
    if mode == "runtime" and inputs is None:
        if versions.RUNTIME_AUTOTUNING.passes(versions.gated_version()):
            source = "tuned by XLA at run time"
            return _that_compile(call, [launches], compute_capability, compile_all, source)
        _report_old_version(call)
    if mode in ("off", "runtime") and inputs is None:
        one_by_one = [[launch] for launch in stand_ins]
        source = _first_config(mode)
        return _that_compile(call, one_by_one, compute_capability, compile_all, source)
    lookup = _Lookup(
        call,
        launches,
        stand_ins,
        compute_capability,
        compile_all,
        device,
        make_key(call, launches, compute_capability, device),
        inputs,
    )
    with _lock:
        choice = lookup.choice()
    _noted[choice.key] = choice.decision
    return choice


def note(choice: Choice, kernels: Sequence[CompiledKernel]) -> None:
    """Lets `decision` find a choice without a key, by the names of the compiled kernels."""
    if not choice.key:
        _noted.update((kernel.name, choice.decision) for kernel in kernels)


def _first_config(mode: str) -> str:
    return f"first config (mode {mode})"


# --- ahead of time ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Lookup:
    """A call whose config must be found: in a store, by another process, or by measuring.

    `stand_ins` are the launches to try, in this order, if none is found; they include all
    candidates.
    """

    call: Call
    launches: Sequence[Launch]
    stand_ins: Sequence[Launch]
    compute_capability: int
    compile_all: CompileAll
    device: Device | None
    key: Key
    inputs: Sequence[Any] | None

    def choice(self) -> Choice:
        """Looks the key up, else measures it, else falls back.

        The result is published to the job's other processes before it is used; if one of them
        published first, its config is used instead.
        """
        labels = [label(launch) for launch in self.stand_ins]
        known = _resolved.get(self.key.name)
        if known is not None and known.config in labels and self.inputs is None:
            return self._chosen(known)
        try:
            found = self._look_up(labels) if self.inputs is None else self._measured_for_real()
            if isinstance(found, Fallback):
                return self._fall_back(found)
            decision = _resolved[self.key.name] = self._agreed(found)
            measured = _measured.setdefault(self.key.family, [])
            if decision.measured_bytes is not None and decision not in measured:
                measured.insert(0, decision)
            return self._chosen(decision)
        except BaseException:
            agree.release(self.key.name)
            raise

    def _chosen(self, decision: Decision) -> Choice:
        launch = next(s for s in self.stand_ins if label(s) == decision.config)
        return Choice([launch], decision, self.key.name)

    def _fall_back(self, fallback: Fallback) -> Choice:
        """The first config that compiles and is not known to fail, if possible not a slow one."""
        left = [s for s in self.stand_ins if label(s) not in fallback.failed]
        left.sort(key=lambda launch: label(launch) in fallback.slow)
        choice = _that_compile(
            self.call,
            [[launch] for launch in left],
            self.compute_capability,
            self.compile_all,
            _first_config(self.call.tuning),
        )
        config, name = choice.decision.config, self.key.name
        call = self.call
        _log_fallback(
            call.display_name, name, config, fallback.reason, call.kernel.name, self.device
        )
        agreed = self._agreed(choice.decision)
        if agree.is_job():  # and so settled for good
            _resolved[name] = agreed
        if agreed.config != config:
            return self._chosen(agreed)
        return dataclasses.replace(choice, key=name)

    def _look_up(self, labels: Collection[str]) -> Decision | Fallback:
        name = self.key.name
        if (near := self._near(labels)) is not None:
            return near
        if (found := store.find(self.key)) is not None:
            record, where = found
            return Decision(record.config, where.name, record.timings, record.key.moved_bytes)
        if (config := agree.published(name)) is not None:
            return Decision(config, _ELSEWHERE)
        if self.call.tuning == "strict":
            raise TuningError(
                f"Kernel {self.call.display_name!r} has {len(self.launches)} configs and none is "
                f"known to be tuned for {name}, but tuning mode 'strict' requires it. Tune it with "
                f"{failures.HOW_TO_TUNE}, or run once with TRIAX_AUTOTUNE=auto."
                + _about_gpus(self.call.kernel.name, self.device)
            )
        problem = self._why_not()
        config = agree.settle(name, able=problem is None)
        if config is not None:
            return Decision(config, _ELSEWHERE)
        if problem is not None:
            return problem
        measured = self._search()
        if isinstance(measured, Fallback):
            _unmeasurable[name] = measured
        return measured

    def _near(self, labels: Collection[str]) -> Decision | None:
        """The best config this process knows for a call of about this size, the nearest in size."""
        ratios = [
            (self.key.ratio(decision.measured_bytes or 0), index, decision)
            for index, decision in enumerate(_measured.get(self.key.family, ()))
            if decision.config in labels
        ]
        ratio, _, decision = min(ratios, default=(SIZE_FACTOR + 1, 0, None))
        return decision if ratio <= SIZE_FACTOR else None

    def _agreed(self, found: Decision) -> Decision:
        """Publishes a decision; returns the one that the job uses."""
        config = agree.agree(self.key.name, found.config)
        if config == found.config:
            return found
        if config not in map(label, self.stand_ins):
            raise TuningError(
                f"Another process of this job uses config [{config}] for {self.key.name}, which "
                f"is not among this process's: {'; '.join(self.key.candidates)}. Run the same "
                "program in all of them."
            )
        return Decision(config, _ELSEWHERE, found.timings)

    def _why_not(self) -> Fallback | None:
        """Why nothing is measured, or None."""
        if self.call.tuning == "cached":
            return Fallback("mode 'cached' does not measure")
        if (known := _unmeasurable.get(self.key.name)) is not None:
            return known
        problem = _unavailable(self.device)
        return None if problem is None else Fallback(problem)

    def _measured_for_real(self) -> Decision:
        """Measures on the real operands; the caller asked for that, so there is no fallback."""
        if (problem := _unavailable(self.device)) is not None:
            raise TuningError(f"Kernel {self.call.display_name!r} cannot be tuned: {problem}.")
        found = self._search()
        if isinstance(found, Fallback):
            raise TuningError(found.reason)
        return found

    def _search(self) -> Decision | Fallback:
        from triax.tuning.search import search  # only where something is measured: it is slow

        assert self.device is not None
        found = search(
            self.call,
            self.launches,
            self.compute_capability,
            self.compile_all,
            self.device,
            self.key,
            self.inputs,
        )
        if isinstance(found, Fallback):
            return found
        return Decision(found.config, "measured now", found.timings, self.key.moved_bytes)


_ELSEWHERE = "another process of this job"


def _unavailable(device: Device | None) -> str | None:
    """Why nothing can be measured on a device, or None."""
    if device is None or not device.measurable:
        return "the program is not lowered to run on a GPU of this process"
    from triax.tuning import measure  # only where something is measured: it loads slowly

    return measure.unavailable()


def _about_gpus(kernel: str, device: Device | None) -> str:
    """What helps if the program's GPU is not here: which it is, and which are known."""
    if device is not None and device.measurable:
        return ""
    known = [repr(name) for name in store.gpus(kernel) if device is None or name != device.name]
    stored = f" Stored configs of this kernel are for {', '.join(known)}." if known else ""
    if device is None:
        return f" Where that GPU is not here, TRIAX_GPU names it.{stored}"
    return f" The GPU is {device.name!r}.{stored}"


@functools.cache  # one line per kernel and choice, however often it is traced
def _log_fallback(
    name: str, key: str, config: str, reason: str, kernel: str, device: Device | None
) -> None:
    logger.warning(
        "kernel %s (%s): no tuned config is known and none is measured: %s. Its first is used: "
        "[%s]. Tune it on the GPU it will run on, with %s.%s",
        name,
        key,
        reason,
        config,
        failures.HOW_TO_TUNE,
        _about_gpus(kernel, device),
    )


# --- at run time ------------------------------------------------------------------------


def _report_old_version(call: Call) -> None:
    """Warns or raises because run-time tuning is not safe here.

    Timing configs on the program's own buffers needs aliased operands to be restored; older
    versions of jaxlib can crash doing so (see `versions.RUNTIME_AUTOTUNING`).
    """
    gate = versions.RUNTIME_AUTOTUNING
    text = (
        f"Kernel {call.display_name!r}: tuning at run time needs jaxlib {gate.stable} (nightly "
        f"{gate.nightly}) or later, {versions.gated_version()} is installed; "
    )
    if settings.enforce_autotuning():
        raise VersionError(
            text + "TRIAX_ENFORCE_AUTOTUNING=1 forbids falling back to one config. "
            "Upgrade JAX, unset it, or use tuning mode 'auto', which tunes ahead of time."
        )
    warnings.warn(text + "its first config is used.", UserWarning, stacklevel=2)


# --- compiling ----------------------------------------------------------------------------


def _that_compile(
    call: Call,
    batches: Sequence[Sequence[Launch]],
    compute_capability: int,
    compile_all: CompileAll,
    source: str,
) -> Choice:
    """The launches that compile, of the first batch in which any does."""
    reasons = []
    for batch in batches:
        compiled = []
        for launch, result in zip(batch, compile_all(batch, compute_capability), strict=True):
            if isinstance(result, CompiledKernel):
                compiled.append(launch)
            else:
                reasons.append(failures.dropped(launch, result))
        if compiled:
            return Choice(compiled, Decision(label(compiled[0]), source))
    raise failures.none_left(call, reasons)
