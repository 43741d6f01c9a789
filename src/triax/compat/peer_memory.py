"""Memory of this host's GPUs that kernels on all of them can write, between processes too.

Devices that exchange rows share a channel: a piece of memory on each of them, which CUDA's driver
makes. A process passes its pieces to the others of the host as file descriptors, over Unix sockets.
Every process maps every piece to the same addresses, which follow from the device's number and the
order of the channels: programs that hold them are the same in all runs, and can be cached. A
channel is made when a program that needs more room than there is is lowered, and stays.

All processes of a job lower the same programs in the same order, so they meet here without further
agreement; a process waits for one that is late. If one dies, its sockets close. Then the others
write a word into the memory of their own GPUs, at which kernels that wait stop with an error.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import itertools
import json
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from triax.compat import jax_private
from triax.errors import TriaxError

logger = logging.getLogger(__name__)

# Of each device, 64 GiB of addresses from 16 TiB on, below all that Linux, CUDA and JAX choose.
_BASE, _STRIDE, _MOST_DEVICES = 1 << 44, 1 << 36, 1024
_UNIT = 1 << 21  # the header's bytes; CUDA's driver makes memory in multiples of it
_BYE = b"bye"  # the last message of a process that was not killed
_SLOW_S = 10.0  # a wait that is longer is logged

PLACES = {
    "UNIT": _UNIT,
    "EPOCH": 0,
    "ABORT": 32,
    "ENDED": 64,
    "BUSY": 96,
    "COME": 128,
    "FLAGS": 1 << 16,
    "MOST_FLAGS": 1 << 17,
    "SPACING": 32,
}
"""Where kernels find what in a channel: words of 32 bits in the unit of bytes before the rows."""


class UnavailableError(Exception):
    """The memory cannot be made; says why."""


def peers(mesh: Any, axis_name: Any, num_bytes: int) -> np.ndarray:
    """Makes channels with room for `num_bytes`, twice, for all devices that share an axis.

    Returns:
      int32 [mesh.size, devices of the axis + 1]: for each device of the mesh, the addresses of the
      devices along its axis, and the room of each of the two parts for rows; all in units.

    Raises:
      UnavailableError: there can be no such memory; raised in all processes that share the axis.
    """
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    along = [mesh.axis_names.index(name) for name in names]
    others = [i for i in range(mesh.devices.ndim) if i not in along]
    count = int(np.prod([mesh.devices.shape[i] for i in along]))
    order = np.arange(mesh.size).reshape(mesh.devices.shape).transpose(*others, *along)
    devices = list(mesh.devices.flat)
    this = jax.process_index()
    table = np.zeros((mesh.size, count + 1), np.int32)
    elsewhere = []
    for places in order.reshape(-1, count):
        group = [devices[place] for place in places]
        if all(device.process_index != this for device in group):
            elsewhere.append((places, group))
            continue
        channel = _host.channel(group, -(-num_bytes // _UNIT))
        table[places, :-1] = [channel.addresses[device.id] // _UNIT for device in group]
        table[places, -1] = channel.room
        offset = channel.addresses[group[0].id] - _start(group[0].id)
    for places, group in elsewhere:
        # Nobody reads these here. They are what they are if all devices made the same channels, so
        # that all processes have the same program.
        table[places, :-1] = [(_start(device.id) + offset) // _UNIT for device in group]
        table[places, -1] = channel.room
    return table


def _start(device: int) -> int:
    """Returns the first of a device's addresses."""
    return _BASE + _STRIDE * device


class _Chunk(NamedTuple):
    """The memory of a channel on one device."""

    device: int
    offset: int
    size: int
    handle: Any

    @property
    def address(self) -> int:
        return _start(self.device) + self.offset


class _Channel(NamedTuple):
    addresses: dict[int, int]  # by device
    room: int  # units


class _Host:
    """The memory that this process has mapped, and the processes that it shares it with."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channels: dict[tuple[int, ...], list[_Channel] | str] = {}  # or why there are none
        self._own: list[_Chunk] = []
        self._used: dict[int, int] = {}  # bytes of addresses, by device
        self._contexts: dict[int, tuple[Any, Any]] = {}  # of own devices, each with a stream
        self._sockets: dict[int, socket.socket] = {}  # by process
        self._listener: socket.socket | None = None

    def channel(self, devices: Sequence[Any], room: int) -> _Channel:
        """Returns a channel of devices, made together with the processes that they belong to."""
        key = tuple(device.id for device in devices)
        with self._lock:
            channels = self._channels.setdefault(key, [])
            if isinstance(channels, str):
                raise UnavailableError(channels)
            for channel in channels:
                if channel.room >= room:
                    return channel
            try:
                channel = self._make(devices, room)
            except UnavailableError as error:
                self._channels[key] = str(error)
                raise
            except ConnectionError as error:
                raise TriaxError(
                    "A process of this job ended while others shared memory with it."
                ) from error
            channels.append(channel)
            return channel

    def _make(self, devices: Sequence[Any], room: int) -> _Channel:
        this = jax.process_index()
        own = [device for device in devices if device.process_index == this]
        processes = sorted({device.process_index for device in devices} - {this})
        self._connect(processes)
        chunks: list[_Chunk] = []
        reason = ""
        try:
            _check_atomics([jax_private.local_index(device) for device in own])
            for device in own:
                chunks.append(self._allocate(device, (1 + 2 * room) * _UNIT))
        except UnavailableError as error:
            reason = str(error)
        chunks += self._share(processes, chunks, own[0], reason)
        return _Channel({chunk.device: chunk.address for chunk in chunks}, room)

    def _allocate(self, device: Any, size: int) -> _Chunk:
        """Makes and maps memory of one of this process's devices."""
        cu = _driver()
        index = jax_private.local_index(device)
        offset = self._used.get(device.id, 0)
        if device.id >= _MOST_DEVICES or offset + size > _STRIDE or index is None:
            raise UnavailableError(
                f"{size} bytes more on {device} are more than the addresses allow, which are for "
                f"{_MOST_DEVICES} devices of {_STRIDE} bytes"
            )
        if device.id not in self._contexts:
            context = _call("cuDevicePrimaryCtxRetain", _call("cuDeviceGet", index))
            self._contexts[device.id] = context, _in(context, "cuStreamCreate", 1)
        like = cu.CUmemAllocationProp()
        like.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        like.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        like.location.id = index
        like.requestedHandleTypes = _file_descriptor()
        recommended = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        unit = int(_call("cuMemGetAllocationGranularity", like, recommended))
        size = -(-size // unit) * unit
        chunk = _Chunk(device.id, offset, size, _call("cuMemCreate", size, like, 0))
        self._map(chunk, device)
        context, _ = self._contexts[device.id]
        _in(context, "cuMemsetD8", chunk.address, 0, _UNIT)
        _in(context, "cuCtxSynchronize")
        self._own.append(chunk)
        return chunk

    def _map(self, chunk: _Chunk, own: Any) -> None:
        """Maps memory for all GPUs of this process, of which `own` is one."""
        cu = _driver()
        start = _start(chunk.device)
        # All addresses at once: of a few megabytes the driver chooses the place itself.
        is_reserved = chunk.device in self._used or start == int(
            _call("cuMemAddressReserve", _STRIDE, 0, start, 0)
        )
        if not is_reserved:
            raise UnavailableError(f"address {start:#x} is taken in process {jax.process_index()}")
        self._used[chunk.device] = chunk.offset + chunk.size
        _call("cuMemMap", chunk.address, chunk.size, 0, chunk.handle, 0)
        access = []
        for device in own.client.local_devices():
            entry = cu.CUmemAccessDesc()
            entry.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            entry.location.id = jax_private.local_index(device)
            entry.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            access.append(entry)
        _call("cuMemSetAccess", chunk.address, chunk.size, access, len(access))

    # --- other processes ----------------------------------------------------------

    def _connect(self, processes: Sequence[int]) -> None:
        """Opens a socket to each process, of which the one with the higher number calls."""
        client = jax_private.key_value_client()
        if not processes or client is None:
            return
        # An abstract socket can be called from its own network namespace.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        host = f"{boot} {os.readlink('/proc/self/ns/net')}"
        if self._listener is None:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._listener.bind(b"\0triax-" + os.urandom(16).hex().encode())
            self._listener.listen()
            atexit.register(self._say_bye)
            here = json.dumps([host, self._listener.getsockname().decode()])
            client.set_first(_key(client.process), here, 60_000)
        places = {}
        for process in processes:
            with _said_if_slow(f"process {process} has not come to its first exchange"):
                while (found := client.find(_key(process))) is None:
                    time.sleep(0.02)
            places[process] = json.loads(found)
        if any(place[0] != host for place in places.values()):
            raise UnavailableError("the devices of the axis are on several hosts, or containers")
        for process in processes:
            if process < client.process and process not in self._sockets:
                called = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                called.connect(places[process][1].encode())
                called.sendall(str(client.process).encode())
                self._add(process, called)
        while any(process not in self._sockets for process in processes):
            caller, _ = self._listener.accept()
            if _credentials(caller)[1] == os.getuid():
                self._add(int(caller.recv(64)), caller)

    def _say_bye(self) -> None:
        for connection in self._sockets.values():
            with contextlib.suppress(OSError):
                connection.sendall(_BYE)

    def _add(self, process: int, connection: socket.socket) -> None:
        self._sockets[process] = connection
        threading.Thread(target=self._watch, args=(process, connection), daemon=True).start()

    def _share(
        self, processes: Sequence[int], chunks: Sequence[_Chunk], own: Any, reason: str
    ) -> list[_Chunk]:
        """Gives all processes this one's chunks; maps theirs, and returns them.

        Raises in all of them if one has failed, this one for a `reason`.
        """
        theirs = []
        for process in processes:
            fds = [int(_call("cuMemExportToShareableHandle", c.handle, _file_descriptor(), 0))
                   for c in chunks]  # fmt: skip
            message = json.dumps([chunk[:3] for chunk in chunks]).encode()
            socket.send_fds(self._sockets[process], [message], fds)
            for fd in fds:
                os.close(fd)
        for process in processes:
            message, fds = self._receive(process)
            for place, fd in zip(json.loads(message), fds, strict=True):
                try:
                    handle = _call("cuMemImportFromShareableHandle", fd, _file_descriptor())
                    theirs.append(_Chunk(*place, handle))
                    self._map(theirs[-1], own)
                except UnavailableError as error:
                    reason = str(error)
                os.close(fd)
        for process in processes:
            self._sockets[process].sendall(reason.encode() or b"\0")
        reasons = [reason]
        for process in processes:
            reasons.append(self._receive(process)[0].strip(b"\0").decode())
        if any(reasons):
            raise UnavailableError(next(filter(None, reasons)))
        return theirs

    def _receive(self, process: int) -> tuple[bytes, list[int]]:
        with _said_if_slow(f"process {process} has not lowered this program"):
            message, fds, _, _ = socket.recv_fds(self._sockets[process], 1 << 16, 250)
        if message in (b"", _BYE):
            raise ConnectionResetError
        return message, list(fds)

    def _watch(self, process: int, connection: socket.socket) -> None:
        """Waits for a process to end, and then stops the kernels that wait for it."""
        ends = select.poll()
        ends.register(connection, select.POLLRDHUP)
        # A child of that process may keep its socket open.
        with contextlib.suppress(OSError):
            ends.register(os.pidfd_open(_credentials(connection)[0]), select.POLLIN)
        ends.poll()
        with contextlib.suppress(OSError):
            if connection.recv(len(_BYE), socket.MSG_PEEK | socket.MSG_DONTWAIT) == _BYE:
                time.sleep(1)  # at the end of a job this process ends, too
        logger.error(
            "process %d of this job has ended: programs that exchange rows with it stop with "
            "CUDA_ERROR_LAUNCH_FAILED",
            process,
        )
        one = array.array("i", [1])
        for chunk in list(self._own):
            context, stream = self._contexts[chunk.device]
            target = chunk.address + 4 * PLACES["ABORT"]
            _in(context, "cuMemcpyHtoDAsync", target, one.buffer_info()[0], 4, stream)
            _in(context, "cuStreamSynchronize", stream)


def _key(process: int) -> str:
    return f"triax/peers/{process}"


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    """Returns the other side's process, user and group."""
    size = struct.calcsize("3i")
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))


@contextlib.contextmanager
def _said_if_slow(what: str) -> Any:
    timer = threading.Timer(_SLOW_S, logger.warning, (f"{what} for {_SLOW_S:g} s: waiting for it",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# --- the driver ---------------------------------------------------------------------


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise UnavailableError(f"cuda-bindings cannot be imported: {error}") from error
    return driver


def _file_descriptor() -> Any:
    return _driver().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _call(name: str, *arguments: Any) -> Any:
    status, *results = getattr(_driver(), name)(*arguments)
    if int(status):
        raise UnavailableError(f"{name}: {status.name}")
    return results[0] if results else None


def _check_atomics(indices: Sequence[Any]) -> None:
    """Raises if GPUs of this process cannot run atomics on each other's memory, as kernels do."""
    for pair in itertools.permutations(indices, 2):
        kind = _driver().CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
        if not int(_call("cuDeviceGetP2PAttribute", kind, *pair)):
            raise UnavailableError(f"GPUs {pair[0]} and {pair[1]} are not connected by NVLink")


def _in(context: Any, name: str, *arguments: Any) -> Any:
    """Calls the driver with a context, and restores the thread's own."""
    _call("cuCtxPushCurrent", context)
    try:
        return _call(name, *arguments)
    finally:
        _call("cuCtxPopCurrent")


_host = _Host()
