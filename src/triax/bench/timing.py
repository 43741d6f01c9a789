"""How long a compiled program takes on its device.

On CUDA the time between two events is the device's time for one call, provided that the second call
was waiting before the first one ended: a sample whose call came too late is dropped. Short programs
are started behind a kernel that keeps the device busy until all of them are waiting, and are
repeated inside one program too, where they can be: what one of many runs in a CUDA graph takes has
no share in starting a program. Elsewhere the host's clock has to do.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
import timeit
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from triax.call import triton_call
from triax.compat import jax_private
from triax.devices import is_cuda
from triax.errors import MissingDependencyError
from triax.tuning.worker.driver import Context
from triax.tuning.worker.driver import call as call_driver

MIN_SAMPLES = 15
MAX_SAMPLES = 300
_PROBE_CALLS = 8
# JAX holds calls back once 32 of them are under way; a round stays below.
_ROUND_CALLS = 16
_MAX_FAILURES = 8
_FIRST_HOLD_US, _MAX_HOLD_US = 1000.0, 20_000.0
_FEW_REPEATS, _MANY_REPEATS = 4, 24
BURSTS, BURST_MS, REST_S, _MIN_BURST = 3, 30.0, 0.12, 5
_HOST_SAMPLES = 5
HOST = "host clock"  # the method of times that are not a GPU's

Call = Callable[[], Any]
Hold = Callable[[float], Any]


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
        p10, median, p90 = map(float, np.percentile(samples_us, (10, 50, 90)))
        return cls(median, p10, p90, len(samples_us), method)


def time_program(
    program: Callable[[Any], Any],
    inputs: Any,
    *,
    chain: Callable[[Any, Any], Any] | None = None,
    target_ms: float = 50.0,
    hold: Hold | None = None,
    bursts: bool = False,
) -> CallTiming:
    """Times a jitted program of `inputs`, for about `target_ms` of the device's time.

    `chain` makes next inputs of inputs and outputs, so that short programs can be repeated; `hold`
    keeps the device busy, for a program of another library. With `bursts` the program runs for
    `BURST_MS` after a rest of `REST_S`, some times: a GPU that is busy for longer is at its limit
    of power, and what ran before decides.
    """
    jax.block_until_ready(program(inputs))
    call = lambda: program(inputs)
    if not is_cuda(jax.devices()[0]):
        ready = lambda: jax.block_until_ready(call())
        seconds = timeit.repeat(ready, number=1, repeat=_HOST_SAMPLES)
        return CallTiming.of([1e6 * s for s in seconds], HOST)
    clock = clock_of(jax.devices()[0])
    clock.enter()
    if bursts:
        return time_bursts(call, clock)
    repeated = None if chain is None else functools.partial(_repeated, program, chain, inputs)
    return time_calls(call, clock, hold or clock.hold, repeated=repeated, target_ms=target_ms)


def time_bursts(call: Call, clock: Any, rest: Callable[[float], None] = time.sleep) -> CallTiming:
    """Times `call` in bursts, each of which counts by its mean."""
    probe_us = statistics.median(_sample(call, clock, _PROBE_CALLS)[0])
    count = max(_MIN_BURST, round(BURST_MS * 1e3 / probe_us))
    means = []
    for _ in range(BURSTS):
        rest(REST_S)
        all_us, good_us = _sample(call, clock, count)
        if 2 * len(good_us) <= count:
            return CallTiming.of(all_us, "host-bound")
        means.append(statistics.fmean(good_us))
    return CallTiming.of(means, "bursts")


def time_calls(
    call: Call,
    clock: Any,
    hold: Hold,
    *,
    repeated: Callable[[int], Call] | None = None,
    target_ms: float = 50.0,
) -> CallTiming:
    """Times `call`, which starts a program that has run before, and returns its outputs.

    `repeated` makes of a number what starts so many runs inside one program.
    """
    probe_us, good_us = _sample(call, clock, _PROBE_CALLS)
    count = round(target_ms * 1e3 / max(statistics.median(probe_us), 1e-3))
    count = max(MIN_SAMPLES, min(count, MAX_SAMPLES))
    if 2 * len(good_us) > _PROBE_CALLS:
        _, good_us = _sample(call, clock, count)
        if 2 * len(good_us) > count:
            return CallTiming.of(good_us, "events")
    graph_us = None if repeated is None else _time_repeated(repeated, clock, hold)
    good_us = _in_rounds(call, clock, hold, min(count, 4 * _ROUND_CALLS))
    if len(good_us) >= MIN_SAMPLES:
        timing = CallTiming.of(good_us, "events")
    elif graph_us is not None:
        timing = CallTiming.of([graph_us], "graph")
    else:
        timing = CallTiming.of(probe_us, "host-bound")
    return dataclasses.replace(timing, graph_us=graph_us)


def _sample(call: Call, clock: Any, count: int) -> tuple[list[float], list[float]]:
    """Times between the ends of neighbouring calls: all, and those of calls that had to wait."""
    waited = []
    for index in range(count + 1):
        # Dropped before the next run, which thus gets the same memory: XLA's graphs hold
        # addresses, and are updated where these change.
        outputs = None
        outputs = call()
        clock.record(index, outputs)
        # The event fires a little after the call has ended. If the call before the last one is
        # still running, the device was busy throughout.
        waited.append(clock.is_pending(max(index - 2, 0)))
    outputs = None
    clock.wait(count)
    all_us = [clock.between_us(index, index + 1) for index in range(count)]
    return all_us, [us for us, good in zip(all_us, waited[1:], strict=True) if good]


def _in_rounds(call: Call, clock: Any, hold: Hold, count: int) -> list[float]:
    """At least `count` good samples of calls that start behind a busy device, or what there is."""
    good_us: list[float] = []
    hold_us, failures = _FIRST_HOLD_US, 0
    while len(good_us) < count and failures <= _MAX_FAILURES:
        held = hold(hold_us)
        _, found_us = _sample(call, clock, _ROUND_CALLS)
        del held  # an array, whose memory must not be given to others before
        if len(found_us) == _ROUND_CALLS:
            good_us += found_us
        else:
            failures += 1
            hold_us = min(2 * hold_us, _MAX_HOLD_US)
    return good_us


def _time_repeated(repeated: Callable[[int], Call], clock: Any, hold: Hold) -> float | None:
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


def _repeated(program: Callable[[Any], Any], chain: Any, inputs: Any, repeats: int) -> Call:
    def run(inputs: Any) -> Any:
        outputs = program(inputs)
        for _ in range(repeats - 1):
            # All inputs through the barrier, so that XLA computes nothing of the next run ahead,
            # or once for all of them.
            inputs = jax.lax.optimization_barrier(chain(inputs, outputs))
            outputs = program(inputs)
        return outputs

    return functools.partial(jax.jit(run), inputs)


# --- the GPU's clock ---


class CudaClock:
    """Events of one device by number, each after an array of JAX, or of another library."""

    def __init__(self, device: Any):
        index: Any = jax_private.local_index(device)
        try:
            self._gpu = Context(index)  # JAX's, which it keeps for as long as the process runs
        except ImportError as error:
            raise MissingDependencyError(
                "Timing on a GPU needs cuda-bindings: `pip install cuda-bindings`."
            ) from error
        self._driver = self._gpu.cu
        self._events: list[Any] = []

    def enter(self) -> None:
        """To be called first in the thread that uses the clock."""
        call_driver(self._driver.cuCtxSetCurrent, self._gpu.context)

    def record(self, index: int, output: Any) -> None:
        """Event `index` fires when the arrays of `output` are there."""
        while len(self._events) <= index:
            self._events.append(call_driver(self._driver.cuEventCreate, 0))
        # Handing an array to another stream makes that stream wait until the array is there.
        capsule = jax.tree.leaves(output)[0].__dlpack__(stream=int(self._gpu.stream))
        call_driver(self._driver.cuEventRecord, self._events[index], self._gpu.stream)
        del capsule

    def is_pending(self, index: int) -> bool:
        """Whether event `index` has yet to fire. An error of the device comes out in `wait`."""
        (status,) = self._driver.cuEventQuery(self._events[index])
        return bool(status == self._driver.CUresult.CUDA_ERROR_NOT_READY)

    def wait(self, index: int) -> None:
        """Returns when event `index` has fired."""
        call_driver(self._driver.cuEventSynchronize, self._events[index])

    def between_us(self, first: int, second: int) -> float:
        """The device's time between two events that have fired."""
        events = self._events[first], self._events[second]
        return 1e3 * call_driver(self._driver.cuEventElapsedTime, *events)

    def hold(self, us: float) -> Any:
        """Keeps JAX's stream busy for `us`; what it returns must be kept until then."""
        return _delay(jnp.int32(1e3 * us))


clock_of = functools.cache(CudaClock)


@jax.jit
def _delay(nanoseconds: Any) -> Any:
    from triax.bench.stream_kernels import _delay_kernel

    out_type = jax.ShapeDtypeStruct((), jnp.int32)
    return triton_call(nanoseconds, kernel=_delay_kernel, out_type=out_type, grid=1, num_warps=1)
