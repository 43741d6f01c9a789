"""The tuning worker: a process with a CUDA context of its own that times kernels.

Run as a file, not as a module, so that neither JAX nor the rest of Triax is imported.
It reads pickled jobs from standard input and writes pickled answers to standard
output. A candidate that faults poisons this process's context, one that never ends
blocks its device queue; both end this process, not the program it works for. It ends
with its parent.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pickle
import statistics
import struct
import sys
import threading
import time
import types
from typing import TYPE_CHECKING, Any, BinaryIO


def _load_job_module() -> Any:
    """The file beside this one under its real name, which pickles carry, without its packages."""
    for package in ("triax", "triax.tuning"):
        sys.modules.setdefault(package, types.ModuleType(package))
    name = "triax.tuning.job"
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "job.py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if TYPE_CHECKING:
    from triax.tuning import job as jobs
else:
    jobs = sys.modules.get("triax.tuning.job") or _load_job_module()

_SCALARS = {
    "i1": ctypes.c_uint8,
    "u1": ctypes.c_uint8,
    "i8": ctypes.c_int8,
    "u8": ctypes.c_uint8,
    "i16": ctypes.c_int16,
    "u16": ctypes.c_uint16,
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

    def free_bytes(self) -> int:
        return call(self.cu.cuMemGetInfo)[0]

    def allocate(self, nbytes: int) -> int:
        return int(call(self.cu.cuMemAlloc, max(nbytes, 1)))

    def fill(self, address: int, buffer: jobs.Buffer) -> None:
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

    def __init__(self, device: Device, job: jobs.Job):
        self.device, self.cu, self.job = device, device.cu, job
        self.flush_bytes = 2 * device.l2_bytes
        self.addresses: list[int] = []
        self.originals: dict[int, int] = {}
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
        scratch = [self.scratch] if self.scratch else []
        for address in [*self.addresses, *self.originals.values(), self.flush, *scratch]:
            if address:
                call(self.cu.cuMemFree, address)
        call(self.cu.cuEventDestroy, self.start)
        call(self.cu.cuEventDestroy, self.end)

    def load(self, candidate: jobs.Candidate) -> Any:
        module = call(self.cu.cuModuleLoadData, candidate.cubin)
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

    def parameters(self, candidate: jobs.Candidate) -> tuple[tuple, tuple]:
        values: list[Any] = []
        types: list[Any] = []
        for parameter in candidate.parameters:
            if isinstance(parameter, jobs.Pointer):
                values.append(self.addresses[parameter.index])
                types.append(ctypes.c_void_p)
            elif isinstance(parameter, jobs.Number):
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

    def tensor_map(self, parameter: jobs.TensorMapParameter) -> Any:
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

    def run(self, candidate: jobs.Candidate, function: Any, parameters: Any) -> float:
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
            if isinstance(parameter, jobs.Pointer) and parameter.zeroed:
                address = self.addresses[parameter.index]
                call(cu.cuMemsetD8Async, address, 0, parameter.zeroed, stream)
        self.launch(candidate, function, parameters)
        call(cu.cuEventRecord, self.end, stream)
        self.device.wait(self.end, self.job.timeout_s)
        return call(cu.cuEventElapsedTime, self.start, self.end)

    def launch(self, candidate: jobs.Candidate, function: Any, parameters: Any) -> None:
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


def _programs(candidate: jobs.Candidate) -> int:
    x, y, z = candidate.grid
    return x * y * z * candidate.num_ctas


def work(device: Device, job: jobs.Job, answer: Any) -> None:
    """Times all candidates of a job and answers for each."""
    bench = Bench(device, job)
    allowed = device.free_bytes() // 2
    if job.limit_bytes is not None:
        allowed = min(allowed, job.limit_bytes)
    if bench.needed_bytes() > allowed:
        answer(jobs.TooLarge(bench.needed_bytes(), allowed))
        return
    bench.allocate()
    deadline = time.monotonic() + job.budget_s
    loaded: dict[int, tuple[Any, Any]] = {}
    samples: dict[int, list[float]] = {}

    def one(index: int, runs: int) -> bool:
        candidate = job.candidates[index]
        try:
            if index not in loaded:
                loaded[index] = (bench.load(candidate), bench.parameters(candidate))
                samples[index] = []
                bench.run(candidate, *loaded[index])  # the first run loads code
            for done in range(runs):
                samples[index].append(bench.run(candidate, *loaded[index]))
                slow = statistics.median(samples[index]) > 4 * _best(samples, index)
                if done >= 2 and (slow or time.monotonic() > deadline):
                    break
        except DriverError as error:
            # A sticky error ends the context; any later call repeats it.
            (status,) = bench.cu.cuCtxSynchronize()
            fatal = bool(int(status))
            answer(jobs.Failed(index, str(error), fatal))
            if fatal:
                leave(3)
            return False
        except HungError as error:
            answer(jobs.Failed(index, str(error), fatal=True))
            leave(4)
        return True

    usable = [i for i in range(len(job.candidates)) if one(i, _FIRST_RUNS)]
    # Close calls are run again, in turns, so that a drifting clock favours none.
    ranked = sorted(usable, key=lambda i: statistics.median(samples[i]))
    close = [
        i
        for i in ranked[:_FINALISTS]
        if _median(samples, i) <= _FINAL_MARGIN * _median(samples, ranked[0])
    ]
    if len(close) > 1:
        for _ in range(_FINAL_RUNS // 5):
            if time.monotonic() > deadline:
                break
            for index in close:
                one(index, 5)
    for index in usable:
        answer(jobs.Timed(index, _median(samples, index), len(samples[index])))
    bench.release()
    answer(jobs.Done())


def _median(samples: dict[int, list[float]], index: int) -> float:
    return statistics.median(samples[index])


def _best(samples: dict[int, list[float]], besides: int) -> float:
    others = [statistics.median(s) for i, s in samples.items() if i != besides and s]
    return min(others, default=float("inf"))


def leave(status: int) -> Any:
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


def receive(stream: BinaryIO) -> Any:
    header = stream.read(8)
    if len(header) < 8:
        raise EOFError
    (size,) = struct.unpack("<q", header)
    return pickle.loads(stream.read(size))


def main() -> None:
    parent, index = int(sys.argv[1]), int(sys.argv[2])
    threading.Thread(target=follow_parent, args=(parent,), daemon=True).start()
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever libraries print is no answer
    device = Device(index)
    send(answers, jobs.Ready(device.name))
    while True:
        try:
            job = receive(requests)
        except EOFError:
            return
        try:
            work(device, job, lambda message: send(answers, message))
        except DriverError as error:  # outside any candidate: memory, mostly
            send(answers, jobs.Failed(-1, str(error), fatal=True))
            leave(6)


if __name__ == "__main__":
    main()
