"""Timing, on a device that is made up: its host and its queue have clocks of their own.

And the GPU's clock, on a CUDA driver that is made up.
"""

import functools
import sys
import time
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tuning import fake_driver
from triax.bench import timing
from triax.bench.timing import MAX_SAMPLES, MIN_SAMPLES, CudaClock, time_calls, time_program
from triax.compat import jax_private
from triax.tuning.worker.driver import DriverError


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

    def wait(self, index):
        self.host = max(self.host, self.events[index] + 3)

    def between_us(self, first, second):
        return self.events[second] - self.events[first]


def measure(device, **options):
    return time_calls(device.call, device, device.run, **options)


@pytest.mark.parametrize("hiccup_us", [0.0, 5000.0])
@pytest.mark.parametrize("device_us", [60.0, 500.0, 20000.0])
def test_long_programs_are_timed_one_by_one(device_us, hiccup_us):
    """Starts that came late do not count."""
    found = measure(Device(device_us, hiccup_us=hiccup_us), target_ms=20)
    assert found.method == "events"
    assert found.median_us == found.p10_us == found.p90_us == device_us
    assert MIN_SAMPLES <= found.samples <= MAX_SAMPLES


@pytest.mark.parametrize("host_us", [50.0, 400.0])
@pytest.mark.parametrize("device_us", [1.0, 30.0, 49.0])
def test_short_programs_start_behind_a_busy_device(device_us, host_us):
    found = measure(Device(device_us, host_us))
    assert found.method == "events"
    assert [found.p10_us, found.p90_us] == pytest.approx([device_us] * 2)
    assert found.samples >= MIN_SAMPLES


def test_a_host_that_cannot_run_ahead_is_told():
    """The device's queue is so short that the first call ends before the last one is given."""
    device = Device(5.0, depth=8)
    found = measure(device)
    assert found.method == "host-bound"
    assert found.median_us >= 5.0
    # Longer and longer delays are tried, but not for long.
    assert device.host < 500_000
    assert timing.time_bursts(device.call, device).method == "host-bound"


@pytest.mark.parametrize(("late_us", "method", "median_us"), [(0, "events", 9), (5000, "graph", 5)])
def test_short_programs_are_repeated_inside_one_too(late_us, method, median_us):
    """Starting a program takes a little of the device's time; one of many runs does not."""
    device = Device(9.0)

    def call():
        device.host += late_us
        return device.call()

    repeated = lambda repeats: lambda: device.run(4.0 + repeats * 5.0)
    found = time_calls(call, device, device.run, repeated=repeated)
    assert found.method == method
    assert (found.median_us, found.graph_us) == pytest.approx((median_us, 5.0))


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

    assert time_calls(call, device, device.run, target_ms=5).median_us == 100.0
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

    found = timing.time_bursts(call, device, rest)
    assert found.method == "bursts"
    assert (found.samples, rests) == (timing.BURSTS, [timing.REST_S] * timing.BURSTS)
    count = round(timing.BURST_MS * 1e3 / 1055)
    assert found.median_us == pytest.approx(1000 + 10 * (count + 3) / 2, abs=10)


# --- programs of JAX -----------------------------------------------------------------


def test_the_host_s_clock_waits_for_the_end():
    if jax.devices()[0].platform != "cpu":
        pytest.skip("of a GPU, events are asked")
    pause = lambda x: (time.sleep(0.01), x)[1]
    slow = jax.jit(lambda x: jax.pure_callback(pause, jax.ShapeDtypeStruct((), x.dtype), x))
    found = time_program(slow, jnp.float32(1), target_ms=20)
    assert found.method == "host clock"
    assert found.p10_us >= 10_000
    assert found.samples == 5


def test_repeated_runs_depend_on_each_other():
    """Four runs in one program give what four programs give, and none is left out."""
    program = jax.jit(lambda inputs: {"sum": inputs["x"] + inputs["step"]})
    chain = lambda inputs, outputs: {**inputs, "x": outputs["sum"]}
    inputs = {"x": jnp.zeros(3), "step": jnp.arange(3.0)}
    run = functools.partial(timing._repeated, program, chain, inputs)
    np.testing.assert_array_equal(run(4)()["sum"], 4 * np.arange(3.0))
    np.testing.assert_array_equal(run(1)()["sum"], np.arange(3.0))


# --- the GPU's clock -------------------------------------------------------------------


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
    clock = CudaClock("device")
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
        clock.wait(1)
