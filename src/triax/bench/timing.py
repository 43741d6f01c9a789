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
from typing import Any, NamedTuple

import jax

from triax.bench.clock import clock_of
from triax.devices import is_cuda

MIN_SAMPLES = 15
MAX_SAMPLES = 300
_PROBE_CALLS = 8
# JAX holds calls back once 32 of them are under way; a round stays below.
_ROUND_CALLS = 16
_MAX_FAILURES = 8
_MAX_HOLD_US = 20_000.0
_FEW_REPEATS, _MANY_REPEATS = 4, 24
_MIN_HOST_SAMPLES, _MAX_HOST_SAMPLES = 5, 50
BURSTS, BURST_MS, REST_S = 3, 30.0, 0.12


@dataclasses.dataclass(frozen=True)
class CallTiming:
    """What was measured of one call, in microseconds.

    `method` is "events" (device time of single calls), "bursts" (the same, the mean of each burst),
    "graph" (only `graph_us` could be measured, and stands for all), "host clock", or "host-bound":
    the host could not keep up, and the time is that of the host, no less than the device's.
    `graph_us` is the device time of one of many runs inside one program, where that was measured.
    """

    median_us: float
    p10_us: float
    p90_us: float
    samples: int
    method: str
    graph_us: float | None = None

    @classmethod
    def of(cls, samples_us: Sequence[float], method: str) -> CallTiming:
        """The summary of samples, at least one."""
        ordered = sorted(samples_us)
        at = lambda share: ordered[round(share * (len(ordered) - 1))]
        return cls(statistics.median(ordered), at(0.1), at(0.9), len(ordered), method)


def time_program(
    program: Callable[[Any], Any],
    inputs: Any,
    *,
    chain: Callable[[Any, Any], Any] | None = None,
    target_ms: float = 80.0,
    clock: Any = None,
    bursts: bool = False,
) -> CallTiming:
    """Times a jitted program of `inputs`, for about `target_ms` of the device's time.

    `chain` makes next inputs of inputs and outputs, so that short programs can be repeated;
    `clock` takes the place of that of JAX's device. With `bursts` the program runs for `BURST_MS`
    after a rest of `REST_S`, some times: a GPU that is busy for longer is at its limit of power,
    and what ran before decides.
    """
    jax.block_until_ready(program(inputs))
    call = lambda: program(inputs)
    device = jax.devices()[0]
    if clock is None and not is_cuda(device):
        return _time_on_host(call, target_ms)
    if clock is None:
        clock = clock_of(device)
        clock.enter()
    if bursts:
        return time_bursts(call, clock)
    repeated = None if chain is None else functools.partial(_repeated, program, chain, inputs)
    return time_calls(call, clock, repeated=repeated, target_ms=target_ms)


def time_bursts(call: Callable[[], Any], clock: Any) -> CallTiming:
    """Times `call` in bursts, each of which counts by its mean."""
    probe_us = statistics.median(_sample(call, clock, _PROBE_CALLS).all_us)
    count = max(_MIN_HOST_SAMPLES, round(BURST_MS * 1e3 / probe_us))
    means = []
    for _ in range(BURSTS):
        time.sleep(REST_S)
        sample = _sample(call, clock, count)
        if 2 * len(sample.good_us) <= count:
            return CallTiming.of(sample.all_us, "host-bound")
        means.append(statistics.fmean(sample.good_us))
    return CallTiming.of(means, "bursts")


def time_calls(
    call: Callable[[], Any],
    clock: Any,
    *,
    repeated: Callable[[int], Callable[[], Any]] | None = None,
    target_ms: float = 80.0,
) -> CallTiming:
    """Times `call`, which starts a program that has run before, and returns its outputs.

    `repeated` makes of a number what starts so many runs inside one program.
    """
    probe = _sample(call, clock, _PROBE_CALLS)
    count = round(target_ms * 1e3 / max(statistics.median(probe.all_us), 1e-3))
    count = max(MIN_SAMPLES, min(count, MAX_SAMPLES))
    if 2 * len(probe.good_us) > _PROBE_CALLS:
        sample = _sample(call, clock, count)
        if 2 * len(sample.good_us) > count:
            return CallTiming.of(sample.good_us, "events")
    graph_us = None if repeated is None else _time_repeated(repeated, clock)
    good_us = _in_rounds(call, clock, min(count, 4 * _ROUND_CALLS))
    if len(good_us) >= MIN_SAMPLES:
        timing = CallTiming.of(good_us, "events")
    elif graph_us is not None:
        timing = CallTiming.of([graph_us], "graph")
    else:
        timing = CallTiming.of(probe.all_us, "host-bound")
    return dataclasses.replace(timing, graph_us=graph_us)


class _Sample(NamedTuple):
    """Times between the ends of neighbouring calls."""

    all_us: list[float]
    good_us: list[float]  # of calls that waited for the device
    host_us: float  # what the host needed for one call, where it did not have to wait


def _sample(
    call: Callable[[], Any], clock: Any, count: int, hold: Callable[[], Any] | None = None
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
        # The event fires a little after the call has ended. If the call before the last one is
        # still running, the device was busy throughout.
        if index:
            waited.append(clock.is_pending(max(index - 2, 0)))
    host_us = (clock.now_us() - start_us) / (count + 1)
    outputs = None
    clock.wait(count)
    del held
    all_us = [clock.between_us(index - 1, index) for index in range(1, count + 1)]
    good_us = [us for us, good in zip(all_us, waited, strict=True) if good]
    return _Sample(all_us, good_us, host_us)


def _in_rounds(call: Callable[[], Any], clock: Any, count: int) -> list[float]:
    """At least `count` good samples of calls that start behind a busy device, or what there is."""
    host_us = _sample(call, clock, _PROBE_CALLS).host_us
    good_us: list[float] = []
    failures = 0
    while len(good_us) < count and failures <= _MAX_FAILURES:
        hold_us = min(1.5 * host_us * (_ROUND_CALLS + 1) + 100, _MAX_HOLD_US)
        sample = _sample(call, clock, _ROUND_CALLS, functools.partial(clock.hold, hold_us))
        if len(sample.good_us) == _ROUND_CALLS:
            good_us += sample.good_us
        else:
            failures += 1
            host_us = max(1.5 * host_us, sample.host_us)
    return good_us


def _time_repeated(repeated: Callable[[int], Callable[[], Any]], clock: Any) -> float | None:
    """One run's time as the difference of many runs and few: what a program costs falls out."""
    medians = []
    for repeats in (_FEW_REPEATS, _MANY_REPEATS):
        call = repeated(repeats)
        clock.record(0, call())  # compiles
        clock.wait(0)
        found = _in_rounds(call, clock, 2 * _ROUND_CALLS)
        if len(found) < MIN_SAMPLES:
            return None
        medians.append(statistics.median(found))
    one_us = (medians[1] - medians[0]) / (_MANY_REPEATS - _FEW_REPEATS)
    return one_us if one_us > 0 else None


def _repeated(
    program: Callable[[Any], Any], chain: Any, inputs: Any, repeats: int
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


def _time_on_host(call: Callable[[], Any], target_ms: float) -> CallTiming:
    samples_us: list[float] = []
    while len(samples_us) < _MIN_HOST_SAMPLES or (
        len(samples_us) < _MAX_HOST_SAMPLES and sum(samples_us) < target_ms * 1e3
    ):
        start = time.perf_counter()
        jax.block_until_ready(call())
        samples_us.append((time.perf_counter() - start) * 1e6)
    return CallTiming.of(samples_us, "host clock")
