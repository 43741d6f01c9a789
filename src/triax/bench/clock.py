"""The GPU's clock: events on a CUDA stream that waits for JAX's arrays, and a delay."""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp

from triax.call import triton_call
from triax.compat import jax_private
from triax.errors import MissingDependencyError

# What `__dlpack__` takes for sure, and every op returns one of.
_HANDED_OVER = ("float32", "bfloat16", "float16", "int32", "int8", "uint8", "uint16")
_NON_BLOCKING = 1


class CudaClock:
    """Events of one device by number, each after an array that JAX computes."""

    def __init__(self, device: Any):
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise MissingDependencyError(
                "Timing on a GPU needs cuda-bindings: pip install 'triax[cuda13]' brings it."
            ) from error
        self._driver = driver
        self._call(driver.cuInit, 0)
        handle = self._call(driver.cuDeviceGet, jax_private.local_index(device))
        # JAX's context, which it keeps for as long as the process runs.
        self._context = self._call(driver.cuDevicePrimaryCtxRetain, handle)
        self.enter()
        self._stream = self._call(driver.cuStreamCreate, _NON_BLOCKING)
        self._events: list[Any] = []

    def enter(self) -> None:
        """To be called by the thread that uses it."""
        self._call(self._driver.cuCtxSetCurrent, self._context)

    def now_us(self) -> float:
        """The host's time."""
        return time.perf_counter() * 1e6

    def record(self, index: int, output: Any) -> None:
        """Event `index` fires when the arrays of `output` are there."""
        while len(self._events) <= index:
            self._events.append(self._call(self._driver.cuEventCreate, 0))
        leaf = next(leaf for leaf in jax.tree.leaves(output) if leaf.dtype.name in _HANDED_OVER)
        # Handing an array to another stream makes that stream wait until the array is there.
        capsule = leaf.__dlpack__(stream=int(self._stream))
        self._call(self._driver.cuEventRecord, self._events[index], self._stream)
        del capsule

    def is_pending(self, index: int) -> bool:
        """Whether event `index` has yet to fire."""
        (status,) = self._driver.cuEventQuery(self._events[index])
        if status == self._driver.CUresult.CUDA_ERROR_NOT_READY:
            return True
        _check(status, "cuEventQuery")
        return False

    def wait(self, index: int) -> None:
        """Returns when event `index` has fired."""
        self._call(self._driver.cuEventSynchronize, self._events[index])

    def between_us(self, first: int, second: int) -> float:
        """The device's time between two events that have fired."""
        elapsed = self._driver.cuEventElapsedTime
        return 1e3 * self._call(elapsed, self._events[first], self._events[second])

    def hold(self, us: float) -> Any:
        """Keeps JAX's stream busy for about `us`; what it returns must be kept until then."""
        return _wait(jnp.int32(max(1, round(us * self._steps_per_us))))

    @functools.cached_property
    def _steps_per_us(self) -> float:
        marks = [jnp.int32(steps) for steps in (1, 1, 1 << 17)]
        for index, steps in enumerate(marks):  # the first compiles
            self.record(index, _wait(steps))
        self.wait(2)
        return (1 << 17) / self.between_us(1, 2)

    def _call(self, function: Any, *arguments: Any) -> Any:
        status, *results = function(*arguments)
        _check(status, function.__name__)
        return results[0] if results else None


def _check(status: Any, name: str) -> None:
    if int(status):
        raise RuntimeError(f"{name}: {status.name}")


clock_of = functools.cache(CudaClock)


@jax.jit
def _wait(steps: Any) -> Any:
    from triax.bench.stream_kernels import _delay_kernel

    out_type = jax.ShapeDtypeStruct((), jnp.int32)
    return triton_call(steps, kernel=_delay_kernel, out_type=out_type, grid=1, num_warps=1)
