"""Measures candidates in a worker process.

In: compiled launches, a device, and what to fill the operands with. Out: for every
candidate a time or the reason it has none. The worker starts at the first need, serves
the whole process, is replaced when it dies or hangs, and ends with its parent. One
measurement runs at a time per GPU, over all processes.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import fcntl
import importlib.util
import logging
import os
import pickle
import queue
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from triax.bridge import settings
from triax.bridge.compat import triton_private
from triax.bridge.errors import TuningError
from triax.bridge.launch import (
    ArrayType,
    Call,
    CompiledKernel,
    Descriptor,
    Launch,
    Operand,
    Result,
    Scalar,
)
from triax.tuning import job as jobs
from triax.tuning.key import Device, label
from triax.tuning.store import Timing

logger = logging.getLogger(__name__)

_PATTERN_BYTES = 1 << 20
_START_TIMEOUT_S = 60.0
_BUDGET_S = 20.0


class TooLargeError(TuningError):
    """Measuring would take more GPU memory than it may."""


def problem() -> str | None:
    """Why nothing can be measured in this installation, or None."""
    if (
        importlib.util.find_spec("cuda") is None
        or importlib.util.find_spec("cuda.bindings") is None
    ):
        return "cuda-bindings is not installed (pip install 'triax[cuda13]' brings it)"
    return None


# --- what the worker is asked ----------------------------------------------------


def make_job(
    call: Call,
    compiled: Sequence[tuple[Launch, CompiledKernel]],
    device: Device,
    inputs: Sequence[str | None],
) -> jobs.Job:
    """The job of timing `compiled`; `inputs` are files with operands' contents, or None."""
    first = compiled[0][0]
    changed = _changed_operands(call, first)
    buffers = [
        jobs.Buffer(
            array.nbytes,
            pattern=_pattern(array),
            path=path if array.nbytes else None,
            restored=index in changed,
        )
        for index, (array, path) in enumerate(zip(first.operands, inputs, strict=True))
    ]
    aliased = first.operand_of_result
    reset = _named(call, first, "reset_to_zero")
    for index, array in enumerate(first.results):
        if index not in aliased:
            buffers.append(jobs.Buffer(array.nbytes, restored=Result(index) in reset))
    return jobs.Job(
        device=device.index,
        buffers=tuple(buffers),
        candidates=tuple(_candidate(launch, kernel) for launch, kernel in compiled),
        limit_bytes=settings.tuning_bytes(),
        timeout_s=settings.tuning_timeout_s(),
        budget_s=_BUDGET_S,
    )


def _changed_operands(call: Call, launch: Launch) -> set[int]:
    """Operands that a run changes, and that must be as they were for the next."""
    changed = {alias.operand for alias in launch.aliases}
    for option in ("restore_value", "reset_to_zero"):
        changed |= {
            leaf.index for leaf in _named(call, launch, option) if isinstance(leaf, Operand)
        }
    return changed


def _named(call: Call, launch: Launch, option: str) -> set[Any]:
    """The leaves of the parameters that an option of `@triton.autotune` names."""
    tuner = call.kernel.autotuner
    names = set(getattr(tuner, option, None) or ()) if tuner is not None else set()
    return {argument for name, argument in launch.arguments if name in names}


def _pattern(array: ArrayType) -> bytes:
    """Bytes to fill an operand with: random floats; zeros for everything else.

    Zeros, because an integer may be an index, and zero is one that is always in range.
    """
    if array.dtype.kind not in "fV" or not array.nbytes:
        return b"\0"
    count = min(array.nbytes, _PATTERN_BYTES) // array.dtype.itemsize
    values = np.random.default_rng(0).uniform(-1, 1, count)
    return values.astype(array.dtype).tobytes()


def _candidate(launch: Launch, kernel: CompiledKernel) -> jobs.Candidate:
    assert kernel.cubin is not None, "compiled without machine code"
    zeroed = launch.zeroed_bytes()
    tensor_maps = iter(kernel.tensor_maps)
    parameters: list[Any] = []
    leaves = zip(launch.leaves(), kernel.launch_parameters, kernel.scalar_types, strict=True)
    for leaf, is_parameter, scalar_type in leaves:
        if not is_parameter:
            continue
        if isinstance(leaf, Scalar):
            assert scalar_type is not None
            assert leaf.value is not None
            parameters.append(jobs.Number(leaf.value, scalar_type))
        elif isinstance(leaf, Descriptor):
            parameters.append(_tensor_map(launch, leaf, next(tensor_maps)))
        else:
            index = launch.buffer_index(leaf)
            parameters.append(jobs.Pointer(index, zeroed.get(leaf, 0)))
    return jobs.Candidate(
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


def _tensor_map(launch: Launch, leaf: Descriptor, tensor_map: Any) -> jobs.TensorMapParameter:
    return jobs.TensorMapParameter(
        index=leaf.index,
        element_type=triton_private.host_element_type(
            tensor_map.element_type, tf32=leaf.round_f32_to_tf32
        ),
        itemsize=launch.operands[leaf.index].dtype.itemsize,
        swizzle=tensor_map.swizzle,
        shape=leaf.shape,
        strides=leaf.strides,
        block_shape=tensor_map.block_shape,
        nan_fill=leaf.padding == "nan",
    )


# --- the worker process ------------------------------------------------------------


class Worker:
    """A worker process and the pipes to it."""

    def __init__(self, device: int):
        self.device = device
        path = Path(__file__).with_name("worker.py")
        self._process = subprocess.Popen(
            [sys.executable, str(path), str(os.getpid()), str(device)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the program; it ends the worker itself
        )
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._errors: list[bytes] = []
        self._ready = False
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._drain_errors, daemon=True).start()

    def _read(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        with contextlib.suppress(OSError, ValueError, EOFError, pickle.UnpicklingError):
            while len(header := stream.read(8)) == 8:
                (size,) = struct.unpack("<q", header)
                self._answers.put(pickle.loads(stream.read(size)))
        self._answers.put(None)

    def _drain_errors(self) -> None:
        assert self._process.stderr is not None
        with contextlib.suppress(OSError, ValueError):
            for line in self._process.stderr:
                self._errors[:] = [*self._errors[-20:], line]

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def answer(self, timeout_s: float) -> Any:
        """The next answer; None if the worker ended or says nothing for so long."""
        try:
            return self._answers.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def send(self, job: jobs.Job) -> None:
        if not self._ready:
            ready = self.answer(_START_TIMEOUT_S)
            if not isinstance(ready, jobs.Ready):
                reason = b"".join(self._errors[-3:]).decode(errors="replace").strip()
                raise TuningError(f"the tuning worker did not start: {reason or 'no answer'}")
            self._ready = True
        data = pickle.dumps(job)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end shows in the answers
            self._process.stdin.write(struct.pack("<q", len(data)) + data)
            self._process.stdin.flush()

    def kill(self) -> None:
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


_workers: dict[int, Worker] = {}
_worker_lock = threading.Lock()


def start_worker(device: Device) -> Worker:
    """The worker of a device, started if there is none. Returns before it is ready."""
    with _worker_lock:
        worker = _workers.get(device.index)
        if worker is None or not worker.alive:
            if worker is not None:
                worker.kill()  # it died by itself: its pipes are still open
            worker = _workers[device.index] = Worker(device.index)
        return worker


def stop_workers() -> None:
    """Ends all workers of this process."""
    with _worker_lock:
        for worker in _workers.values():
            worker.kill()
        _workers.clear()


atexit.register(stop_workers)


# --- measuring ------------------------------------------------------------------------


def measure(job: jobs.Job, device: Device, name: str) -> list[Timing]:
    """Times all candidates of a job.

    Raises:
      TooLargeError: the job needs more memory than it may take.
      TuningError: the worker does not work on this machine.
    """
    labels = [candidate.label for candidate in job.candidates]
    found: dict[int, Timing] = {}
    progress = _Progress(name, len(labels))
    try:
        with _one_at_a_time(device):
            while len(found) < len(labels):
                left = [i for i in range(len(labels)) if i not in found]
                part = dataclasses.replace(job, candidates=tuple(job.candidates[i] for i in left))
                _measure_part(part, device, left, labels, found, progress)
    except BaseException:
        # An interrupt too: the worker may be in the middle of anything.
        stop_workers()
        raise
    finally:
        progress.close()
    return [found[index] for index in range(len(labels))]


def _measure_part(
    job: jobs.Job,
    device: Device,
    left: Sequence[int],
    labels: Sequence[str],
    found: dict[int, Timing],
    progress: _Progress,
) -> None:
    """One job of one worker; it may end early, with at least one candidate answered."""
    worker = start_worker(device)
    worker.send(job)
    # The worker watches its own runs; this bound is for one that can no longer do that.
    patience = job.budget_s + 4 * job.timeout_s + 30.0
    answered = 0
    while True:
        message = worker.answer(patience)
        if isinstance(message, jobs.Done):
            return
        if isinstance(message, jobs.TooLarge):
            raise TooLargeError(
                f"measuring needs {message.needed_bytes} bytes of GPU memory, and may take "
                f"{message.allowed_bytes} (half of what is free, or TRIAX_TUNING_BYTES)"
            )
        if isinstance(message, jobs.Timed):
            index = left[message.index]
            found[index] = Timing(labels[index], message.median_ms, message.runs)
            answered += 1
            progress.step(len(found))
            continue
        if isinstance(message, jobs.Failed) and message.index >= 0:
            index = left[message.index]
            found[index] = Timing(labels[index], error=message.reason)
            logger.warning("config dropped: kernel config [%s]: %s", labels[index], message.reason)
            answered += 1
            progress.step(len(found))
            if not message.fatal:
                continue
        elif isinstance(message, jobs.Failed):
            raise TuningError(f"the tuning worker failed: {message.reason}")
        worker.kill()
        if answered == 0:
            # It died on the first candidate without a word, or before it.
            index = left[0]
            found[index] = Timing(labels[index], error="the tuning worker died while running it")
            logger.warning("config dropped: kernel config [%s] ended the worker", labels[index])
        return


@contextlib.contextmanager
def _one_at_a_time(device: Device) -> Iterator[None]:
    """Holds the GPU against other measuring processes of this user."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace("/", "_").replace(",", "_")
    name = f"triax-{os.getuid()}-gpu-{visible}-{device.index}.lock"
    path = Path(tempfile.gettempdir()) / name
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file lets go of it, also when the process dies


class _Progress:
    """Says how far a tuning is, once it takes long."""

    def __init__(self, name: str, total: int):
        self._name, self._total = name, total
        self._start = time.monotonic()
        self._shown = False

    def step(self, done: int) -> None:
        elapsed = time.monotonic() - self._start
        if elapsed < 2.0 or not sys.stderr.isatty():
            return
        self._shown = True
        width = 24 * done // self._total
        bar = "█" * width + "·" * (24 - width)
        print(
            f"\rtuning {self._name} {bar} {done}/{self._total} {elapsed:.0f} s",
            end="",
            file=sys.stderr,
            flush=True,
        )

    def close(self) -> None:
        if self._shown:
            print(file=sys.stderr)


@contextlib.contextmanager
def operand_files(arrays: Sequence[np.ndarray | None]) -> Iterator[list[str | None]]:
    """Arrays as raw files that the worker reads, in memory where the system allows it."""
    base = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="triax-", dir=base) as folder:
        paths: list[str | None] = []
        for index, array in enumerate(arrays):
            if array is None:
                paths.append(None)
                continue
            path = os.path.join(folder, str(index))
            np.ascontiguousarray(array).reshape(-1).view(np.uint8).tofile(path)
            paths.append(path)
        yield paths
