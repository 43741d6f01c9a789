"""The GPU's clock, on a CUDA driver that is made up; and, marked so, on a real one."""

import sys
import types

import jax.numpy as jnp
import pytest

from triax.bench import clock
from triax.bench.clock import CudaClock
from triax.compat import jax_private


class Status(int):
    name = "CUDA_ERROR_ILLEGAL_ADDRESS"


OK, NOT_READY, ILLEGAL = Status(0), Status(600), Status(700)


class Driver:
    """Notes what is called; event 1 fires later than the others."""

    CUresult = types.SimpleNamespace(CUDA_ERROR_NOT_READY=NOT_READY)

    def __init__(self):
        self.calls = []
        self.events = 0

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)

        def function(*arguments):
            self.calls.append((name, *arguments))
            return self._answer(name, arguments)

        function.__name__ = name
        return function

    def _answer(self, name, arguments):
        if name == "cuEventCreate":
            self.events += 1
            return OK, f"event {self.events - 1}"
        if name == "cuEventQuery":
            return ({"event 1": NOT_READY, "event 2": ILLEGAL}.get(arguments[0], OK),)
        results = {"cuDeviceGet": "gpu", "cuStreamCreate": 17, "cuEventElapsedTime": 0.25}
        return (OK, results[name]) if name in results else (OK, "context")


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    bindings = types.ModuleType("cuda.bindings")
    bindings.driver = driver
    package = types.ModuleType("cuda")
    package.bindings = bindings
    monkeypatch.setitem(sys.modules, "cuda", package)
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setattr(jax_private, "local_index", lambda device: 3)
    clock.clock_of.cache_clear()
    yield driver
    clock.clock_of.cache_clear()


class Output:
    """An array of some dtype that can be handed to another stream."""

    def __init__(self, driver, dtype):
        self.driver, self.dtype = driver, jnp.dtype(dtype)

    def __dlpack__(self, *, stream):
        self.driver.calls.append(("handed over", self.dtype.name, stream))
        return "capsule"


def test_an_event_stands_behind_the_array(driver):
    found = CudaClock("device")
    driver.calls.clear()
    flags, rows = Output(driver, bool), Output(driver, "bfloat16")
    found.record(1, (flags, {"rows": rows}))
    assert driver.calls[-2:] == [("handed over", "bfloat16", 17), ("cuEventRecord", "event 1", 17)]
    found.record(1, rows)
    assert driver.events == 2  # made once, recorded again


def test_queries(driver):
    found = CudaClock("device")
    found.record(2, Output(driver, "int32"))
    assert not found.is_pending(0)
    assert found.is_pending(1)
    with pytest.raises(RuntimeError, match="cuEventQuery: CUDA_ERROR_ILLEGAL_ADDRESS"):
        found.is_pending(2)
    assert found.between_us(0, 1) == 250.0
    found.wait(1)
    assert driver.calls[-1] == ("cuEventSynchronize", "event 1")
