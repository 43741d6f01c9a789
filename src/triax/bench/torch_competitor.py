"""PyTorch's `index_select` as a competitor for moves without sums, by an index made before.

PyTorch is imported only where it is asked for. Arrays go there and back through DLPack, on the
device; the time is taken with PyTorch's own events.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from triax.bench.competitors import competitors
from triax.bench.inputs import Inputs
from triax.bench.timing import Timing, time_calls

if TYPE_CHECKING:
    from triax.bench.cases import Case

NAME = "torch.index_select"
OPS = ("permute", "sort_chunks")

# What a GPU's clock ticks at most in a microsecond: the busy wait is no shorter than asked for.
_TICKS_PER_US = 2000


def problem(case: Case) -> str | None:
    """Why PyTorch cannot run a case here, or None where it can; None also for `OPS` it has not."""
    if case.op not in OPS:
        return None
    try:
        if importlib.util.find_spec("torch") is None:
            return "PyTorch is not installed"
        if not importlib.import_module("torch").cuda.is_available():
            return "PyTorch finds no GPU"
    except Exception as error:  # its import loads CUDA's libraries, perhaps others than JAX's
        return f"PyTorch cannot be imported: {type(error).__name__}: {error}"
    return None


class TorchMove:
    """One of `OPS` on a case's inputs, ready to run.

    move = TorchMove(case, inputs)
    wrong = checks.problem(case, inputs, move.output())
    timing = move.time(target_ms=80)
    """

    def __init__(self, case: Case, inputs: Inputs):
        self._torch = importlib.import_module("torch")
        # The index is that of the competitor that moves with jnp.take.
        prepared = competitors(case)["jnp.take"].prepare(inputs)
        index = prepared["token" if case.op == "permute" else "index"]
        operands = jax.block_until_ready((inputs["x"], index))
        self._x, self._index = map(self._torch.from_dlpack, operands)
        self._alive = operands

    def run(self) -> Any:
        """Starts one move; the moved rows as PyTorch's tensor."""
        return self._torch.index_select(self._x, 0, self._index)

    def output(self) -> jax.Array:
        """The moved rows, as JAX's array."""
        tensor = self.run()
        self._torch.cuda.synchronize()
        return jnp.from_dlpack(tensor)

    def time(self, target_ms: float) -> Timing:
        """Times one move, for about `target_ms` in all; gives PyTorch's memory back."""
        hold = lambda us: self._torch.cuda._sleep(round(us * _TICKS_PER_US))
        timing = time_calls(self.run, _TorchClock(self._torch), hold=hold, target_ms=target_ms)
        self._torch.cuda.empty_cache()
        return timing


class _TorchClock:
    """PyTorch's events by number, on its current stream."""

    def __init__(self, torch: Any):
        self._torch = torch
        self._events: dict[int, Any] = {}

    def now_us(self) -> float:
        return time.perf_counter() * 1e6

    def record(self, index: int, output: Any) -> None:
        if index not in self._events:
            self._events[index] = self._torch.cuda.Event(enable_timing=True)
        self._events[index].record()

    def is_pending(self, index: int) -> bool:
        return not self._events[index].query()

    def wait(self, index: int) -> None:
        self._events[index].synchronize()

    def between_us(self, first: int, second: int) -> float:
        return 1e3 * self._events[first].elapsed_time(self._events[second])
