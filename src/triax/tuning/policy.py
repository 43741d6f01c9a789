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
from collections.abc import Callable, Collection, Sequence

from triax import settings
from triax.binding.launch import BoundCall, CompiledKernel, Launch
from triax.compat import versions
from triax.devices import Device
from triax.errors import TuningError, VersionError
from triax.tuning import agree, misses, store
from triax.tuning.key import SIZE_FACTOR, Key, label
from triax.tuning.request import HOW_TO_TUNE, Fallback, Request
from triax.tuning.store import Record, Timing

logger = logging.getLogger(__name__)

_ELSEWHERE = "another process of this job"


@dataclasses.dataclass(frozen=True)
class Decision:
    """A config, where it came from, and the timings of all candidates.

    `source` is "only config", "first config", "user store", "measured now", … `record` is the
    record of the key, if it was measured, now or before; the job may use another config.
    """

    config: str
    source: str
    record: Record | None = None

    @property
    def timings(self) -> tuple[Timing, ...]:
        return () if self.record is None else self.record.timings

    @property
    def measured_bytes(self) -> int | None:
        """The bytes moved by the call that the config was measured on; None if it was not."""
        if self.record is None or self.record.config != self.config:
            return None
        return self.record.key.moved_bytes


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
_unmeasurable: dict[str, Fallback] = {}  # by the key's name, so that measuring is tried once
_noted: dict[str, Decision] = {}
_near: dict[str, list[misses.Near]] = {}  # by the key's name: a look-up reads many files
_reported: set[str] = set()  # kernels whose fallback was logged
listeners: list[Callable[[Record], None]] = []
"""Functions called with every record that a call's config comes from."""


def _renew_lock() -> None:
    """Replaces the lock in a forked child, which has no thread that could release it."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def forget() -> None:
    """Forgets the decisions of this process. Stores are not touched."""
    with _lock:
        for memory in (_resolved, _measured, _unmeasurable, _noted, _near, _reported):
            memory.clear()


def decision(name: str) -> Decision | None:
    """The last decision on a key, by its name; for kernels with one config, by entry name."""
    return _noted.get(name)


def note(choice: Choice, kernels: Sequence[CompiledKernel]) -> None:
    """Lets `decision` find a choice without a key, by the names of the compiled kernels."""
    if not choice.key:
        _noted.update((kernel.name, choice.decision) for kernel in kernels)


def choose(request: Request) -> Choice:
    """Chooses the launches to hand to XLA.

    A request with `inputs` is measured on copies of them, even if a config is known.

    Raises:
      CompilationError: none of several candidates compiles and runs; the message has every reason.
      TuningError: in mode "strict", no tuned config is known.
      VersionError: jaxlib is too old for mode "runtime", with ``TRIAX_ENFORCE_AUTOTUNING=1``.
    """
    launches, mode = request.launches, request.call.tuning
    if len(launches) == 1:
        return Choice([launches[0]], Decision(label(launches[0]), "only config"))
    if request.inputs is None and mode in ("off", "runtime"):
        batches, source = [[launch] for launch in request.stand_ins], f"first config (mode {mode})"
        if mode == "runtime":
            if versions.RUNTIME_AUTOTUNING.passes(versions.gated_version()):
                batches, source = [list(launches)], "tuned by XLA at run time"
            else:
                _report_old_version(request.call)
        launches = request.that_compile(batches)
        return Choice(launches, Decision(label(launches[0]), source))
    with _lock:
        choice = _look_up(request)
    _noted[choice.key] = decided = choice.decision
    if decided.record is not None and decided.measured_bytes is not None:
        for listen in tuple(listeners):
            listen(decided.record)
    return choice


# --- ahead of time ------------------------------------------------------------------


def _look_up(request: Request) -> Choice:
    """Looks a request's key up, else measures it, else falls back.

    The result is published to the job's other processes before it is used; if one of them published
    first, its config is used instead.
    """
    key = request.key
    labels = [label(launch) for launch in request.stand_ins]
    known = _resolved.get(key.name)
    if known is not None and known.config in labels and request.inputs is None:
        return _chosen(request, known)
    try:
        if request.inputs is not None:
            outcome: Decision | Fallback = _measured_for_real(request)
        else:
            outcome = _known(request, labels) or _measured_or_not(request)
        if isinstance(outcome, Fallback):
            return _fall_back(request, outcome)
        decision = _resolved[key.name] = _agreed(request, outcome)
        measured = _measured.setdefault(key.family, [])
        if decision.measured_bytes is not None and decision not in measured:
            measured.insert(0, decision)
        return _chosen(request, decision)
    except BaseException:
        agree.release(key.name)
        raise


def _chosen(request: Request, decision: Decision) -> Choice:
    launch = next(s for s in request.stand_ins if label(s) == decision.config)
    return Choice([launch], decision, request.key.name)


def _fall_back(request: Request, fallback: Fallback) -> Choice:
    """Picks a config that compiles; failed ones are left out, doubtful ones come last.

    Those that were the best in the nearest known records of the same GPU come first.
    """
    call, key = request.call, request.key
    nearest = _nearest_records(request)
    near = misses.of_the_card(key, nearest)
    best = [one.record.config for one in near]
    left = [s for s in request.stand_ins if label(s) not in fallback.failed]

    def order(launch: Launch) -> tuple[bool, int]:
        config = label(launch)
        return config in fallback.doubtful, best.index(config) if config in best else len(best)

    left.sort(key=order)
    config = label(request.that_compile([[launch] for launch in left])[0])
    chosen = [one for one in near if one.record.config == config]
    known = misses.described(key, chosen or nearest)
    if chosen:
        source = f"nearest known config ({chosen[0].place})"
        using = f"using [{config}], the best of the nearest record, {known}"
    else:
        source = f"first config (mode {call.tuning})"
        using = f"using the first config that compiles: [{config}]"
        using += f". One is {known}" if known else ""
    # Once for each kernel: a program may call it with many sizes.
    log = logger.info if call.display_name in _reported else logger.warning
    _reported.add(call.display_name)
    log(
        "kernel %s (%s): no tuned config is known and none is measured: %s; %s",
        *(call.display_name, key.name, fallback.reason, using),
    )
    _warn(
        f"tune on the GPU that the program will run on, with {HOW_TO_TUNE}."
        + _about_gpu(request.device)
    )
    agreed = _agreed(request, Decision(config, source))
    if agree.is_job():  # the config is published, so this process must keep it
        _resolved[key.name] = agreed
    return _chosen(request, agreed)


def _known(request: Request, labels: Collection[str]) -> Decision | None:
    """Finds the config that this process, a store or another process knows.

    Of the configs in this process, the one measured on the nearest size counts.
    """
    key = request.key
    if (own := _nearest(key, labels)) is not None:
        return own
    if (stored := store.find(key)) is not None:
        record, place = stored
        return Decision(record.config, place.name, record)
    config = agree.published(key.name)
    return None if config is None else Decision(config, _ELSEWHERE)


def _nearest(key: Key, labels: Collection[str]) -> Decision | None:
    measured = [d for d in _measured.get(key.family, ()) if d.config in labels]
    near = [(key.ratio(d.measured_bytes or 0), i, d) for i, d in enumerate(measured)]
    return min(near)[2] if near and min(near)[0] <= SIZE_FACTOR else None


def _measured_or_not(request: Request) -> Decision | Fallback:
    """The config that another process of the job or this one measures, or why neither does."""
    call, name = request.call, request.key.name
    if call.tuning == "strict":
        known = misses.described(request.key, _nearest_records(request))
        raise TuningError(
            f"Kernel {call.display_name!r} has {len(request.launches)} configs, but no tuned one "
            f"is known for {name}, and tuning mode 'strict' requires it. "
            + (f"One is {known}. " if known else "")
            + f"Tune it with {HOW_TO_TUNE}, or run once with TRIAX_AUTOTUNE=auto."
            + _about_gpu(request.device)
        )
    if call.tuning == "cached":
        problem: Fallback | None = Fallback("mode 'cached' does not measure")
    elif (problem := _unmeasurable.get(name)) is None and (why := _unavailable(request.device)):
        problem = Fallback(why)
    if (config := agree.settle(name, able=problem is None)) is not None:
        return Decision(config, _ELSEWHERE)
    if problem is not None:
        return problem
    near = _nearest_records(request)
    if near and near[0].fields == ("triton",):
        known = misses.described(request.key, near)
        _warn(f"kernels are measured anew, because their configs are {known}")
    if isinstance(outcome := _search(request), Fallback):
        _unmeasurable[name] = outcome
    return outcome


def _agreed(request: Request, decision: Decision) -> Decision:
    """Publishes a decision; returns the one that the job uses."""
    key = request.key
    config = agree.agree(key.name, decision.config)
    if config == decision.config:
        return decision
    if config not in map(label, request.stand_ins):
        raise TuningError(
            f"Another process of this job uses config [{config}] for {key.name}, which is not "
            f"among this process's candidates: {'; '.join(key.candidates)}. Run the same program "
            "in all processes."
        )
    return Decision(config, _ELSEWHERE, decision.record)


def _measured_for_real(request: Request) -> Decision:
    """Measures on the real operands; the caller asked for that, so there is no fallback."""
    if (problem := _unavailable(request.device)) is not None:
        raise TuningError(f"Kernel {request.call.display_name!r} cannot be tuned: {problem}.")
    outcome = _search(request)
    if isinstance(outcome, Fallback):
        raise TuningError(outcome.reason)
    return outcome


def _search(request: Request) -> Decision | Fallback:
    from triax.tuning.search import search  # imported only to measure: it loads slowly

    outcome = search(request)
    if isinstance(outcome, Fallback):
        return outcome
    return Decision(outcome.config, "measured now", outcome)


def _unavailable(device: Device | None) -> str | None:
    """Says why nothing can be measured on a device; None if something can."""
    if device is None or not device.measurable:
        return "the program is not lowered to run on a GPU of this process"
    from triax.tuning import measure  # imported only to measure: it loads slowly

    return measure.unavailable()


def _about_gpu(device: Device | None) -> str:
    """A hint for messages about the GPU to tune on."""
    if device is None:
        return " If that GPU is not here, set TRIAX_GPU to its name."
    return "" if device.measurable else f" The GPU is {device.name!r}."


def _nearest_records(request: Request) -> list[misses.Near]:
    """The kernel's known records, none of which serves the request."""
    key, own = request.key, [d for decisions in _measured.values() for d in decisions]
    if key.name not in _near:
        known = [(d.record, d.source) for d in own if d.record is not None]
        known += store.known(key.kernel)
        _near[key.name] = misses.nearest(key, known)
    return _near[key.name]


@functools.cache  # each text once, however often a kernel is traced
def _warn(text: str) -> None:
    logger.warning(text)


# --- at run time ------------------------------------------------------------------------


def _report_old_version(call: BoundCall) -> None:
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
    warnings.warn(text + "using the first config.", UserWarning, stacklevel=2)
