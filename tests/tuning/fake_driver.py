"""Stands in for `cuda.bindings.driver` where there is no GPU.

It keeps the driver's names, as far as Triax calls them, and simulates time: a kernel takes as
long as it is said to, and its memory is this process's own. What each kernel does is said in
the environment variable ``FAKE_DRIVER``, a JSON object; kernels are told apart by the first
dimension of their grid. `install` puts this module where the real one would be.

    ms           grid → milliseconds that a run takes (1)
    fault        grid → the error of its runs, which breaks the context
    refused      grid → the error of its launch, which breaks nothing
    hang         grids that never end
    die          grids that take the process with them
    killed       grids during whose runs somebody kills the process
    die_later    grid → the run in which it does so
    stuck        grids whose launch never returns
    broken_start whether the driver does not even start
    free_bytes   what the driver reports free (1 GiB)
    really_free_bytes  what can be allocated, where that is less
    modules      how many modules fit into memory
    grandchild   whether it starts a process that keeps the worker's pipes open
    later        what holds instead from the second process on that launches anything
    log          a file that gets a line for each module or buffer that comes or goes
"""

import ctypes
import enum
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import types

_says = json.loads(os.environ.get("FAKE_DRIVER", "{}"))
if "later" in _says and os.path.exists(_says["log"]):
    with open(_says["log"]) as _file:
        if any("launch" in line and not line.startswith(f"{os.getpid()} ") for line in _file):
            _says.update(_says["later"])
if _says.get("grandchild"):
    subprocess.Popen(["sleep", "30"])
_buffers = {}
_modules = []
_broken = []
_busy_until = 0.0
_runs = {}


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_DEVICE_UNAVAILABLE = 46
    CUDA_ERROR_ECC_UNCORRECTABLE = 214
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES = 701
    CUDA_ERROR_LAUNCH_FAILED = 719
    CUDA_ERROR_UNKNOWN = 999


class CUdevice_attribute(enum.IntEnum):
    CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE = 38


class CUfunction_attribute(enum.IntEnum):
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8


class CUlaunchConfig(types.SimpleNamespace):
    pass


def _log(line):
    if "log" in _says:
        with open(_says["log"], "a") as file:
            file.write(f"{os.getpid()} {line}\n")


def _done(*results):
    return (_broken[0] if _broken else CUresult.CUDA_SUCCESS, *results)


def cuInit(flags):
    return (CUresult.CUDA_ERROR_UNKNOWN if _says.get("broken_start") else CUresult.CUDA_SUCCESS,)


def cuDeviceGetUuid(device):
    return _done(types.SimpleNamespace(bytes=bytes(range(16))))


def cuDeviceGetAttribute(attribute, device):
    return _done(4096)


def cuMemGetInfo():
    return _done(_says.get("free_bytes", 1 << 30), 1 << 31)


def cuMemAlloc(size):
    used = sum(map(len, _buffers.values()))
    if used + size > _says.get("really_free_bytes", _says.get("free_bytes", 1 << 30)):
        return CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0
    buffer = ctypes.create_string_buffer(size)
    _buffers[ctypes.addressof(buffer)] = buffer
    _log(f"+buffer {size}")
    return _done(ctypes.addressof(buffer))


def cuMemFree(address):
    _log(f"-buffer {len(_buffers.pop(address))}")
    return _done()


def cuMemcpyHtoD(to, source, size):
    ctypes.memmove(to, source, size)
    return _done()


cuMemcpyDtoD = cuMemcpyHtoD


def cuMemcpyDtoDAsync(to, source, size, stream):
    return cuMemcpyHtoD(to, source, size)


def cuMemsetD8(address, value, size):
    ctypes.memset(address, value, size)
    return _done()


def cuMemsetD8Async(address, value, size, stream):
    return cuMemsetD8(address, value, size)


def cuModuleLoadData(cubin):
    if len(_modules) == _says.get("modules"):
        return CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
    _log("+module")
    _modules.append(object())
    return _done(_modules[-1])


def cuModuleUnload(module):
    _log("-module")
    _modules.remove(module)
    return _done()


def cuEventCreate(flags):
    return _done(types.SimpleNamespace(time=0.0))


def cuEventRecord(event, stream):
    event.time = max(_busy_until, time.monotonic())
    return _done()


def cuEventQuery(event):
    if time.monotonic() < event.time:
        return (CUresult.CUDA_ERROR_NOT_READY,)
    return _done()


def cuEventElapsedTime(start, end):
    return _done(1e3 * (end.time - start.time))


def cuLaunchKernelEx(config, function, parameters, extra):
    global _busy_until
    grid = config.gridDimX
    _runs[grid] = _runs.get(grid, 0) + 1
    _log(f"launch {grid}")
    if (error := _says.get("refused", {}).get(str(grid))) is not None:
        return (CUresult[f"CUDA_ERROR_{error}"],)
    if grid in _says.get("killed", ()):
        os.kill(os.getpid(), signal.SIGKILL)
    if grid in _says.get("die", ()) or _runs[grid] == _says.get("die_later", {}).get(str(grid)):
        os._exit(77)
    if grid in _says.get("stuck", ()):
        time.sleep(3600)
    if (error := _says.get("fault", {}).get(str(grid))) is not None:
        _broken.append(CUresult[f"CUDA_ERROR_{error}"])
    hangs = grid in _says.get("hang", ())
    seconds = 3600 if hangs else _says.get("ms", {}).get(str(grid), 1.0) / 1e3
    _busy_until = max(_busy_until, time.monotonic()) + seconds
    return (CUresult.CUDA_SUCCESS,)


def _succeeds(*arguments):
    return _done(0)


cuDeviceGet = cuDevicePrimaryCtxRetain = cuStreamCreate = cuModuleGetFunction = _succeeds


def _nothing(*arguments):
    return _done()


cuCtxSetCurrent = cuCtxPushCurrent = cuCtxPopCurrent = cuDevicePrimaryCtxRelease = _nothing
cuCtxSynchronize = cuEventDestroy = cuEventSynchronize = cuFuncSetAttribute = _nothing


def install(monkeypatch, folder, **says):
    """Makes this module the driver of this process and of those it starts."""
    package = folder / "driver" / "cuda" / "bindings"
    package.mkdir(parents=True)
    for place in (package, package.parent):
        (place / "__init__.py").write_text("")
    shutil.copy(__file__, package / "driver.py")
    says.setdefault("log", str(folder / "driver.log"))
    monkeypatch.setenv("FAKE_DRIVER", json.dumps(says))
    path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder / "driver"), path]))
    for name in [n for n in sys.modules if n == "cuda" or n.startswith("cuda.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(folder / "driver"))
    return folder / "driver.log"
