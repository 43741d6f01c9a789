"""One process of a job whose devices share memory, with a driver of files in place of CUDA's.

    python peer_process.py ADDRESS PROCESS PROCESSES SCENARIO

Prints what it finds, in lines.
"""

import contextlib
import ctypes
import itertools
import logging
import mmap
import os
import signal
import socket
import sys
import time
import traceback
import types

import jax
import numpy as np
from jax._src import distributed
from jax.sharding import Mesh

from triax.compat import jax_private, peer_memory
from triax.errors import TriaxError

MAPPED = {}
STREAMS = itertools.count(1)
UNIT = peer_memory.PLACES["UNIT"]


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
    CUdevice_P2PAttribute = types.SimpleNamespace(CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED=1)
    CUmemAllocationHandleType = types.SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *arguments: (0, getattr(self, f"_{name}", lambda *_: 1)(*arguments))

    _cuDeviceGetPCIBusId = staticmethod(lambda _, index: b"0000:%02x:00.0\0" % index)
    _cuDeviceGetByPCIBusId = staticmethod(lambda bus: int(bus[5:7], 16))
    _cuStreamCreate = staticmethod(lambda _: next(STREAMS))
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
    def _cuMemUnmap(address, size):
        assert len(MAPPED.pop(address, b"")) in (0, size)  # 0: an error, of the driver

    @staticmethod
    def _cuMemcpyHtoDAsync(address, source, size, _):
        memory, offset = at(address)
        memory[offset : offset + size] = ctypes.string_at(source, size)


class Failed(int):
    name = "CUDA_ERROR_OUT_OF_MEMORY"


@contextlib.contextmanager
def failing(name, error):
    """The driver without one of its functions, which returns a status, or raises."""

    def fail(*_):
        if isinstance(error, Exception):
            raise error
        return (error,)

    setattr(Driver, name, staticmethod(fail))
    yield
    delattr(Driver, name)


def byte(address):
    memory, offset = at(address)
    return memory[offset]


def aborted(address, seconds=20.0):
    """Whether kernels with a channel at this address are stopped."""
    deadline = time.monotonic() + seconds
    while not byte(address + 4 * peer_memory.PLACES["ABORT"]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(byte(address + 4 * peer_memory.PLACES["ABORT"]))


def peers(mesh, units, axis="x"):
    """The addresses of each device, and the room, in bytes; or the error."""
    try:
        table = peer_memory.peers(mesh, axis, units * UNIT)
    except (peer_memory.UnavailableError, TriaxError) as error:
        return f"{type(error).__name__}: {error}"
    return table.astype(np.int64) * UNIT


def run(process, processes, scenario):
    peer_memory._driver = Driver
    peer_memory._MOST_DEVICES = 1 << 13  # a job numbers its CPUs 0, 2048, 4096, …
    jax_private.local_index = lambda device: 2 * (device.id // 2048) + device.id % 2048
    mesh = Mesh(np.array(jax.devices()), ("x",))
    globals()[f"run_{scenario}"](mesh, process, processes)
    if scenario not in ("dies", "ends"):  # one that ended now would be an error of others
        distributed.global_state.client.wait_at_barrier("end", 60_000)


def run_writes(mesh, process, processes):
    if process == 1:
        time.sleep(0.5)  # late
    small = peers(mesh, 2)
    first = small[process, :-1]
    for target in first:  # each process writes its number to all devices' memory
        memory, offset = at(target + UNIT + process)
        memory[offset] = process + 1
    large = peers(mesh, 3)  # the others have written, too
    memory, offset = at(first[process] + UNIT)
    print(list(memory[offset : offset + processes]), small[0, -1] // UNIT, large[0, -1] // UNIT)
    for target in large[process, :-1]:
        byte(target + UNIT + 2 * large[0, -1] - 1)
    again = peers(mesh, 1)  # makes nothing, and waits for nobody
    print(len(MAPPED), (again == small).all())


def run_fails(mesh, process, processes):
    """What one process cannot, no process does, and nothing is left of it."""
    kept = peers(mesh, 1)
    mapped = dict(MAPPED)
    fault = Failed(2)
    for units, (name, error) in enumerate(
        [
            ("cuMemCreate", fault),
            ("cuMemSetAccess", fault),
            ("cuMemExportToShareableHandle", fault),
            ("cuMemImportFromShareableHandle", fault),
            ("cuMemMap", RuntimeError("no libcuda")),
            ("cuDeviceGetP2PAttribute", fault),  # which is asked about the other's GPU
        ],
        1,
    ):
        with failing(name, error) if process == 1 else contextlib.nullcontext():
            print(peers(mesh, 256 >> units))
        assert mapped == MAPPED
    receive = socket.recv_fds
    if process == 1:
        socket.recv_fds = lambda *given: (receive(*given)[0], [], 0, None)
    print(peers(mesh, 2))
    socket.recv_fds = receive
    assert (peers(mesh, 1) == kept).all()
    assert peers(mesh, 2) == peers(mesh, 5)  # it is not tried again, and neither is more
    reverse = Mesh(mesh.devices[::-1], ("x",))
    if process == 1:
        euid = os.geteuid
        os.geteuid = lambda: -1
    print(peers(reverse, 8))
    if process == 1:
        os.geteuid = euid
        os.readlink = lambda _: os.stat("/no/such/file")
    print(peers(reverse, 4))


def run_orders(mesh, process, processes):
    for units in (2, 9)[:: 1 - 2 * process]:
        print(peers(mesh, units))
        assert not MAPPED


def run_groups(mesh, process, processes):
    """Groups of devices decide together, and devices without a process here are not asked."""
    two = Mesh(mesh.devices.reshape(2, 2), ("y", "x"))
    with failing("cuMemCreate", Failed(2)) if process == 1 else contextlib.nullcontext():
        print(peers(two, 2))
    table = peers(two, 1)  # of all groups, in all processes
    print(table.tolist(), len(MAPPED))
    print(isinstance(peers(Mesh(mesh.devices[:2], ("x",)), 4), np.ndarray))
    mine = Mesh(np.array(jax.local_devices()), ("x",))
    print(isinstance(peers(mine, 8), np.ndarray))


def run_dies(mesh, process, processes):
    table, alone = peers(mesh, 1), peers(Mesh(np.array(jax.local_devices()), ("x",)), 1)
    peers(mesh, 2)  # all have come this far
    if process == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    own = table[0][2 * process :][:2]
    with contextlib.ExitStack() as stack:
        # The first GPU has stopped already, and takes no more calls.
        stack.enter_context(failing("cuStreamSynchronize", Failed(2)))
        print([aborted(address) for address in own])
    print([aborted(address, 0.0) for address in alone[0, :2]])


def run_ends(mesh, process, processes):
    peers(mesh, 1)
    child = os.fork()
    if child == 0:
        peer_memory._host.say_bye()  # as at the end of a process
        os._exit(0)
    os.waitpid(child, 0)
    table = peers(mesh, 2)
    print(isinstance(table, np.ndarray))
    if process == 1:
        peer_memory._host.say_bye()
        return
    print(aborted(table[0, 0]))


if __name__ == "__main__":
    job, process, processes, scenario = sys.argv[1], *map(int, sys.argv[2:4]), sys.argv[4]
    peer_memory._SLOW_S = 0.2
    logging.basicConfig(level=logging.INFO)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(job, processes, process)
    try:
        run(process, processes, scenario)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        if process == 0:
            sys.stdin.read()  # until the others have ended: the job's service is here
        os._exit(0)  # JAX would wait for a process that has died
