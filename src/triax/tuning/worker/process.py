"""The tuning worker: a process with a CUDA context of its own that times kernels.

Run as a file, not as a module, so that neither JAX nor the rest of Triax is imported.
It reads pickled jobs from standard input and writes pickled answers to standard
output, as it goes: who waits always knows which candidate is running, and keeps what was
timed before it. A candidate that faults poisons this process's context, one that never
ends blocks its device queue; both end this process, not the program it works for. It ends
with its parent, and after some time without work.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pickle
import select
import statistics
import struct
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn


def _load_messages() -> Any:
    """The file beside this one under its real name, which pickles carry, without its packages."""
    for package in ("triax", "triax.tuning", "triax.tuning.worker"):
        sys.modules.setdefault(package, types.ModuleType(package))
    name = "triax.tuning.worker.messages"
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "messages.py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if TYPE_CHECKING:
    from triax.tuning.worker import messages
else:
    messages = sys.modules.get("triax.tuning.worker.messages") or _load_messages()

_SCALARS = {
    "i1": ctypes.c_uint8,
    "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
    "fp32": ctypes.c_float,
    "fp64": ctypes.c_double,
}

_FIRST_RUNS = 15
_FINAL_RUNS = 60
_FINALISTS = 3
_FINAL_MARGIN = 1.15
# Slow kernels need fewer runs, because their times differ less: seconds for all runs of one, and
# for the final round.
_FIRST_S = 1.0
_FINAL_S = 2.0
# A first run loads code, in a few milliseconds at the most: past this it is as good as any other.
_SLOW_MS = 50.0
_REPORT_EVERY_S = 0.25


class DriverError(Exception):
    """The CUDA driver refused a call."""


class HungError(Exception):
    """A kernel did not end in its time."""


def call(function: Any, *arguments: Any) -> Any:
    """Calls a driver function; returns its results without the status."""
    status, *results = function(*arguments)
    if int(status):
        raise DriverError(f"{function.__name__}: {status.name}")
    return results[0] if len(results) == 1 else results


class Device:
    """One GPU's context, stream and memory."""

    def __init__(self, index: int):
        from cuda.bindings import driver

        self.cu = driver
        call(driver.cuInit, 0)
        self.device = call(driver.cuDeviceGet, index)
        self.context = call(driver.cuDevicePrimaryCtxRetain, self.device)
        call(driver.cuCtxSetCurrent, self.context)
        self.stream = call(driver.cuStreamCreate, 1)
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE
        self.l2_bytes = call(driver.cuDeviceGetAttribute, attribute, self.device)
        self.name = call(driver.cuDeviceGetName, 256, self.device).split(b"\0")[0].decode()
        # In CUDA 12 only the second version knows the parts of a split GPU; later there is one.
        get_uuid = getattr(driver, "cuDeviceGetUuid_v2", driver.cuDeviceGetUuid)
        self.uuid = bytes(call(get_uuid, self.device).bytes).hex()

    def is_broken(self) -> bool:
        """Whether the context is lost: any later call repeats an error such as a bad access."""
        (status,) = self.cu.cuCtxSynchronize()
        return bool(int(status))

    def free_bytes(self) -> int:
        return call(self.cu.cuMemGetInfo)[0]

    def allocate(self, nbytes: int) -> int:
        return int(call(self.cu.cuMemAlloc, max(nbytes, 1)))

    def fill(self, address: int, buffer: messages.Buffer) -> None:
        """Puts a buffer's initial contents in place."""
        if buffer.nbytes == 0:
            return
        if buffer.path is not None:
            import mmap

            with (
                open(buffer.path, "rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped,
            ):
                source = (ctypes.c_char * buffer.nbytes).from_buffer(mapped)
                call(self.cu.cuMemcpyHtoD, address, ctypes.addressof(source), buffer.nbytes)
                del source
            return
        if len(buffer.pattern) == 1:
            call(self.cu.cuMemsetD8, address, buffer.pattern[0], buffer.nbytes)
            return
        have = min(len(buffer.pattern), buffer.nbytes)
        block = ctypes.create_string_buffer(buffer.pattern[:have], have)
        call(self.cu.cuMemcpyHtoD, address, ctypes.addressof(block), have)
        while have < buffer.nbytes:
            more = min(have, buffer.nbytes - have)
            call(self.cu.cuMemcpyDtoD, address + have, address, more)
            have += more
        call(self.cu.cuCtxSynchronize)

    def wait(self, event: Any, timeout_s: float) -> None:
        """Waits for an event, and not forever."""
        deadline = time.monotonic() + timeout_s
        not_ready = self.cu.CUresult.CUDA_ERROR_NOT_READY
        pause = 0.0
        while True:
            (status,) = self.cu.cuEventQuery(event)
            if status == not_ready:
                if time.monotonic() > deadline:
                    raise HungError(f"did not end within {timeout_s:g} s")
                time.sleep(pause)
                pause = min(pause + 20e-6, 2e-3)
                continue
            if int(status):
                raise DriverError(f"launch: {status.name}")
            return


class Bench:
    """The buffers of one job, and one candidate after another on them."""

    def __init__(self, device: Device, job: messages.Job):
        self.device, self.cu, self.job = device, device.cu, job
        self.flush_bytes = 2 * device.l2_bytes
        self.addresses: list[int] = []
        self.originals: dict[int, int] = {}
        self.modules: list[Any] = []
        self.scratch: int | None = None
        self.flush = 0
        self.start = call(self.cu.cuEventCreate, 0)
        self.end = call(self.cu.cuEventCreate, 0)

    def needed_bytes(self) -> int:
        buffers = sum(b.nbytes * (2 if b.restored else 1) for b in self.job.buffers)
        return buffers + self.flush_bytes + self.scratch_bytes()

    def scratch_bytes(self) -> int:
        return max((c.scratch_bytes * _programs(c) for c in self.job.candidates), default=0)

    def allocate(self) -> None:
        for index, buffer in enumerate(self.job.buffers):
            address = self.device.allocate(buffer.nbytes)
            self.addresses.append(address)
            self.device.fill(address, buffer)
            if buffer.restored:
                self.originals[index] = self.device.allocate(buffer.nbytes)
                if buffer.nbytes:
                    call(self.cu.cuMemcpyDtoD, self.originals[index], address, buffer.nbytes)
        self.flush = self.device.allocate(self.flush_bytes)
        if self.scratch_bytes():
            self.scratch = self.device.allocate(self.scratch_bytes())
        call(self.cu.cuCtxSynchronize)

    def release(self) -> None:
        for module in self.modules:
            call(self.cu.cuModuleUnload, module)
        scratch = [self.scratch] if self.scratch else []
        for address in [*self.addresses, *self.originals.values(), self.flush, *scratch]:
            if address:
                call(self.cu.cuMemFree, address)
        call(self.cu.cuEventDestroy, self.start)
        call(self.cu.cuEventDestroy, self.end)

    def load(self, candidate: messages.Candidate) -> Any:
        module = call(self.cu.cuModuleLoadData, candidate.cubin)
        self.modules.append(module)
        function = call(self.cu.cuModuleGetFunction, module, candidate.entry.encode())
        if candidate.shared_bytes > 48 * 1024:
            attribute = self.cu.CUfunction_attribute
            call(
                self.cu.cuFuncSetAttribute,
                function,
                attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                candidate.shared_bytes,
            )
        return function

    def parameters(self, candidate: messages.Candidate) -> tuple[tuple, tuple]:
        values: list[Any] = []
        types: list[Any] = []
        for parameter in candidate.parameters:
            if isinstance(parameter, messages.Pointer):
                values.append(self.addresses[parameter.index])
                types.append(ctypes.c_void_p)
            elif isinstance(parameter, messages.Number):
                values.append(parameter.value)
                types.append(_SCALARS[parameter.type])
            else:
                values.append(self.tensor_map(parameter))
                types.append(None)
                values += [*parameter.shape, *parameter.strides]
                types += [ctypes.c_int32] * len(parameter.shape)
                types += [ctypes.c_int64] * len(parameter.strides)
        # The two hidden parameters: global scratch, profile scratch.
        return (*values, self.scratch or 0, 0), (*types, ctypes.c_void_p, ctypes.c_void_p)

    def tensor_map(self, parameter: messages.TensorMapParameter) -> Any:
        cu = self.cu
        rank = len(parameter.shape)
        fill = cu.CUtensorMapFloatOOBfill
        none, nan = (
            fill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            fill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA,
        )
        strides = [s * parameter.itemsize for s in reversed(parameter.strides)][1:]
        return call(
            cu.cuTensorMapEncodeTiled,
            cu.CUtensorMapDataType(parameter.element_type),
            rank,
            self.addresses[parameter.index],
            [cu.cuuint64_t(n) for n in reversed(parameter.shape)],
            [cu.cuuint64_t(n) for n in strides],
            [cu.cuuint32_t(n) for n in reversed(parameter.block_shape)],
            [cu.cuuint32_t(1)] * rank,
            cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            cu.CUtensorMapSwizzle(parameter.swizzle),
            cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            nan if parameter.nan_fill else none,
        )

    def run(self, candidate: messages.Candidate, function: Any, parameters: Any) -> float:
        """One cold run, in milliseconds; buffers put back and caches flushed before it."""
        cu, stream = self.cu, self.device.stream
        for index, original in self.originals.items():
            nbytes = self.job.buffers[index].nbytes
            if nbytes:
                call(cu.cuMemcpyDtoDAsync, self.addresses[index], original, nbytes, stream)
        call(cu.cuMemsetD8Async, self.flush, 0, self.flush_bytes, stream)
        call(cu.cuEventRecord, self.start, stream)
        # Zeroing is part of what XLA runs for this config, so it is timed with it.
        for parameter in candidate.parameters:
            if isinstance(parameter, messages.Pointer) and parameter.zeroed:
                address = self.addresses[parameter.index]
                call(cu.cuMemsetD8Async, address, 0, parameter.zeroed, stream)
        self.launch(candidate, function, parameters)
        call(cu.cuEventRecord, self.end, stream)
        self.device.wait(self.end, self.job.timeout_s)
        return call(cu.cuEventElapsedTime, self.start, self.end)

    def launch(self, candidate: messages.Candidate, function: Any, parameters: Any) -> None:
        cu = self.cu
        config = cu.CUlaunchConfig()
        x, y, z = candidate.grid
        # Triton counts programs; a program of several CTAs is a cluster of blocks.
        config.gridDimX, config.gridDimY, config.gridDimZ = x * candidate.num_ctas, y, z
        config.blockDimX, config.blockDimY, config.blockDimZ = 32 * candidate.num_warps, 1, 1
        config.sharedMemBytes = candidate.shared_bytes
        config.hStream = self.device.stream
        if candidate.num_ctas > 1:
            attribute = cu.CUlaunchAttribute()
            attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dims = attribute.value.clusterDim
            dims.x, dims.y, dims.z = candidate.num_ctas, 1, 1
            config.attrs = [attribute]
            config.numAttrs = 1
        call(cu.cuLaunchKernelEx, config, function, parameters, 0)


def _programs(candidate: messages.Candidate) -> int:
    x, y, z = candidate.grid
    return x * y * z * candidate.num_ctas


class Rounds:
    """Times the candidates of a job: all of them once, then the best again, in turns."""

    def __init__(self, bench: Bench, answer: Callable[[Any], None]):
        self.bench, self.job, self.answer = bench, bench.job, answer
        self.deadline = time.monotonic() + self.job.budget_s
        self.loaded: dict[int, tuple[Any, Any]] = {}
        self.samples: dict[int, list[float]] = {}

    def first(self) -> None:
        """Each candidate in turn, the slow ones with fewer runs, as long as there is time."""
        count = len(self.job.candidates)
        for index in range(count):
            now = time.monotonic()
            if index and now >= self.deadline:
                return
            share = max(0.0, self.deadline - now) / (count - index)
            self.time(index, _FIRST_RUNS, until=now + min(share, _FIRST_S))

    def final(self) -> None:
        """Close calls are run again, in turns, so that a drifting clock favours none."""
        ranked = sorted(self.samples, key=self.median)
        margin = _FINAL_MARGIN * self.median(ranked[0]) if ranked else 0.0
        close = [index for index in ranked[:_FINALISTS] if self.median(index) <= margin]
        until = min(self.deadline, time.monotonic() + _FINAL_S)
        for _ in range(_FINAL_RUNS // 5 if len(close) > 1 else 0):
            for index in close:
                if time.monotonic() > until:
                    return
                if index in self.samples:
                    self.time(index, 5, until=until)

    def time(self, index: int, runs: int, *, until: float) -> None:
        """Runs a candidate at most so many times more, and answers what it has taken so far."""
        bench, candidate = self.bench, self.job.candidates[index]
        self.answer(messages.Started(index))
        reported = time.monotonic()
        try:
            if index not in self.loaded:
                self.loaded[index] = (bench.load(candidate), bench.parameters(candidate))
                first = bench.run(candidate, *self.loaded[index])
                self.samples[index] = [first] if first > _SLOW_MS else []
            samples = self.samples[index]
            for _ in range(runs):
                if samples and (time.monotonic() > until or self.is_slow(index)):
                    break
                if samples and time.monotonic() > reported + _REPORT_EVERY_S:
                    self.report(index)
                    reported = time.monotonic()
                samples.append(bench.run(candidate, *self.loaded[index]))
        except DriverError as error:
            self.samples.pop(index, None)
            fatal = bench.device.is_broken()
            self.answer(messages.Failed(index, str(error), fatal))
            if fatal:
                leave(3)
        except HungError as error:
            self.answer(messages.Failed(index, str(error), fatal=True, late=True))
            leave(4)
        else:
            self.report(index)

    def is_slow(self, index: int) -> bool:
        """Whether a candidate is so far behind another that more runs tell nothing."""
        samples = self.samples[index]
        others = [statistics.median(s) for i, s in self.samples.items() if i != index and s]
        sure = len(samples) >= 3 or samples[0] > _SLOW_MS
        return sure and statistics.median(samples) > 4 * min(others, default=float("inf"))

    def report(self, index: int) -> None:
        self.answer(messages.Timed(index, self.median(index), len(self.samples[index])))

    def median(self, index: int) -> float:
        return statistics.median(self.samples[index])


def work(device: Device, job: messages.Job, answer: Callable[[Any], None]) -> None:
    """Times the candidates of a job and answers for each as it goes."""
    bench = Bench(device, job)
    allowed = device.free_bytes() // 2
    if job.limit_bytes is not None:
        allowed = min(allowed, job.limit_bytes)
    if bench.needed_bytes() > allowed:
        answer(messages.TooLarge(bench.needed_bytes(), allowed))
        return
    try:
        bench.allocate()
        rounds = Rounds(bench, answer)
        rounds.first()
        rounds.final()
    finally:
        bench.release()
    answer(messages.Done())


def leave(status: int) -> NoReturn:
    """Ends the process at once: a context that is broken or busy does not shut down."""
    os._exit(status)


def follow_parent(parent: int) -> None:
    """Ends this process when its parent is gone, also while a kernel runs."""
    while os.getppid() == parent:
        time.sleep(0.25)
    leave(5)


def send(stream: BinaryIO, message: Any) -> None:
    data = pickle.dumps(message)
    stream.write(struct.pack("<q", len(data)) + data)
    stream.flush()


def receive(stream: BinaryIO, idle_s: float) -> Any:
    """The next job; None after so long without one, or when no more can come.

    `stream` is unbuffered, so that what has come can be told from what is yet to come.
    """
    if not select.select([stream], [], [], idle_s)[0]:
        return None
    header = _read(stream, 8)
    if len(header) < 8:
        return None
    (size,) = struct.unpack("<q", header)
    return pickle.loads(_read(stream, size))


def _read(stream: BinaryIO, size: int) -> bytes:
    parts = []
    while size and (part := stream.read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def main() -> None:
    parent, index, idle_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    threading.Thread(target=follow_parent, args=(parent,), daemon=True).start()
    requests, answers = os.fdopen(0, "rb", buffering=0), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever libraries print is no answer
    device = Device(index)
    send(answers, messages.Ready(device.name, device.uuid))
    while (job := receive(requests, idle_s)) is not None:
        try:
            work(device, job, lambda message: send(answers, message))
        except (DriverError, OSError) as error:  # outside any candidate: memory, mostly
            send(answers, messages.Refused(str(error)))
            if device.is_broken():
                leave(6)


if __name__ == "__main__":
    main()
