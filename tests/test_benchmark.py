"""`triax.benchmark` of users' functions, and the clock, on a device that is made up: its host and
its queue have clocks of their own."""

import importlib
import sys
import time
import types
import weakref
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import triax
from tests.tuning import fake_driver
from triax.benchmark import CallTiming, time_calls
from triax.benchmark_kernels import BLOCK, delay, stream
from triax.compat import jax_private
from triax.emitting.reading import triton_calls
from triax.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from triax.tuning.worker.driver import DriverError

module = importlib.import_module("triax.benchmark")  # whose name in `triax` is the function's

X = np.random.default_rng(0).standard_normal((6, 50)).astype(np.float32)


def double(x):
    return x + x


def twice(x):
    return x * 2


def off(x):
    return x * 2.01


@pytest.fixture
def timed(monkeypatch):
    """Times by rule in place of a clock's, on a GPU that is not here; what was timed, in order."""

    def install(time, method="events"):
        names = []

        def time_program(program, inputs, **how):
            (function,) = program.__wrapped__.__defaults__
            names.append(function.__name__)
            us = time(names[-1], len(names))
            return CallTiming(us, us, us, 10, method)

        monkeypatch.setattr(module, "time_program", time_program)
        return names

    return install


def test_table_and_ratios_within_rounds(timed):
    """The clock slows down by the round; the ratio stays."""
    slower = lambda number: 1 + (number - 1) // 2
    names = timed(lambda name, number: {"double": 10.0, "twice": 25.0}[name] * slower(number))
    found = triax.benchmark(double, X, against={"by a product": twice})
    assert names[:6] == ["double", "twice", "twice", "double", "double", "twice"]
    assert found.times["double"].median_us == 30
    assert found.times["double"].samples == 50
    assert found.ratios == {"by a product": module.Ratio(2.5, 2.5, 2.5)}
    assert str(found).splitlines() == [
        "cpu              µs       10% to 90%  times as long",
        "double        30.00   14.00 to 46.00",
        "by a product  75.00  35.00 to 115.00  2.50× (2.50 to 2.50)",
    ]


def test_no_ratio_where_the_host_was_too_slow(timed):
    timed(lambda name, number: 10.0, method="host-bound")
    found = triax.benchmark(double, X, against=twice)
    assert found.ratios == {}
    assert "≤10.00" in str(found)
    assert str(found).endswith("the device took this long at most")


@pytest.mark.parametrize(
    ("read", "written", "units"),
    [
        (1 << 22, 1 << 22, (1, 1)),
        (3 << 20, 1 << 20, (3, 1)),
        (1 << 20, 1 << 26, (1, 8)),
        (1 << 18, 1 << 18, None),
        (1 << 22, 0, None),
    ],
)
def test_the_limit_of_memory(monkeypatch, read, written, units):
    """A little more than the bytes are moved, in whole blocks."""
    asked = []

    def time_program(program, source):
        made = jax.eval_shape(program, source)
        asked.append((len(source), len(made)))
        us = (source.nbytes + made.size * 4) / 1e3
        return CallTiming(us, us, us, 10, "events")

    monkeypatch.setattr(module, "time_program", time_program)
    limit_us = module._stream_us(read, written)
    assert limit_us == (None if units is None else pytest.approx((read + written) / 1e3))
    assert asked == ([] if units is None else [units])


def test_no_limit_where_there_is_no_memory_or_clock_for_it(monkeypatch):
    full = mock.Mock(side_effect=jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED"))
    late = mock.Mock(return_value=CallTiming(1.0, 1.0, 1.0, 10, "host-bound"))
    for time_program in (full, late):
        monkeypatch.setattr(module, "time_program", time_program)
        assert module._stream_us(1 << 20, 1 << 20) is None


@pytest.mark.parametrize(("reads", "writes"), [(1, 1), (1, 4), (3, 2)])
def test_a_stream_reads_and_writes_all_units(reads, writes):
    source = np.random.default_rng(0).integers(0, 1 << 30, (reads, 2 * BLOCK), np.int32)
    expected = np.broadcast_to(np.bitwise_xor.reduce(source), (writes, 2 * BLOCK))
    np.testing.assert_array_equal(stream(jnp.asarray(source), writes), expected)


@pytest.mark.cuda_plugin
def test_kernels_lower(monkeypatch):
    monkeypatch.setenv("TRIAX_CUDA_ARCH", "90")
    source = jax.ShapeDtypeStruct((9, 4 * BLOCK), jnp.int32)
    program = jax.jit(lambda source, us: (stream(source, 8), delay(us)))
    lowered = program.trace(source, jnp.int32(1)).lower(lowering_platforms=("cuda",))
    grids = [call.grid for call in triton_calls(lowered)]
    assert sorted(grids) == [((1, 1, 1),), ((4, 1, 1),)]


def test_the_delay_takes_as_long_as_it_is_told():
    delay(jnp.int32(0))  # compiles
    start = time.perf_counter()
    jax.block_until_ready(delay(jnp.int32(3e7)))
    assert time.perf_counter() - start > 0.03


def test_the_limit_stands_in_the_table(timed, monkeypatch):
    timed(lambda *_: 10.0)
    monkeypatch.setattr(module, "is_cuda", lambda device: True)
    monkeypatch.setattr(module, "_stream_us", lambda read, written: (read + written) / 300)
    assert str(triax.benchmark(double, X)).splitlines()[-1].split() == [
        "limit", "of", "memory", "8.00", "0.80×"
    ]  # fmt: skip


def test_on_the_cpu():
    found = triax.benchmark(double, {"a": X}["a"], against=twice)
    assert [*found.times] == ["double", "twice"]
    assert found.times["twice"].method == "host clock"
    assert found.ratios["twice"].low <= found.ratios["twice"].median <= found.ratios["twice"].high
    assert found.stream_us is None
    assert "by the host's clock" in repr(found)


def test_what_is_no_array_is_a_constant(timed):
    timed(lambda name, number: 1.0)

    def power(arrays, exponent, how):
        assert (exponent, how) == (3, "fast")
        return [arrays["x"] ** exponent]

    triax.benchmark(power, {"x": X}, 3, "fast", against={"power": lambda a, *_: (a["x"] ** 3,)})


class TestWrong:
    @pytest.mark.parametrize(
        ("other", "text"),
        [
            (off, r"'off' and 'double' do not compute the same: result 0 differs by up to 0.005"),
            (lambda x: x.sum(), r"the results have shapes \[\(\)\] and \[\(6, 50\)\]"),
            (lambda x: (2 * x).astype(int), "result 0 is int32 and float32"),
            (lambda x: x * jnp.nan, "result 0 differs by up to nan"),
            (lambda x: jnp.complex64(2) * x, "result 0 is complex64 and float32"),
        ],
    )
    def test_is_not_timed(self, timed, other, text):
        names = timed(lambda *_: 1.0)
        with pytest.raises(ArgumentValueError, match=text):
            triax.benchmark(double, X, against=other)
        assert names == []

    def test_integers_must_be_equal(self):
        near = lambda x: x * 2 + (x == 3)
        with pytest.raises(ArgumentValueError, match="1 of 5 elements of result 0 differ"):
            triax.benchmark(double, jnp.arange(5), against=near)

    def test_unless_that_is_asked_for(self, timed):
        names = timed(lambda *_: 1.0)
        triax.benchmark(double, X, against=off, compare=False)
        triax.benchmark(double, X, against=off, tolerance=0.006)
        assert len(names) == 20

    @pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float16", "complex64"])
    def test_by_the_dtype(self, timed, dtype):
        timed(lambda *_: 1.0)
        x = jnp.asarray(X / 4, dtype)
        wide = jnp.promote_types("float32", dtype) if dtype == "complex64" else "float32"
        times = lambda factor: lambda x: (x.astype(wide) * factor).astype(dtype)
        triax.benchmark(times(2), x, against={"same": times(2)})
        with pytest.raises(ArgumentValueError, match=r"differs by up to 0\.25"):
            triax.benchmark(times(2), x, against={"other": times(1.5)})


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: triax.benchmark(3, X), ArgumentTypeError, "`function` must be a function; got 3"),
        (lambda: triax.benchmark(double, X, against=3), ArgumentTypeError, "`against` must be a f"),
        (
            lambda: triax.benchmark(double, X, against={"a": 3}),
            ArgumentTypeError,
            "functions by their names; got 3 of type int for 'a'",
        ),
        (lambda: triax.benchmark(double, 3), ArgumentValueError, "must have an array among them"),
        (lambda: triax.benchmark(lambda x: None, X), ArgumentValueError, "must return an array"),
        *(
            (
                lambda wrong=wrong: triax.benchmark(double, X, against=double, tolerance=wrong),
                ArgumentTypeError,
                "`tolerance` must be a number of at least 0",
            )
            for wrong in (-1, "1e-3", float("nan"))
        ),
        (
            lambda: jax.jit(lambda x: triax.benchmark(double, x))(X),
            ArgumentTypeError,
            r"must be arrays with values; got traced float32\[6,50\].*outside of `jax.jit`",
        ),
        (
            lambda: jax.jit(lambda x: triax.benchmark(double, X))(X),
            ArgumentTypeError,
            "got a call inside a function being traced",
        ),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_arrays_elsewhere():
    x = jax.device_put(X, jax.devices()[1])
    with pytest.raises(UnsupportedError, match=r"must be on .*; one is on .*`jax.device_put`"):
        triax.benchmark(double, x)


# --- timing ----------------------------------------------------------------------------


class Device:
    """A device that runs what it is given in order, and a host that gives it.

    `device_us` is what a run takes, `host_us` what the host needs to start one, `depth` how many
    may be under way. Events are seen 3 µs late; `hiccup_us` slows down every tenth start.
    """

    def __init__(self, device_us, host_us=50.0, depth=32, hiccup_us=0.0):
        self.device_us, self.host_us = device_us, host_us
        self.depth, self.hiccup_us = depth, hiccup_us
        self.host = self.free = 0.0
        self.ends, self.events = [], {}

    def run(self, device_us):
        self.host += self.host_us + (self.hiccup_us if len(self.ends) % 10 == 9 else 0)
        if len(self.ends) >= self.depth:
            self.host = max(self.host, self.ends[-self.depth])
        self.free = max(self.free, self.host) + device_us
        self.ends.append(self.free)
        return self.free

    def call(self):
        return self.run(self.device_us)

    def record(self, index, output):
        self.events[index] = float(output)

    def is_pending(self, index):
        return self.events[index] + 3 > self.host

    def between_us(self, first, second):
        self.host = max(self.host, self.events[second] + 3)
        return self.events[second] - self.events[first]

    hold = run


def measure(device, target_ms=50):
    return time_calls(device.call, device, target_ms)


@pytest.mark.parametrize("hiccup_us", [0.0, 5000.0])
@pytest.mark.parametrize("device_us", [60.0, 500.0, 20000.0])
def test_long_programs_are_timed_one_by_one(device_us, hiccup_us):
    """Starts that came late do not count."""
    found = measure(Device(device_us, hiccup_us=hiccup_us), target_ms=20)
    assert found.method == "events"
    assert found.median_us == found.p10_us == found.p90_us == device_us
    assert module.MIN_SAMPLES <= found.samples <= module.MAX_SAMPLES


@pytest.mark.parametrize("host_us", [50.0, 400.0])
@pytest.mark.parametrize("device_us", [1.0, 30.0, 49.0])
def test_short_programs_start_behind_a_busy_device(device_us, host_us):
    found = measure(Device(device_us, host_us))
    assert found.method == "events"
    assert [found.p10_us, found.p90_us] == pytest.approx([device_us] * 2)
    assert found.samples >= module.MIN_SAMPLES


def test_a_host_that_cannot_run_ahead_is_told():
    """The device's queue is so short that the first call ends before the last one is given."""
    device = Device(5.0, depth=8)
    found = measure(device)
    assert found.method == "host-bound"
    assert found.median_us >= 5.0
    # Longer and longer delays are tried, but not for long.
    assert device.host < 500_000
    assert module.time_bursts(device.call, device).method == "host-bound"


def test_outputs_are_dropped_before_the_next_run():
    """XLA's graphs hold addresses: the next run is to find the memory free."""
    alive = weakref.WeakSet()
    device = Device(100.0)

    class Output(float):
        pass

    def call():
        assert not alive
        alive.add(output := Output(device.call()))
        return output

    assert time_calls(call, device, 5).median_us == 100.0
    assert not alive


def test_bursts_count_by_their_mean_after_a_rest():
    """A device that slows down while it is busy, and is fast again after a rest."""
    device = Device(1000.0)
    rests = []
    rest = lambda s: (rests.append(s), speed.append(0))
    speed = [0]

    def call():
        speed[-1] += 1
        return device.run(1000.0 + 10 * speed[-1])

    found = module.time_bursts(call, device, rest)
    assert found.method == "bursts"
    assert (found.samples, rests) == (module.BURSTS, [module.REST_S] * module.BURSTS)
    count = round(module.BURST_MS * 1e3 / 1055)
    assert found.median_us == pytest.approx(1000 + 10 * (count + 3) / 2, abs=10)


def test_the_host_s_clock_waits_for_the_end():
    if jax.devices()[0].platform != "cpu":
        pytest.skip("of a GPU, events are asked")
    pause = lambda x: (time.sleep(0.01), x)[1]
    slow = jax.jit(lambda x: jax.pure_callback(pause, jax.ShapeDtypeStruct((), x.dtype), x))
    found = module.time_program(slow, jnp.float32(1), target_ms=20)
    assert found.method == "host clock"
    assert found.p10_us >= 10_000
    assert found.samples == 5


class Output:
    """An array of another library, which notes the streams that it is handed to."""

    def __init__(self):
        self.streams = []

    def __dlpack__(self, *, stream):
        self.streams.append(stream)


def test_the_gpu_s_clock(monkeypatch):
    bindings = types.SimpleNamespace(driver=fake_driver)
    monkeypatch.setitem(sys.modules, "cuda", types.SimpleNamespace(bindings=bindings))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setattr(jax_private, "local_index", lambda device: 0)
    clock = module.CudaClock("device")
    output = Output()
    for _ in range(2):
        clock.record(2, {"rows": output})
    assert output.streams == [0, 0]
    # Events are made once, and recorded again; what the device has yet to do is pending.
    first, second, _ = clock._events
    monkeypatch.setattr(fake_driver, "_busy_until", time.monotonic() + 60)
    clock.record(1, output)
    assert [clock.is_pending(index) for index in range(3)] == [False, True, False]
    first.time = second.time - 0.25
    assert clock.between_us(0, 1) == pytest.approx(250_000)
    second.time = 0.0
    monkeypatch.setattr(fake_driver, "_broken", [fake_driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS])
    assert not clock.is_pending(1)
    with pytest.raises(DriverError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        clock.between_us(0, 1)
