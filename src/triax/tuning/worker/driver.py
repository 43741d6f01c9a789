"""The tuning worker's GPU: a context, the buffers of a job, and runs of candidates on them.

Imported by the worker, which runs without JAX and without the rest of Triax.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import time
from typing import Any

from triax.tuning.worker import messages

_SCALARS = {
    "i1": ctypes.c_uint8,
    "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
    "fp32": ctypes.c_float,
    "fp64": ctypes.c_double,
}


# Driver errors that are the machine's fault, not that of the kernel that happens to run: memory is
# short, or the hardware, the context or the connection to it is lost.
_ABOUT_THE_MACHINE = {
    "CUDA_ERROR_OUT_OF_MEMORY",
    "CUDA_ERROR_NOT_INITIALIZED",
    "CUDA_ERROR_DEINITIALIZED",
    "CUDA_ERROR_DEVICE_UNAVAILABLE",
    "CUDA_ERROR_NO_DEVICE",
    "CUDA_ERROR_INVALID_DEVICE",
    "CUDA_ERROR_DEVICE_NOT_LICENSED",
    "CUDA_ERROR_INVALID_CONTEXT",
    "CUDA_ERROR_ECC_UNCORRECTABLE",
    "CUDA_ERROR_NVLINK_UNCORRECTABLE",
    "CUDA_ERROR_CONTAINED",
    "CUDA_ERROR_OPERATING_SYSTEM",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED",
    "CUDA_ERROR_SYSTEM_NOT_READY",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
    "CUDA_ERROR_MPS_CONNECTION_FAILED",
    "CUDA_ERROR_MPS_RPC_FAILURE",
    "CUDA_ERROR_MPS_SERVER_NOT_READY",
    "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED",
    "CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED",
    "CUDA_ERROR_MPS_CLIENT_TERMINATED",
    "CUDA_ERROR_EXTERNAL_DEVICE",
}


class DriverError(Exception):
    """The CUDA driver refused a call."""


class KernelError(DriverError):
    """The CUDA driver refused a call for a reason that may be the kernel's own."""


class HungError(Exception):
    """A kernel did not end in time."""


def call(function: Any, *arguments: Any) -> Any:
    """Calls a driver function; returns its results without the status."""
    status, *results = function(*arguments)
    check(function.__name__, status)
    return results[0] if len(results) == 1 else results


def check(what: str, status: Any) -> None:
    """Raises `DriverError` unless `status` is success."""
    if int(status):
        error_class = DriverError if status.name in _ABOUT_THE_MACHINE else KernelError
        is_full = status.name == "CUDA_ERROR_OUT_OF_MEMORY"
        hint = " (XLA_PYTHON_CLIENT_MEM_FRACTION sets JAX's share)" if is_full else ""
        raise error_class(f"{what}: {status.name}{hint}")


class Context:
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
        # In CUDA 12 only `cuDeviceGetUuid_v2` handles MIG instances; CUDA 13 drops the suffix.
        get_uuid = getattr(driver, "cuDeviceGetUuid_v2", None) or driver.cuDeviceGetUuid
        self.uuid = bytes(call(get_uuid, self.device).bytes).hex()

    def is_broken(self) -> bool:
        """Whether the context is lost: after a bad access, say, every call repeats the error."""
        (status,) = self.cu.cuCtxSynchronize()
        return bool(int(status))

    def free_bytes(self) -> int:
        return int(call(self.cu.cuMemGetInfo)[0])

    def allocate(self, nbytes: int) -> int:
        return int(call(self.cu.cuMemAlloc, max(nbytes, 1)))

    def fill(self, address: int, buffer: messages.BufferSpec) -> None:
        """Fills a buffer with its initial contents."""
        if buffer.nbytes == 0:
            return
        with contextlib.ExitStack() as opened:
            content: Any = bytearray(buffer.pattern)
            if buffer.path is not None:
                file = opened.enter_context(open(buffer.path, "rb"))
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                content = opened.enter_context(mapped)
            have = min(len(content), buffer.nbytes)
            block = (ctypes.c_char * have).from_buffer(content)
            call(self.cu.cuMemcpyHtoD, address, ctypes.addressof(block), have)
            del block  # a mapping in use cannot be closed
        while have < buffer.nbytes:
            more = min(have, buffer.nbytes - have)
            call(self.cu.cuMemcpyDtoD, address + have, address, more)
            have += more
        call(self.cu.cuCtxSynchronize)

    def wait(self, event: Any, timeout_s: float) -> None:
        """Waits for an event, at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        pause = 0.0
        while (status := self.cu.cuEventQuery(event)[0]) == self.cu.CUresult.CUDA_ERROR_NOT_READY:
            if time.monotonic() > deadline:
                raise HungError(f"did not end within {timeout_s:g} s")
            time.sleep(pause)
            pause = min(pause + 20e-6, 2e-3)
        check("launch", status)


class Bench:
    """The buffers of one job, on which its candidates run one after another."""

    def __init__(self, device: Context, job: messages.Job):
        self.device, self.cu, self.job = device, device.cu, job
        self.flush_bytes: int = 2 * device.l2_bytes
        self.addresses: list[int] = []
        self.originals: dict[int, int] = {}
        self.modules: list[Any] = []
        self.scratch = self.flush = 0
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
        """Frees the job's memory and modules. Errors are ignored: an earlier error says more."""
        for module in self.modules:
            self.cu.cuModuleUnload(module)
        addresses = [*self.addresses, *self.originals.values(), self.flush, self.scratch]
        for address in filter(None, addresses):
            self.cu.cuMemFree(address)
        self.cu.cuEventDestroy(self.start)
        self.cu.cuEventDestroy(self.end)

    def load(self, candidate: messages.CompiledCandidate) -> Any:
        module = call(self.cu.cuModuleLoadData, candidate.cubin)
        self.modules.append(module)
        function = call(self.cu.cuModuleGetFunction, module, candidate.entry.encode())
        if candidate.shared_bytes > 48 * 1024:
            attributes = self.cu.CUfunction_attribute
            limit = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call(self.cu.cuFuncSetAttribute, function, limit, candidate.shared_bytes)
        return function

    def parameters(self, candidate: messages.CompiledCandidate) -> tuple[tuple[Any, ...], ...]:
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
        return (*values, self.scratch, 0), (*types, ctypes.c_void_p, ctypes.c_void_p)

    def tensor_map(self, parameter: messages.TensorMapParameter) -> Any:
        cu = self.cu
        rank = len(parameter.shape)
        fill = "NAN_REQUEST_ZERO_FMA" if parameter.nan_fill else "NONE"
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
            getattr(cu.CUtensorMapFloatOOBfill, f"CU_TENSOR_MAP_FLOAT_OOB_FILL_{fill}"),
        )

    def run(self, candidate: messages.CompiledCandidate, function: Any, parameters: Any) -> float:
        """Times one cold run, in milliseconds, after restoring buffers and flushing caches."""
        cu, stream = self.cu, self.device.stream
        for index, original in self.originals.items():
            nbytes = self.job.buffers[index].nbytes
            if nbytes:
                call(cu.cuMemcpyDtoDAsync, self.addresses[index], original, nbytes, stream)
        call(cu.cuMemsetD8Async, self.flush, 0, self.flush_bytes, stream)
        call(cu.cuEventRecord, self.start, stream)
        # XLA also zeroes these outputs for this config, so zeroing is timed too.
        for parameter in candidate.parameters:
            if isinstance(parameter, messages.Pointer) and parameter.zeroed:
                address = self.addresses[parameter.index]
                call(cu.cuMemsetD8Async, address, 0, parameter.zeroed, stream)
        self.launch(candidate, function, parameters)
        call(cu.cuEventRecord, self.end, stream)
        self.device.wait(self.end, self.job.timeout_s)
        return float(call(cu.cuEventElapsedTime, self.start, self.end))

    def launch(self, candidate: messages.CompiledCandidate, function: Any, parameters: Any) -> None:
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


def _programs(candidate: messages.CompiledCandidate) -> int:
    x, y, z = candidate.grid
    return x * y * z * candidate.num_ctas
