"""`benchmark`: times users' own functions as `triax bench` does the MoE ops."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from triax import messages
from triax.bench.cases import Stream
from triax.bench.checks import relative_errors
from triax.bench.streams import find_limit
from triax.bench.timing import HOST, CallTiming, time_program
from triax.devices import is_cuda
from triax.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from triax.testing import TOLERANCES

_ROUNDS = 5
_TARGET_MS = 10.0  # of each function in each round
_MOST_UNITS = 8  # that a stream reads or writes: its kernel is unrolled
_LEAST_BYTES = 1 << 20  # to stream less takes no longer than to start
_HOST_BOUND = "host-bound"

Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Ratio:
    """How many times as long as the first function another took: the median round, and the span."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f}× ({self.low:.2f} to {self.high:.2f})"


@dataclasses.dataclass(frozen=True, repr=False)
class Benchmark:
    """What `benchmark` found; as text, a table.

    Attributes:
      device: what was measured on.
      times: by name, the function first. `median_us`, `p10_us` and `p90_us` are over the rounds;
        `method` is "events" or "bursts" (the device's time), "host clock" (there is no GPU), or
        "host-bound" (the host could not keep up: the device took no longer than this).
      ratios: by name, how many times as long each of `against` took as the function. Those of which
        one is host-bound are left out.
      stream_us: how long the device takes to read as many bytes as the arguments have and to write
        as many as the results, in order; None without a GPU, or for less than a megabyte.
    """

    device: str
    times: dict[str, CallTiming]
    ratios: dict[str, Ratio]
    stream_us: float | None = None

    def __repr__(self) -> str:
        unit, scale = ("µs", 1.0) if self._on_gpu else ("ms", 1e-3)
        rows = [(self.device, unit, "10% to 90%", "times as long")]
        for name, t in self.times.items():
            mark = "≤" if t.method == _HOST_BOUND else ""
            median, p10, p90 = (f"{us * scale:.2f}" for us in (t.median_us, t.p10_us, t.p90_us))
            rows.append((name, mark + median, f"{p10} to {p90}", str(self.ratios.get(name, ""))))
        own_us = next(iter(self.times.values())).median_us
        if self.stream_us is not None:
            stream = f"{self.stream_us:.2f}", "", f"{self.stream_us / own_us:.2f}×"
            rows.append(("limit of memory", *stream))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join([name.ljust(widths[0]), *map(str.rjust, rest, widths[1:-1]), last]).rstrip()
            for name, *rest, last in rows
        ]
        if any(t.method == _HOST_BOUND for t in self.times.values()):
            lines.append("≤ the host could not keep up: the device took this long at most")
        if not self._on_gpu:
            lines.append("by the host's clock: there is no GPU, and Triton kernels are interpreted")
        return "\n".join(lines)

    @property
    def _on_gpu(self) -> bool:
        return all(t.method != HOST for t in self.times.values())


def benchmark(
    function: Function,
    *args: Any,
    against: Function | Mapping[str, Function] | None = None,
    compare: bool = True,
    tolerance: float | None = None,
    bursts: bool = False,
) -> Benchmark:
    """Times a function on a GPU, and others that compute the same, in turns.

        triax.benchmark(rms_norm, x, weight, against={"plain JAX": plain})

    Every function is compiled as a whole by `jax.jit`. Results are compared before anything is
    timed. Then come rounds: in each all functions are timed one after another, in another order
    each time, and ratios are taken within a round, because a GPU's clock changes. The time is the
    device's, between two events, of calls that were waiting when the one before them ended: what it
    takes to start a program has no share in it.

    Args:
      function: what to time.
      *args: its arguments: arrays on one device, at least one, in any pytrees; what is not an array
        (Python numbers, strings, functions) is a constant of the program. They are not donated.
      against: a function with the same arguments and results, or several by name.
      compare: False times functions with different results, too.
      tolerance: the largest difference allowed, over the largest magnitude of a result. By default
        what rounding to the result's dtype and float32 sums over the longest dimension allow.
        Integers and booleans must be equal.
      bursts: time in bursts with rest between, for matrix products, which keep a GPU at its limit
        of power, so that what ran before would count.

    Returns:
      A `Benchmark`: medians in microseconds, and ratios with their span. `print` shows a table.

    Raises:
      ArgumentTypeError: a function cannot be called, `tolerance` is no number of at least 0, or an
        argument is traced: this is not for inside `jit`.
      ArgumentValueError: results differ, or there is no array to compute with or none is returned.
      UnsupportedError: the arrays are not all on JAX's first device.
      MissingDependencyError: cuda-bindings is not installed, and there is a GPU.
    """
    functions = _named(function, against)
    messages.check_bool(compare=compare, bursts=bursts)
    if tolerance is not None and not _is_number(tolerance):
        raise ArgumentTypeError(
            "Argument `tolerance` must be a number of at least 0, the share of a result's largest "
            f"magnitude; got {messages.shown(tolerance)}."
        )
    inputs, rebuild = _split(args)
    programs = {name: _jitted(f, rebuild) for name, f in functions.items()}
    own, *others = programs
    results = jax.block_until_ready(programs[own](inputs))
    _check_results(own, results)
    for name in others if compare else ():
        problem = _difference(programs[name](inputs), results, inputs, tolerance)
        if problem is not None:
            raise ArgumentValueError(
                f"Argument `against`: {name!r} and {own!r} do not compute the same: {problem}. If "
                "that is right, pass `compare=False`."
            )
    sizes = [sum(a.nbytes for a in jax.tree.leaves(side)) for side in (inputs, results)]
    del results  # memory for what is timed
    device = jax.devices()[0]
    stream_us = _stream_us(*sizes) if is_cuda(device) else None
    rounds: dict[str, list[CallTiming]] = {name: [] for name in programs}
    for number in range(_ROUNDS):
        start = number % len(programs)
        for name in [*programs][start:] + [*programs][:start]:
            how: Any = {"target_ms": _TARGET_MS, "bursts": bursts}
            rounds[name].append(time_program(programs[name], inputs, **how))
    times = {name: _together(found) for name, found in rounds.items()}
    ratios = {}
    for name in others:
        if _HOST_BOUND not in (times[name].method, times[own].method):
            pairs = zip(rounds[name], rounds[own], strict=True)
            found = [other.median_us / first.median_us for other, first in pairs]
            ratios[name] = Ratio(statistics.median(found), min(found), max(found))
    return Benchmark(str(device.device_kind), times, ratios, stream_us)


def benchmarks(function: Callable[[], Any]) -> list[Benchmark]:
    """What a user's function returns for `triax bench`.

    Raises:
      ArgumentTypeError: it is neither a `Benchmark` nor a list of them.
    """
    returned = function()
    found = [returned] if isinstance(returned, Benchmark) else returned
    if not isinstance(found, (list, tuple)) or not all(isinstance(f, Benchmark) for f in found):
        raise ArgumentTypeError(
            "`triax bench` shows what a function returns, which must be what `triax.benchmark` "
            f"returns, or a list of those; got {messages.shown(returned)}."
        )
    return [*found]


def _named(function: Function, against: Any) -> dict[str, Function]:
    """All functions by name, the first one first."""
    messages.check_callable("function", function)
    others = against if isinstance(against, Mapping) else {}
    if against is not None and not isinstance(against, Mapping):
        if not callable(against):
            raise ArgumentTypeError(_AGAINST.format(messages.shown(against)))
        others = {_name(against, "against"): against}
    own = _name(function, "function")
    while own in others:
        own += " (first)"
    for name, other in others.items():
        if not isinstance(name, str):
            raise ArgumentTypeError(_AGAINST.format(f"{messages.shown(name)} for a name"))
        if not callable(other):
            raise ArgumentTypeError(_AGAINST.format(f"{messages.shown(other)} for {name!r}"))
    return {own: function, **others}


_AGAINST = (
    "Argument `against` must be a function, or a dictionary of functions by their names; got {}."
)


def _name(function: Function, default: str) -> str:
    name = str(getattr(function, "__name__", default))
    return default if name == "<lambda>" else name


def _split(args: Sequence[Any]) -> tuple[list[jax.Array], Callable[[Sequence[Any]], Any]]:
    """The arrays of the arguments on their device, and what makes arguments of such arrays."""
    leaves, tree = jax.tree.flatten(args)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray))]
    first = jax.devices()[0]
    for leaf in (leaves[i] for i in places):
        if isinstance(leaf, jax.core.Tracer):
            raise ArgumentTypeError(_TRACED.format(messages.shown(leaf)))
        if isinstance(leaf, jax.Array) and leaf.devices() != {first}:
            raise UnsupportedError(
                f"Arguments of `benchmark` must be on {first}, where it measures; one is on "
                f"{', '.join(sorted(map(str, leaf.devices())))}. Use `jax.device_put`."
            )
    if not places:
        raise ArgumentValueError(
            "Arguments of `benchmark` must have an array among them; without one, XLA computes the "
            "result when it compiles. Make the arrays outside of the function."
        )

    def rebuild(arrays: Sequence[Any]) -> Any:
        filled = [*leaves]
        for i, array in zip(places, arrays, strict=True):
            filled[i] = array
        return jax.tree.unflatten(tree, filled)

    return [jax.device_put(leaves[i], first) for i in places], rebuild


_TRACED = (
    "Arguments of `benchmark` must be arrays with values; got {}. Call it outside of `jax.jit`, "
    "`vmap` and `grad`, on the function that they would be applied to."
)


def _jitted(function: Function, rebuild: Callable[[Sequence[Any]], Any]) -> Function:
    return jax.jit(lambda inputs: function(*rebuild(inputs)))


def _check_results(name: str, results: Any) -> None:
    leaves = jax.tree.leaves(results)
    if not leaves:
        raise ArgumentValueError(
            f"{name!r} must return an array; it returns none, and XLA would compute nothing."
        )
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise ArgumentTypeError(_TRACED.format("a call inside a function that is being traced"))


def _is_number(value: object) -> bool:
    numbers = (int, float, np.integer, np.floating)
    return isinstance(value, numbers) and not isinstance(value, bool) and bool(value >= 0)


def _difference(got: Any, want: Any, inputs: Any, tolerance: float | None) -> str | None:
    """How results differ by more than they may, or None."""
    pairs = jax.tree.leaves(got), jax.tree.leaves(want)
    shapes = [[tuple(leaf.shape) for leaf in side] for side in pairs]
    if shapes[0] != shapes[1]:
        return f"the results have shapes {shapes[0]} and {shapes[1]}"
    terms = max([1, *(size for a in (*inputs, *pairs[1]) for size in a.shape)])
    for number, (a, b) in enumerate(zip(*pairs, strict=True)):
        if not a.size:
            continue
        if not all(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in (a, b)):
            if a.dtype != b.dtype:
                return f"result {number} is {a.dtype} and {b.dtype}"
            if differ := int(jnp.sum(a != b)):
                return f"{differ} of {a.size} elements of result {number} differ"
            continue
        kinds = [jnp.iscomplexobj(leaf) for leaf in (a, b)]
        if kinds[0] != kinds[1]:
            return f"result {number} is {a.dtype} and {b.dtype}"
        limit = max(_limit(a, terms), _limit(b, terms)) if tolerance is None else tolerance
        worst = float(jax.jit(relative_errors)(a, b)[0])
        if not worst <= limit:  # also for a NaN
            return (
                f"result {number} differs by up to {worst:.3g}; the limit is {limit:.3g}, or what "
                "you pass as `tolerance`"
            )
    return None


def _limit(array: jax.Array, terms: int) -> float:
    """What rounding to a dtype, and a sum in float32 or wider, may make of a result."""
    info = jnp.finfo(array.dtype)
    name = np.dtype(info.dtype).name  # of a complex number that of its parts
    wide = "float64" if name == "float64" else "float32"
    own = TOLERANCES.get(name, float(info.eps))
    return own + TOLERANCES[wide] * math.sqrt(terms)


def _together(rounds: Sequence[CallTiming]) -> CallTiming:
    """The rounds of a function as one: percentiles are those of the rounds' medians."""
    methods = [timing.method for timing in rounds]
    method = _HOST_BOUND if _HOST_BOUND in methods else methods[0]
    found = CallTiming.of([timing.median_us for timing in rounds], method)
    return dataclasses.replace(found, samples=sum(timing.samples for timing in rounds))


def _stream_us(read_bytes: int, written_bytes: int) -> float | None:
    """How long a stream of so many bytes takes; None where one cannot be measured."""
    smaller = min(read_bytes, written_bytes)
    if not smaller or read_bytes + written_bytes < _LEAST_BYTES:
        return None
    sizes = read_bytes, written_bytes
    reads, writes = (min(_MOST_UNITS, round(size / smaller)) for size in sizes)
    total = sum(sizes)
    try:
        found = find_limit(Stream(reads, writes, total // (reads + writes)))
    except (jax.errors.JaxRuntimeError, RuntimeError):  # mostly out of memory
        return None
    return float(total / found["bytes"] * found["median_us"])
