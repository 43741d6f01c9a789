"""Measures candidates in a worker process.

In: compiled launches, a device, and the contents of operands. Out: a time for every candidate, or
the reason it has none. If a candidate kills the worker, only that candidate is lost: earlier
timings count, and a new worker continues with the candidates not tried yet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import logging
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from triax import settings
from triax.binding import dtypes
from triax.binding.launch import (
    ArrayType,
    BoundCall,
    CompiledKernel,
    Descriptor,
    Launch,
    Operand,
    Result,
    Scalar,
    TensorMap,
)
from triax.compat import triton_private
from triax.devices import Device
from triax.errors import TuningError
from triax.tuning import gpu_lock
from triax.tuning.key import label
from triax.tuning.progress import Progress
from triax.tuning.store import Timing
from triax.tuning.worker import client, driver, messages

logger = logging.getLogger(__name__)

_PATTERN_BYTES = 1 << 20
_BUDGET_S = 20.0
# How long a worker may allocate memory and load code before its first answer.
_PREPARING_S = 60.0
_GRACE_S = 10.0


NOT_TRIED = "not tried: measuring was over"


def unavailable() -> str | None:
    """Says why this installation cannot measure; None if it can."""
    missing = "cuda-bindings is not installed (`pip install cuda-bindings`)"
    try:
        package = importlib.util.find_spec("cuda")
        if package is None:
            return missing
        is_package = package.submodule_search_locations is not None  # else find_spec would run it
        if is_package and importlib.util.find_spec("cuda.bindings") is not None:
            return None
    except Exception as error:  # an unrelated package of that name may raise anything
        return f"looking for cuda-bindings failed: {type(error).__name__}: {error}"
    if package.origin is None:  # a package without code
        return missing
    return (
        f"`import cuda` finds {package.origin}, which is not of cuda-bindings; rename it if it is "
        "yours, or `pip install cuda-bindings`"
    )


# --- the worker's job ----------------------------------------------------


def make_job(
    call: BoundCall,
    compiled: Sequence[tuple[Launch, CompiledKernel]],
    inputs: Sequence[str | None],
) -> messages.Job:
    """Makes the job that times `compiled`; `inputs` are files with operands' contents, or None."""
    first = compiled[0][0]
    reset = _named(call, first, "reset_to_zero")
    named = _named(call, first, "restore_value") | reset
    # The operands that a run changes, and that must be restored before the next run.
    changed = {leaf.index for leaf in named if isinstance(leaf, Operand)}
    changed |= {alias.operand for alias in first.aliases}
    buffers = [
        messages.BufferSpec(
            array.nbytes,
            pattern=_pattern(array),
            path=path if array.nbytes else None,
            restored=index in changed,
        )
        for index, (array, path) in enumerate(zip(first.operands, inputs, strict=True))
    ]
    aliased = first.operand_of_result
    for index, array in enumerate(first.results):
        if index not in aliased:
            buffers.append(messages.BufferSpec(array.nbytes, restored=Result(index) in reset))
    return messages.Job(
        buffers=tuple(buffers),
        candidates=tuple(_candidate(launch, kernel) for launch, kernel in compiled),
        limit_bytes=settings.tuning_bytes(),
        timeout_s=settings.tuning_timeout_s(),
        budget_s=_BUDGET_S,
    )


def _named(call: BoundCall, launch: Launch, option: str) -> set[Any]:
    """The buffers of the parameters that an option of `@triton.autotune` names."""
    tuner = call.kernel.autotuner
    names = set(getattr(tuner, option, None) or ()) if tuner is not None else set()
    return {getattr(a, "buffer", a) for name, a in launch.arguments if name in names}


def _pattern(array: ArrayType) -> bytes:
    """Bytes to fill an operand with: random floats; zeros for everything else.

    Zeros, because an integer may be an index, and zero is always in range.
    """
    if array.dtype.kind not in "fV" or not array.nbytes:
        return b"\0"
    count = min(array.nbytes, _PATTERN_BYTES) // array.dtype.itemsize
    values = np.random.default_rng(0).uniform(-1, 1, count)
    return values.astype(array.dtype).tobytes()


def _candidate(launch: Launch, kernel: CompiledKernel) -> messages.CompiledCandidate:
    assert kernel.cubin is not None, "compiled without machine code"
    zeroed = launch.zeroed_bytes()
    leaves = launch.named_leaves
    parameters: list[Any] = []
    for position, assumed in kernel.parameters:
        name, leaf = leaves[position]
        if isinstance(leaf, Scalar):
            assert leaf.value is not None
            assert isinstance(assumed, str)
            parameters.append(messages.Number(*dtypes.launch_scalar(name, leaf.value, assumed)))
        elif isinstance(leaf, Descriptor):
            assert isinstance(assumed, TensorMap)
            tensor_map = messages.TensorMapParameter(
                index=launch.buffer_index(leaf),
                element_type=triton_private.host_element_type(
                    assumed.element_type, tf32=leaf.round_f32_to_tf32
                ),
                itemsize=launch.array_type(leaf).dtype.itemsize,
                swizzle=assumed.swizzle,
                shape=leaf.shape,
                strides=leaf.strides,
                block_shape=assumed.block_shape,
                nan_fill=leaf.padding == "nan",
            )
            parameters.append(tensor_map)
        else:
            index = launch.buffer_index(leaf)
            parameters.append(messages.Pointer(index, zeroed.get(leaf, 0)))
    return messages.CompiledCandidate(
        label=label(launch),
        cubin=kernel.cubin,
        entry=kernel.name,
        grid=launch.grid,
        num_warps=kernel.num_warps,
        num_ctas=kernel.num_ctas,
        shared_bytes=kernel.shared_bytes,
        scratch_bytes=kernel.global_scratch_bytes,
        parameters=tuple(parameters),
    )


# --- measuring ------------------------------------------------------------------------


def drain(index: int) -> None:
    """Waits until a GPU has finished all work of this process.

    Raises:
      TuningError: the driver refuses.
    """
    try:
        from cuda.bindings import driver as cu
    except Exception as error:  # without a driver, the import raises other errors
        raise TuningError(f"cuda-bindings cannot be imported: {error}") from error
    try:
        with contextlib.ExitStack() as stack:
            driver.call(cu.cuInit, 0)
            device = driver.call(cu.cuDeviceGet, index)
            context = driver.call(cu.cuDevicePrimaryCtxRetain, device)
            stack.callback(driver.call, cu.cuDevicePrimaryCtxRelease, device)
            driver.call(cu.cuCtxPushCurrent, context)
            stack.callback(driver.call, cu.cuCtxPopCurrent)
            driver.call(cu.cuCtxSynchronize)
    except (driver.DriverError, RuntimeError) as error:  # RuntimeError: a function is missing
        raise TuningError(f"waiting for the GPU failed: {error}") from error


def measure(
    job: messages.Job, device: Device, progress: Progress, timings: dict[str, Timing]
) -> None:
    """Times as many candidates of a job as fit in its time budget.

    `timings` gets the result of each candidate, by its label, even if this raises.

    Raises:
      TuningError: memory runs out, the GPU or the worker fails on this machine, or other processes
        hold the GPU too long.
    """
    try:
        with gpu_lock.one_at_a_time(client.start(device.index).ready()):
            _Measurement(job, progress, timings).run(device.index)
    except BaseException as error:
        if not isinstance(error, (TuningError, OSError)):
            client.stop_all()  # an interrupt, so the worker may be in the middle of anything
        raise


class _Measurement:
    """The candidates of a job and their timings so far, by label."""

    def __init__(self, job: messages.Job, progress: Progress, timings: dict[str, Timing]):
        self.job, self.progress, self.name = job, progress, progress.name
        self.timings = timings

    @property
    def left(self) -> list[messages.CompiledCandidate]:
        return [c for c in self.job.candidates if c.label not in self.timings]

    def run(self, device: int) -> None:
        count = len(self.job.candidates)
        deadline = time.monotonic() + self.job.budget_s
        tried_again = False
        while (left := self.left) and (len(left) == count or time.monotonic() < deadline):
            try:
                if self._listen(client.start(device), max(0.0, deadline - time.monotonic())):
                    break
                tried_again = False
            except client.Ended:
                # The worker may just have ended because it had no work; no candidate is to blame.
                if tried_again:
                    raise
                tried_again = True
        if left := self.left:
            logger.warning(
                f"kernel {self.name}: {len(left)} of {count} configs were not tried "
                f"(the time for measuring is {self.job.budget_s:g} s): "
                + "; ".join(f"[{candidate.label}]" for candidate in left)
            )
        for name in [candidate.label for candidate in left]:
            self.timings[name] = Timing(name, error=NOT_TRIED, out_of_time=True)

    def _listen(self, worker: client.Worker, budget_s: float) -> bool:
        """Runs the remaining candidates on one worker; False if a candidate killed the worker.

        Raises:
          Ended: the worker ended before it came to any candidate, or another program killed it.
          TuningError: the worker cannot begin or finish the job.
        """
        candidates = tuple(self.left)
        worker.ready()
        worker.send(dataclasses.replace(self.job, candidates=candidates, budget_s=budget_s))
        patience, running = _PREPARING_S, None
        while True:
            try:
                message = worker.answer(patience)
            except client.Ended as error:
                if running is None or isinstance(error, client.Killed):
                    raise
                self._fail(running, f"while it was running, {error}")
                return False
            patience = self.job.timeout_s + _GRACE_S
            if message is None:
                return True
            if isinstance(message, str):
                what = "begin"
                if running is not None:
                    what = f"go on with config [{running}]"
                    self._note(Timing(running, error=message, out_of_time=True))
                raise TuningError(f"the tuning worker could not {what}: {message}")
            running = candidates[message.index].label
            if isinstance(message, messages.Timed):
                self._note(Timing(running, message.median_ms, message.runs))
            elif isinstance(message, messages.Failed):
                self._fail(running, message.reason, late=message.late)
                if message.fatal:
                    worker.kill()
                    return False

    def _fail(self, label: str, reason: str, *, late: bool = False) -> None:
        self._note(Timing(label, error=reason, out_of_time=late))
        logger.warning("config dropped: kernel %s, config [%s]: %s", self.name, label, reason)

    def _note(self, timing: Timing) -> None:
        if timing.config not in self.timings:
            self.progress.step()
        self.timings[timing.config] = timing


@contextlib.contextmanager
def operand_files(arrays: Sequence[np.ndarray | None]) -> Iterator[list[str | None]]:
    """Writes arrays to in-memory files; gives paths that the worker can read.

    Raises:
      TuningError, OSError: memory is short, or this system has no in-memory files.
    """
    if any(array is not None for array in arrays) and not hasattr(os, "memfd_create"):
        raise TuningError("this Python lacks os.memfd_create, which passes operands to the worker")
    with contextlib.ExitStack() as files:
        paths: list[str | None] = [None] * len(arrays)
        for index, array in enumerate(arrays):
            if array is not None:
                file = files.enter_context(open(os.memfd_create("triax-operand"), "wb"))
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
                file.flush()
                paths[index] = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        yield paths
