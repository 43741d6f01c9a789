"""Which config a kernel runs with.

In: a bound call and the launches of its candidates. Out: the launches to hand to XLA
with their compiled kernels: one, or in mode "runtime" all of them. The modes are in
`triax.bridge.settings`; measuring ahead of time is not part of this module yet, so
"auto" takes the first config and says so.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Sequence

from triax.bridge import compiler, settings
from triax.bridge.compat import versions
from triax.bridge.errors import CompilationError, TuningError, VersionError
from triax.bridge.launch import Call, CompiledKernel, Launch

logger = logging.getLogger(__name__)

Chosen = list[tuple[Launch, CompiledKernel]]


def tries_all_configs(mode: str) -> bool:
    """Whether a kernel with several configs is handed to XLA with all of them."""
    return mode == "runtime" and versions.RUNTIME_AUTOTUNING.passes(versions.gated_version())


def choose(call: Call, launches: Sequence[Launch], compute_capability: int) -> Chosen:
    """The launches to hand to XLA, compiled.

    Raises:
      CompilationError: no candidate compiles; the message has every reason.
      TuningError: mode "strict", and no tuned config is known.
      VersionError: mode "runtime" below its version with ``TRIAX_ENFORCE_AUTOTUNING=1``.
    """
    if len(launches) == 1:
        return [(launches[0], compiler.compile_launch(launches[0], compute_capability))]
    if call.tuning == "strict":
        raise TuningError(
            f"Kernel {call.display_name!r} has {len(launches)} configs and none is known to be "
            "tuned, which tuning mode 'strict' asks for. This version of Triax cannot tune ahead "
            "of time yet: use mode 'off' (the first config) or 'runtime'."
        )
    if call.tuning == "runtime":
        if tries_all_configs(call.tuning):
            return _all_that_compile(call, launches, compute_capability)
        _report_old_version(call)
    if call.tuning in ("auto", "cached"):
        _log_untuned(call.display_name, call.tuning, str(launches[0].candidate.config))
    return _first_that_compiles(call, launches, compute_capability)


def first(call: Call, launches: Sequence[Launch]) -> Launch:
    """The launch that stands for all where nothing is compiled, as in the interpreter."""
    return launches[0]


@functools.cache  # one line per kernel and choice, however often it is traced
def _log_untuned(name: str, mode: str, config: str) -> None:
    logger.info(
        "kernel %s: no tuned config is known (mode %s); using its first: %s", name, mode, config
    )


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
            "Upgrade JAX, unset it, or use tuning mode 'off'."
        )
    warnings.warn(text + "its first config is used.", UserWarning, stacklevel=2)


def _first_that_compiles(call: Call, launches: Sequence[Launch], compute_capability: int) -> Chosen:
    reasons = []
    for launch in launches:
        (result,) = compiler.compile_all([launch], compute_capability)
        if isinstance(result, CompiledKernel):
            return [(launch, result)]
        reasons.append(_drop(launch, result))
    raise _none_left(call, reasons)


def _all_that_compile(call: Call, launches: Sequence[Launch], compute_capability: int) -> Chosen:
    chosen, reasons = [], []
    results = compiler.compile_all(launches, compute_capability)
    for launch, result in zip(launches, results, strict=True):
        if isinstance(result, CompiledKernel):
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
        f"None of the {len(reasons)} configs of kernel {call.display_name!r} compiles:\n  {listed}"
    )
