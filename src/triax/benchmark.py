"""`triax.benchmark`: times functions that compute the same result, in turns.

On CUDA, the time between the events of two consecutive calls is the device time of the second,
provided that it was queued before the first ended; a sample queued too late is dropped. Short
programs are queued behind a kernel that keeps the device busy until all of them wait.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from triax import errors, messages
from triax.compat import jax_private
from triax.devices import is_cuda
from triax.testing import TOLERANCES
from triax.tuning.worker import driver

HOST, HOST_BOUND = "host clock", "host-bound"
MIN_SAMPLES, MAX_SAMPLES, _PROBE_CALLS = 15, 300, 8
BURSTS, BURST_MS, REST_S, _MIN_BURST = 3, 30.0, 0.12, 5
_ROUND_CALLS = 16  # JAX blocks further calls once 32 are in flight
_MAX_FAILURES, _FIRST_HOLD_US, _MAX_HOLD_US = 8, 1000.0, 20_000.0
_MOST_UNITS, _LEAST_BYTES = 8, 1 << 20  # of a stream

Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class CallTiming:
    """The time of one call over its samples, in microseconds; see `Benchmark` for `method`."""

    median_us: float
    p10_us: float
    p90_us: float
    samples: int
    method: str

    @classmethod
    def of(cls, times_us: Sequence[float], method: str, samples: int | None = None) -> CallTiming:
        """Summarises at least one time."""
        p10, median, p90 = map(float, np.percentile(times_us, (10, 50, 90)))
        return cls(median, p10, p90, samples or len(times_us), method)


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A function's time relative to the first function's: the rounds' median, least and most."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f}× ({self.low:.2f} to {self.high:.2f})"


@dataclasses.dataclass(frozen=True, repr=False)
class Benchmark:
    """The result of `benchmark`, which shows as a table.

    Attributes:
      device: the kind of device measured on.
      times: each function's timing by name, `function` first. `median_us`, `p10_us` and `p90_us`
        are over the rounds; `method` is "events" or "bursts" (device time), "host clock" (there is
        no GPU), or "host-bound" (the host could not keep up: the time is an upper bound).
      ratios: by name, the time of each function in `against` relative to `function`, left out if
        either is host-bound.
      stream_us: the time the device takes to read as many bytes as the arguments have and write as
        many as the results have; None if not measured, as without a GPU or below a megabyte.
    """

    device: str
    times: dict[str, CallTiming]
    ratios: dict[str, Ratio]
    stream_us: float | None = None

    def __repr__(self) -> str:
        methods = {t.method for t in self.times.values()}
        unit, scale = ("ms", 1e-3) if HOST in methods else ("µs", 1.0)
        rows: list[tuple[str, ...]] = [(self.device, unit, "10% to 90%", "times as long")]
        for name, t in self.times.items():
            mark = "≤" if t.method == HOST_BOUND else ""
            median, p10, p90 = (f"{us * scale:.2f}" for us in (t.median_us, t.p10_us, t.p90_us))
            rows.append((name, mark + median, f"{p10} to {p90}", str(self.ratios.get(name, ""))))
        if self.stream_us is not None:
            share = self.stream_us / next(iter(self.times.values())).median_us
            rows.append(("limit of memory", f"{self.stream_us:.2f}", "", f"{share:.2f}×"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join([name.ljust(widths[0]), *map(str.rjust, rest, widths[1:-1]), last]).rstrip()
            for name, *rest, last in rows
        ]
        if HOST_BOUND in methods:
            lines.append("≤ the host could not keep up: the device took this long at most")
        if HOST in methods:
            lines.append("by the host's clock: there is no GPU, and Triton kernels are interpreted")
        return "\n".join(lines)


def benchmark(
    function: Function,
    *args: Any,
    against: Function | Mapping[str, Function] | None = None,
    compare: bool = True,
    tolerance: float | None = None,
    bursts: bool = False,
) -> Benchmark:
    """Times a function on a GPU, in turns with others that compute the same result.

        triax.benchmark(rms_norm, x, weight, against={"plain JAX": plain})

    Every function is compiled as a whole by `jax.jit`, and results are compared before anything is
    timed. Each round times all functions one after another, in a different order each time, and
    ratios are taken within a round, because a GPU's clock changes. Times are device times: they do
    not include starting a program.

    Args:
      function: the function to time.
      *args: its arguments: pytrees with at least one array, all on one device. Leaves that are not
        arrays (Python numbers, strings, functions) are program constants. Nothing is donated.
      against: a function with the same arguments and results, or several by name.
      compare: False times functions with different results, too.
      tolerance: the largest difference allowed, relative to the largest magnitude of a result. The
        default allows for rounding to the result's dtype and for float32 sums over the longest
        dimension. Integers and booleans must be equal.
      bursts: time in bursts with pauses between them. Use it for matrix products: they hold a GPU
        at its power limit, so earlier work would affect the time.

    Returns:
      A `Benchmark`: medians in microseconds, and ratios with their range. `print` shows a table.

    Raises:
      ArgumentTypeError: a function is not callable, `tolerance` is not a number of at least 0, or
        an argument is traced, as inside `jit`.
      ArgumentValueError: results differ, or no argument or no result is an array.
      UnsupportedError: the arrays are not all on JAX's first device.
      MissingDependencyError: cuda-bindings is not installed, and there is a GPU.
    """
    functions = _named(function, against)
    messages.check_bool(compare=compare, bursts=bursts)
    numbers = int, float, np.integer, np.floating
    is_number = isinstance(tolerance, numbers) and not isinstance(tolerance, bool)
    if not (tolerance is None or (is_number and tolerance >= 0)):
        raise errors.ArgumentTypeError(
            "Argument `tolerance` must be a number of at least 0, the share of a result's largest "
            f"magnitude; got {messages.shown(tolerance)}."
        )
    inputs, rebuild = _split(args)
    programs = {n: jax.jit(lambda of, f=f: f(*rebuild(of))) for n, f in functions.items()}
    own, *others = programs
    results = jax.block_until_ready(programs[own](inputs))
    if not (leaves := jax.tree.leaves(results)):
        raise errors.ArgumentValueError(
            f"{own!r} must return an array; without one, XLA computes nothing."
        )
    if isinstance(leaves[0], jax.core.Tracer):
        raise errors.ArgumentTypeError(_TRACED.format("a call inside a function being traced"))
    for name in others if compare else ():
        if problem := _difference(programs[name](inputs), results, inputs, tolerance):
            raise errors.ArgumentValueError(
                f"Argument `against`: {name!r} and {own!r} do not compute the same: {problem}. If "
                "that is right, pass `compare=False`."
            )
    sizes = [sum(a.nbytes for a in jax.tree.leaves(side)) for side in (inputs, results)]
    del results, leaves  # frees memory for the timed programs
    device = jax.devices()[0]
    stream_us = _stream_us(*sizes) if is_cuda(device) else None
    timed = {name: (program, inputs) for name, program in programs.items()}
    timings = in_rounds(timed, 5, target_ms=10.0, bursts=bursts)
    times, ratios = {}, {}
    for name, rounds in timings.items():  # percentiles are taken over the rounds' medians
        method = max((t.method for t in rounds), key=lambda method: method == HOST_BOUND)
        samples = sum(t.samples for t in rounds)
        times[name] = CallTiming.of([t.median_us for t in rounds], method, samples)
    for name in others:
        if HOST_BOUND not in (times[name].method, times[own].method):
            pairs = zip(timings[name], timings[own], strict=True)
            each = [other.median_us / first.median_us for other, first in pairs]
            ratios[name] = Ratio(statistics.median(each), min(each), max(each))
    return Benchmark(str(device.device_kind), times, ratios, stream_us)


def _named(function: Function, against: Any) -> dict[str, Function]:
    """All functions by name, `function` first."""
    messages.check_callable("function", function)
    name_of = lambda f, default: str(getattr(f, "__name__", default)).replace("<lambda>", default)
    others = {name_of(against, "against"): against} if callable(against) else against
    others = {} if others is None else others
    wrong = "" if isinstance(others, Mapping) else messages.shown(others)
    for name, other in () if wrong else others.items():
        if not isinstance(name, str):
            wrong = f"{messages.shown(name)} for a name"
        elif not callable(other):
            wrong = f"{messages.shown(other)} for {name!r}"
    if wrong:
        raise errors.ArgumentTypeError(
            "Argument `against` must be a function, or a dictionary of functions by their names; "
            f"got {wrong}."
        )
    own = name_of(function, "function")
    while own in others:
        own += " (first)"
    return {own: function, **others}


def _split(args: Sequence[Any]) -> tuple[list[jax.Array], Callable[[Sequence[Any]], Any]]:
    """Splits arguments into arrays on the first device and a function that rebuilds them."""
    leaves, tree = jax.tree.flatten(args)
    arrays = {i: a for i, a in enumerate(leaves) if isinstance(a, (jax.Array, np.ndarray))}
    first = jax.devices()[0]
    for array in arrays.values():
        if isinstance(array, jax.core.Tracer):
            raise errors.ArgumentTypeError(_TRACED.format(messages.shown(array)))
        if isinstance(array, jax.Array) and array.devices() != {first}:
            raise errors.UnsupportedError(
                f"Arguments of `benchmark` must be on {first}, where it measures; one is on "
                f"{', '.join(sorted(map(str, array.devices())))}. Use `jax.device_put`."
            )
    if not arrays:
        raise errors.ArgumentValueError(
            "Arguments of `benchmark` must have an array among them; without one, XLA computes the "
            "result when it compiles. Make the arrays outside of the function."
        )
    filled = lambda new: dict(enumerate(leaves)) | dict(zip(arrays, new, strict=True))
    rebuild = lambda new: jax.tree.unflatten(tree, filled(new).values())
    return [jax.device_put(array, first) for array in arrays.values()], rebuild


_TRACED = (
    "Arguments of `benchmark` must be arrays with values; got {}. Call it outside of `jax.jit`, "
    "`vmap` and `grad`, on the function that they would be applied to."
)


def _difference(got: Any, want: Any, inputs: Any, tolerance: float | None) -> str | None:
    """Says how results differ beyond the tolerance; None if they do not."""
    pairs = jax.tree.leaves(got), jax.tree.leaves(want)
    shapes = [[tuple(leaf.shape) for leaf in side] for side in pairs]
    if shapes[0] != shapes[1]:
        return f"the results have shapes {shapes[0]} and {shapes[1]}"
    terms = max([1, *(size for a in (*inputs, *pairs[1]) for size in a.shape)])
    for number, (a, b) in enumerate(zip(*pairs, strict=True)):
        floats = all(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in (a, b))
        if (
            a.dtype != b.dtype
            and a.size
            and not (floats and jnp.iscomplexobj(a) == jnp.iscomplexobj(b))
        ):
            return f"result {number} is {a.dtype} and {b.dtype}"
        if not floats and (differ := int(jnp.sum(a != b))):
            return f"{differ} of {a.size} elements of result {number} differ"
        if floats and a.size:
            limit = max(_limit(a, terms), _limit(b, terms)) if tolerance is None else tolerance
            if not (worst := float(_relative_error(a, b))) <= limit:  # also for a NaN
                return f"result {number} differs by up to {worst:.3g}; `tolerance` is {limit:.3g}"
    return None


def _limit(array: jax.Array, terms: int) -> float:
    """The relative error allowed for rounding to a dtype and for a sum in float32 or wider."""
    info = jnp.finfo(array.dtype)
    name = np.dtype(info.dtype).name  # for a complex dtype, the dtype of its parts
    wide = "float64" if name == "float64" else "float32"
    return TOLERANCES.get(name, float(info.eps)) + TOLERANCES[wide] * math.sqrt(terms)


@jax.jit
def _relative_error(got: jax.Array, want: jax.Array) -> jax.Array:
    """The largest difference over `want`'s largest magnitude; not finite if an array is not."""
    wide = max((np.dtype("float32"), got.dtype, want.dtype), key=lambda dtype: dtype.itemsize)
    scale = jnp.maximum(jnp.max(jnp.abs(want.astype(wide))), np.finfo(np.float32).tiny)
    return jnp.max(jnp.abs(got.astype(wide) - want.astype(wide)) / scale)


def _stream_us(read_bytes: int, written_bytes: int) -> float | None:
    """Times reading and writing this many bytes in one stream; None if not measurable."""
    from triax.benchmark_kernels import BLOCK, stream

    smaller, total = min(read_bytes, written_bytes), read_bytes + written_bytes
    if not smaller or total < _LEAST_BYTES:
        return None
    reads, writes = (min(_MOST_UNITS, round(n / smaller)) for n in (read_bytes, written_bytes))
    words = -(-total // (4 * (reads + writes) * BLOCK)) * BLOCK
    try:
        source = jnp.ones((reads, words), jnp.int32)
        timing = time_program(lambda source: stream(source, writes), source)
    except jax.errors.JaxRuntimeError:  # mostly out of memory
        return None
    is_known = timing.method != HOST_BOUND
    return timing.median_us * total / (4 * words * (reads + writes)) if is_known else None


def in_rounds(
    programs: Mapping[str, Any], rounds: int, **options: Any
) -> dict[str, list[CallTiming]]:
    """Times each (program, inputs) pair once per round, starting with another pair each round."""
    timings: dict[str, list[CallTiming]] = {name: [] for name in programs}
    names = [*programs]
    for _ in range(rounds):
        for name in names:
            timings[name].append(time_program(*programs[name], **options))
        names.append(names.pop(0))
    return timings


def time_program(
    program: Function, inputs: Any, *, target_ms: float = 12.5, bursts: bool = False
) -> CallTiming:
    """Times a jitted program on `inputs`, for about `target_ms` of device time.

    With `bursts` the program runs for `BURST_MS` after each of several pauses of `REST_S`: a GPU
    that is busy for longer reaches its power limit, and earlier work affects the time.
    """
    call = functools.partial(program, inputs)
    jax.block_until_ready(call())
    if not is_cuda(device := jax.devices()[0]):
        run = lambda: jax.block_until_ready(call())
        return CallTiming.of([1e6 * s for s in timeit.repeat(run, number=1, repeat=5)], HOST)
    clock = clock_of(device)
    return time_bursts(call, clock) if bursts else time_calls(call, clock, target_ms)


def time_bursts(call: Function, clock: Any, rest: Function = time.sleep) -> CallTiming:
    """Times `call` in bursts; the mean of each burst is one sample."""
    probe_us = statistics.median(_sample(call, clock, _PROBE_CALLS)[0])
    count = max(_MIN_BURST, round(BURST_MS * 1e3 / probe_us))
    means = []
    for _ in range(BURSTS):
        rest(REST_S)
        all_us, good_us = _sample(call, clock, count)
        if 2 * len(good_us) <= count:
            return CallTiming.of(all_us, HOST_BOUND)
        means.append(statistics.fmean(good_us))
    return CallTiming.of(means, "bursts")


def time_calls(call: Function, clock: Any, target_ms: float) -> CallTiming:
    """Times single calls; `call` starts a program that has run before and returns its outputs."""
    probe_us, good_us = _sample(call, clock, _PROBE_CALLS)
    count = round(target_ms * 1e3 / max(statistics.median(probe_us), 1e-3))
    count = max(MIN_SAMPLES, min(count, MAX_SAMPLES))
    if 2 * len(good_us) > _PROBE_CALLS:
        _, good_us = _sample(call, clock, count)
        if 2 * len(good_us) > count:
            return CallTiming.of(good_us, "events")
    good_us, hold_us, failures = [], _FIRST_HOLD_US, 0
    while len(good_us) < min(count, 4 * _ROUND_CALLS) and failures <= _MAX_FAILURES:
        held = clock.hold(hold_us)  # keeps the device busy while the calls are queued
        _, found_us = _sample(call, clock, _ROUND_CALLS)
        del held  # kept until here, so that its memory is not reused
        if len(found_us) == _ROUND_CALLS:
            good_us += found_us
        else:
            failures, hold_us = failures + 1, min(2 * hold_us, _MAX_HOLD_US)
    if len(good_us) < MIN_SAMPLES:
        return CallTiming.of(probe_us, HOST_BOUND)
    return CallTiming.of(good_us, "events")


def _sample(call: Function, clock: Any, count: int) -> tuple[list[float], list[float]]:
    """Times between the ends of consecutive calls: all, and those of calls queued in time."""
    waited = []
    for index in range(count + 1):
        # Freed before the next call, which then gets the same memory: XLA's CUDA graphs hold
        # addresses, and must be updated if these change.
        outputs = None
        outputs = call()
        clock.record(index, outputs)
        # The event fires a little after the call has ended. If the call before last is still
        # running, the device was busy throughout.
        waited.append(clock.is_pending(max(index - 2, 0)))
    outputs = None
    all_us = [clock.between_us(index, index + 1) for index in range(count)]
    return all_us, [us for us, good in zip(all_us, waited[1:], strict=True) if good]


class CudaClock:
    """Numbered CUDA events on one device, recorded after arrays of JAX or another library."""

    def __init__(self, device: Any):
        index: Any = jax_private.local_index(device)
        try:
            self._gpu = driver.Context(index)  # JAX's context, alive as long as the process
        except ImportError as error:
            raise errors.MissingDependencyError(
                "Timing on a GPU needs cuda-bindings: `pip install cuda-bindings`."
            ) from error
        self._events: list[Any] = []

    def record(self, index: int, output: Any) -> None:
        """Records event `index`, which fires when the arrays of `output` are ready."""
        driver.call(self._gpu.cu.cuCtxSetCurrent, self._gpu.context)  # for this thread
        while len(self._events) <= index:
            self._events.append(driver.call(self._gpu.cu.cuEventCreate, 0))
        # Handing an array to another stream makes that stream wait until the array is ready.
        capsule = jax.tree.leaves(output)[0].__dlpack__(stream=int(self._gpu.stream))
        driver.call(self._gpu.cu.cuEventRecord, self._events[index], self._gpu.stream)
        del capsule

    def is_pending(self, index: int) -> bool:
        """Whether event `index` has yet to fire. Errors are left to `between_us` to raise."""
        (status,) = self._gpu.cu.cuEventQuery(self._events[index])
        return bool(status == self._gpu.cu.CUresult.CUDA_ERROR_NOT_READY)

    def between_us(self, first: int, second: int) -> float:
        """The device time between two events; waits for the second."""
        events = self._events[first], self._events[second]
        driver.call(self._gpu.cu.cuEventSynchronize, events[1])
        return 1e3 * driver.call(self._gpu.cu.cuEventElapsedTime, *events)

    def hold(self, us: float) -> Any:
        """Keeps JAX's stream busy for `us`; the caller must keep the returned array until then."""
        from triax.benchmark_kernels import delay

        return delay(jnp.int32(1e3 * us))


clock_of = functools.cache(CudaClock)
