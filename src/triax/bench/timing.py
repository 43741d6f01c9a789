"""How long a compiled program takes on its device.

On CUDA a stream of our own stands beside JAX's, and after each call it waits for the call's
output and records an event. The time between two events is the device's time for one call,
provided that the second call was waiting before the first one ended: a sample whose call came
too late is dropped. Programs shorter than the host needs to start them are started behind a kernel
that keeps the device busy until all of them are waiting. They are also repeated inside one program,
where they can be: what one of many runs in a CUDA graph takes has no share in starting a program.
Elsewhere the host's clock has to do.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax

from triax.bench.clock import CudaClock, delay
from triax.bridge.devices import is_cuda

MIN_SAMPLES = 15
MAX_SAMPLES = 300
_PROBE_CALLS = 8
# JAX holds calls back once 32 of them are under way; a round stays below.
_ROUND_CALLS = 16
_MAX_FAILURES = 8
_MAX_HOLD_US = 20_000.0
_FEW_REPEATS, _MANY_REPEATS = 4, 24
_MIN_HOST_SAMPLES, _MAX_HOST_SAMPLES = 5, 50


@dataclasses.dataclass(frozen=True)
class Timing:
    """What was measured of one call, in microseconds.

    `method` is "events" (device time of single calls), "graph" (only `graph_us` could be
    measured, and stands for all), "host clock", or "host-bound": the host could not keep up, and
    the time is that of the host, no less than the device's. `graph_us` is the device time of one
    of many runs inside one program, where that was measured.
    """

    median_us: float
    p10_us: float
    p90_us: float
    samples: int
    method: str
    graph_us: float | None = None

    @classmethod
    def of(cls, samples_us: Sequence[float], method: str) -> Timing:
        """The summary of samples, at least one."""
        ordered = sorted(samples_us)
        at = lambda share: ordered[round(share * (len(ordered) - 1))]
        return cls(statistics.median(ordered), at(0.1), at(0.9), len(ordered), method)


class Clock(Protocol):
    """What `time_calls` needs of a device; `CudaClock` is the real one."""

    def now_us(self) -> float:
        """The host's time."""

    def record(self, index: int, output: Any) -> None:
        """Event `index` fires when `output` is there."""

    def is_pending(self, index: int) -> bool:
        """Whether event `index` has yet to fire."""

    def wait(self, index: int) -> None:
        """Returns when event `index` has fired."""

    def between_us(self, first: int, second: int) -> float:
        """The device's time between two events that have fired."""


Chain = Callable[[Any, Any], Any]


def time_program(
    program: Callable[[Any], Any],
    inputs: Any,
    *,
    chain: Chain | None = None,
    target_ms: float = 80.0,
) -> Timing:
    """Times a jitted program of `inputs`, which is compiled by now or is then.

    Args:
      program: from inputs to outputs.
      inputs: a pytree of arrays, all on one device.
      chain: makes next inputs of inputs and outputs; lets short programs be repeated.
      target_ms: about how much of the device's time to spend.
    """
    jax.block_until_ready(program(inputs))
    device = jax.devices()[0]
    if not is_cuda(device):
        return _time_on_host(lambda: program(inputs), target_ms)
    repeated = None if chain is None else functools.partial(_repeated, program, chain, inputs)
    clock = CudaClock.of(device)
    return time_calls(
        lambda: program(inputs),
        clock,
        hold=lambda us: delay(clock, us),
        repeated=repeated,
        target_ms=target_ms,
    )


def time_calls(
    call: Callable[[], Any],
    clock: Clock,
    *,
    hold: Callable[[float], Any],
    repeated: Callable[[int], Callable[[], Any]] | None = None,
    target_ms: float = 80.0,
) -> Timing:
    """Times `call`, which starts a program that has run before, and returns its outputs.

    Args:
      call: starts one run.
      clock: the device's.
      hold: keeps the device busy for about so many microseconds; what it returns is kept alive
        until they are over.
      repeated: from a number to what starts so many runs inside one program.
      target_ms: about how much of the device's time to spend.
    """
    probe = _sample(call, clock, _PROBE_CALLS)
    count = round(target_ms * 1e3 / max(statistics.median(probe.all_us), 1e-3))
    count = max(MIN_SAMPLES, min(count, MAX_SAMPLES))
    if 2 * len(probe.good_us) > _PROBE_CALLS:
        sample = _sample(call, clock, count)
        if 2 * len(sample.good_us) > count:
            return Timing.of(sample.good_us, "events")
    graph_us = None if repeated is None else _time_repeated(repeated, clock, hold)
    good_us = _in_rounds(call, clock, hold, min(count, 4 * _ROUND_CALLS))
    if len(good_us) >= MIN_SAMPLES:
        timing = Timing.of(good_us, "events")
    elif graph_us is not None:
        timing = Timing.of([graph_us], "graph")
    else:
        timing = Timing.of(probe.all_us, "host-bound")
    return dataclasses.replace(timing, graph_us=graph_us)


@dataclasses.dataclass(frozen=True)
class _Sample:
    """Times between the ends of neighbouring calls.

    `good_us` are those of calls that waited for the device, `host_us` is what the host needed
    for one call, in a sequence that it did not have to wait in.
    """

    all_us: list[float]
    good_us: list[float]
    host_us: float


def _sample(
    call: Callable[[], Any], clock: Clock, count: int, hold: Callable[[], Any] | None = None
) -> _Sample:
    held = None if hold is None else hold()
    waited = []
    start_us = clock.now_us()
    outputs = None
    for index in range(count + 1):
        # Dropped first, so that the next run gets the same memory: XLA's graphs hold addresses,
        # and are updated where these change.
        outputs = None
        outputs = call()
        clock.record(index, outputs)
        # The event fires a little after the call has ended. That the call before the last one
        # has not ended yet tells for sure that the device had something to do all the while.
        if index:
            waited.append(clock.is_pending(max(index - 2, 0)))
    host_us = (clock.now_us() - start_us) / (count + 1)
    outputs = None
    clock.wait(count)
    del held
    all_us = [clock.between_us(index - 1, index) for index in range(1, count + 1)]
    good_us = [us for us, good in zip(all_us, waited, strict=True) if good]
    return _Sample(all_us, good_us, host_us)


def _in_rounds(
    call: Callable[[], Any], clock: Clock, hold: Callable[[float], Any], count: int
) -> list[float]:
    """At least `count` good samples of calls that start behind a busy device, or what there is."""
    host_us = _sample(call, clock, _PROBE_CALLS).host_us
    good_us: list[float] = []
    failures = 0
    while len(good_us) < count and failures <= _MAX_FAILURES:
        hold_us = min(1.5 * host_us * (_ROUND_CALLS + 1) + 100, _MAX_HOLD_US)
        sample = _sample(call, clock, _ROUND_CALLS, functools.partial(hold, hold_us))
        if len(sample.good_us) == _ROUND_CALLS:
            good_us += sample.good_us
        else:
            failures += 1
            host_us = max(1.5 * host_us, sample.host_us)
    return good_us


def _time_repeated(
    repeated: Callable[[int], Callable[[], Any]], clock: Clock, hold: Callable[[float], Any]
) -> float | None:
    """One run's time as the difference of many runs and few: what a program costs falls out."""
    medians = []
    for repeats in (_FEW_REPEATS, _MANY_REPEATS):
        call = repeated(repeats)
        clock.record(0, call())  # compiles
        clock.wait(0)
        found = _in_rounds(call, clock, hold, 2 * _ROUND_CALLS)
        if len(found) < MIN_SAMPLES:
            return None
        medians.append(statistics.median(found))
    one_us = (medians[1] - medians[0]) / (_MANY_REPEATS - _FEW_REPEATS)
    return one_us if one_us > 0 else None


def _repeated(
    program: Callable[[Any], Any], chain: Chain, inputs: Any, repeats: int
) -> Callable[[], Any]:
    def run(inputs: Any) -> Any:
        outputs = program(inputs)
        for _ in range(repeats - 1):
            # All inputs through the barrier, so that XLA computes nothing of the next run ahead,
            # or once for all of them.
            inputs = jax.lax.optimization_barrier(chain(inputs, outputs))
            outputs = program(inputs)
        return outputs

    compiled = jax.jit(run)
    return lambda: compiled(inputs)


def _time_on_host(call: Callable[[], Any], target_ms: float) -> Timing:
    samples_us: list[float] = []
    while len(samples_us) < _MIN_HOST_SAMPLES or (
        len(samples_us) < _MAX_HOST_SAMPLES and sum(samples_us) < target_ms * 1e3
    ):
        start = time.perf_counter()
        jax.block_until_ready(call())
        samples_us.append((time.perf_counter() - start) * 1e6)
    return Timing.of(samples_us, "host clock")
