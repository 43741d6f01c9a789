"""One process of a job whose devices share memory, with a driver of files in place of CUDA's.

    python peer_process.py ADDRESS PROCESS PROCESSES SCENARIO

Prints what it finds, in lines.
"""

import ctypes
import mmap
import os
import signal
import sys
import time
import traceback
import types

import jax
import numpy as np
from jax.sharding import Mesh

from triax.compat import jax_private, peer_memory

MAPPED = {}


def at(address):
    """The mapped memory from an address on."""
    for start, memory in MAPPED.items():
        if start <= address < start + len(memory):
            return memory, address - start
    raise AssertionError(f"{address:#x} is not mapped")


class Driver:
    """`cuda.bindings.driver`, of which memory is a file that processes pass to each other."""

    CUmemAllocationProp = CUmemAccessDesc = staticmethod(
        lambda: types.SimpleNamespace(location=types.SimpleNamespace())
    )
    CUmemAllocationType = CUmemLocationType = CUmemAccess_flags = types.SimpleNamespace(
        CU_MEM_ALLOCATION_TYPE_PINNED=1,
        CU_MEM_LOCATION_TYPE_DEVICE=1,
        CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3,
    )
    CUmemAllocationGranularity_flags = types.SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED=1)
    CUmemAllocationHandleType = types.SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *arguments: (0, getattr(self, f"_{name}", lambda *_: 1)(*arguments))

    _cuMemGetAllocationGranularity = staticmethod(lambda *_: 1 << 21)
    _cuMemAddressReserve = staticmethod(lambda size, _, address, __: address)
    _cuMemExportToShareableHandle = staticmethod(lambda handle, *_: os.dup(handle))
    _cuMemImportFromShareableHandle = staticmethod(lambda fd, _: os.dup(fd))

    @staticmethod
    def _cuMemCreate(size, *_):
        fd = os.memfd_create("region")
        os.ftruncate(fd, size)
        return fd

    @staticmethod
    def _cuMemMap(address, size, offset, handle, _):
        MAPPED[address] = mmap.mmap(handle, size, offset=offset)

    @staticmethod
    def _cuMemcpyHtoDAsync(address, source, size, _):
        memory, offset = at(address)
        memory[offset : offset + size] = ctypes.string_at(source, size)


class Failed(int):
    name = "CUDA_ERROR_OUT_OF_MEMORY"


def run(process, processes, scenario):
    peer_memory._driver = Driver
    peer_memory._MOST_DEVICES = 1 << 13  # a job numbers its CPUs 0, 2048, 4096, …
    jax_private.local_index = lambda device: 0
    mesh = Mesh(np.array(jax.devices()), ("x",))
    unit = peer_memory.PLACES["UNIT"]
    if scenario == "late" and process == 1:
        time.sleep(0.5)
    if scenario == "full" and process == 1:
        Driver.cuMemCreate = staticmethod(lambda *_: (Failed(2),))
    try:
        small = peer_memory.peers(mesh, "x", 2 * unit)
    except peer_memory.UnavailableError as error:
        print(error)
        return
    first = [int(address) * unit for address in small[process, :-1]]
    for target in first:  # each process writes its number to all devices' memory
        memory, offset = at(target + unit + process)
        memory[offset] = process + 1
    large = peer_memory.peers(mesh, "x", 3 * unit - 1)  # the others have written, too
    memory, offset = at(first[process] + unit)
    print(list(memory[offset : offset + processes]), small[0, -1], large[0, -1])
    for target in large[process, :-1]:
        at(int(target) * unit + unit + 2 * int(large[0, -1]) * unit - 1)
    again = peer_memory.peers(mesh, "x", unit)  # makes nothing, and waits for nobody
    print(len(MAPPED), (again == small).all())
    if scenario == "dies":
        if process == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        memory, offset = at(first[process] + 4 * peer_memory.PLACES["ABORT"])
        deadline = time.monotonic() + 20
        while memory[offset] == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        print(f"abort {memory[offset]}")


if __name__ == "__main__":
    job, process, processes, scenario = sys.argv[1], *map(int, sys.argv[2:4]), sys.argv[4]
    peer_memory._SLOW_S = 0.2
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(job, processes, process)
    try:
        run(process, processes, scenario)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(0)  # JAX would wait for a process that has died
