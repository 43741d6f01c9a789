"""Memory of this host's GPUs that kernels on all of them can write, between processes too.

Devices that exchange rows share a channel: a piece of memory on each of them, which CUDA's driver
makes. A process passes its pieces to the others of the host as file descriptors, over Unix sockets.
Every process maps every piece to the same addresses, which follow from the device's number and the
order of the channels: programs that hold them are the same in all runs, and can be cached. A
channel is made when a program that needs more room than there is is lowered, and stays.

All processes of a mesh lower the same programs in the same order. They meet here for each new size,
in rounds of `jax.distributed`'s key-value service: a process waits for one that is late, all raise
if they lower different programs, and all do without if one of them cannot have its memory. If a
process dies, its sockets close. Then the others write a word into the memory of their own GPUs, at
which kernels that wait stop with an error.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import hashlib
import itertools
import json
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterable, Sequence
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
      UnavailableError: there can be no such memory; raised in all processes of the mesh.
      TriaxError: another process of the mesh lowers another program, or has ended.
    """
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    along = [mesh.axis_names.index(name) for name in names]
    order = np.arange(mesh.size).reshape(mesh.devices.shape)
    order = np.moveaxis(order, along, range(-len(along), 0))
    order = order.reshape(-1, np.prod(order.shape[-len(along) :]))
    devices = mesh.devices.flat
    try:
        usable = set(jax.devices(devices[0].platform))
    except RuntimeError:  # no such platform here
        usable = set()
    if not usable.issuperset(devices):
        raise UnavailableError("the program is compiled for devices that this process cannot use")
    # Of few sizes: a program that needs more than there is adds a channel, and none ever goes.
    room = 1 << (-(-num_bytes // _UNIT) - 1).bit_length()
    rows = _host.rows([[devices[place] for place in places] for places in order], room)
    table = np.zeros((mesh.size, order.shape[1] + 1), np.int32)
    table[order] = np.array(rows)[:, None]
    return table


class _Chunk(NamedTuple):
    """The memory of a channel on one device."""

    device: int
    address: int
    size: int
    bus: str  # the PCI bus's name of the GPU, by which other processes know it
    handle: Any = None


class _Host:
    """The memory that this process has mapped, and the processes that it shares it with."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # What all processes of a mesh have: by its groups and room, or why there is none.
        self._rows: dict[Any, dict[int, list[list[int]] | str]] = {}
        self._channels: dict[tuple[int, ...], list[list[int]]] = {}  # by devices: rows of `peers`
        self._own: list[tuple[_Chunk, set[int]]] = []  # and the other processes that write to it
        self._free: dict[int, int] = {}  # the next address, by device
        self._contexts: dict[int, tuple[Any, Any]] = {}  # of own devices, each with a stream
        self._sockets: dict[int, socket.socket] = {}  # by process
        self._ended: set[int] = set()
        self._listener: Any = None
        self._rounds: dict[str, int] = {}  # how many, by processes

    def rows(self, groups: Sequence[Sequence[Any]], room: int) -> list[list[int]]:
        """Returns a row of `peers` for each group of devices, whose processes all call this."""
        ids = tuple(tuple(device.id for device in group) for group in groups)
        with self._lock:
            known = self._rows.setdefault(ids, {})
            for size, rows in sorted(known.items()):
                if size <= room if isinstance(rows, str) else size >= room:
                    break
            else:
                try:
                    rows = self._make(ids, groups, room)
                except UnavailableError as error:
                    rows = str(error)
                except ConnectionError as error:
                    raise TriaxError(
                        "A process of this job ended while others shared memory with it."
                    ) from error
                known[room] = rows
        if isinstance(rows, str):
            raise UnavailableError(rows)
        return rows

    def _make(self, ids: Any, groups: Sequence[Sequence[Any]], room: int) -> list[list[int]]:
        this = jax.process_index()
        members = [{device.process_index for device in group} for group in groups]
        processes = sorted(set().union(*members))
        if this not in processes:
            raise UnavailableError("this process has no device of the mesh")
        program = _digest([ids, room])
        here = self._listen() if len(processes) > 1 else ["", ""]
        said = self._round(processes, [program, *here])
        for process, (theirs, *_) in said.items():
            if theirs != program:
                raise TriaxError(
                    f"Process {process} lowers another program that exchanges rows between GPUs "
                    f"than process {this}. Lower such programs in the same order in all processes "
                    "of the mesh, and in one thread."
                )
        for some in members:
            hosts = {said[process][1] for process in some}
            if len(some) > 1 and (len(hosts) > 1 or "" in hosts):
                raise UnavailableError(
                    "the devices of the axis are on several hosts, or in several containers, or of "
                    "several users"
                )
        reasons, rows, made = [], {}, []
        new: list[_Chunk] = []
        try:
            for number, (key, group, some) in enumerate(zip(ids, groups, members, strict=True)):
                if this not in some:
                    continue
                fitting = (row for row in self._channels.get(key, []) if row[-1] >= room)
                if (row := next(fitting, None)) is None:
                    others, first = some - {this}, len(new)
                    self._connect({process: said[process][2] for process in others})
                    reasons.append(self._share(group, room, sorted(others), new))
                    places = {chunk.device: chunk.address // _UNIT for chunk in new[first:]}
                    row = [*(places.get(device, 0) for device in key), room]
                    made.append((key, row, new[first:], others))
                rows[number] = row
            said = self._round(processes, [next(filter(None, reasons), ""), [*rows.items()]])
            reason = next(filter(None, (reason for reason, _ in said.values())), "")
            if reason:
                raise UnavailableError(reason)
        except BaseException:
            for chunk in reversed(new):
                self._release(chunk)
            raise
        for key, row, chunks, others in made:
            self._channels.setdefault(key, []).append(row)
            self._own += [(chunk, others) for chunk in chunks if chunk.device in self._contexts]
            if others & self._ended:  # `_watch` may not have seen these chunks
                raise ConnectionResetError
        rows.update(row for _, theirs in said.values() for row in theirs)
        return [rows[number] for number in range(len(groups))]

    def _create(self, device: Any, size: int) -> _Chunk:
        """Makes memory of one of this process's devices."""
        cu = _driver()
        index = jax_private.local_index(device)
        start = _BASE + _STRIDE * device.id
        address = self._free.get(device.id, start)
        if device.id >= _MOST_DEVICES or address + size > start + _STRIDE or index is None:
            raise UnavailableError(
                f"{device} has no addresses for {size >> 20} MiB more: there are "
                f"{_STRIDE >> 30} GiB of them for each of the job's first {_MOST_DEVICES} devices"
            )
        if device.id not in self._contexts:
            context = _call("cuDevicePrimaryCtxRetain", _call("cuDeviceGet", index))
            self._contexts[device.id] = context, _in(context, "cuStreamCreate", 1)
        like = cu.CUmemAllocationProp()
        like.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        like.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        like.location.id = index
        like.requestedHandleTypes = _file_descriptor()
        handle = _call("cuMemCreate", size, like, 0)
        return _Chunk(device.id, address, size, _bus(index), handle)

    def _map(self, chunk: _Chunk, own: Sequence[Any]) -> None:
        """Maps memory for GPUs of this process."""
        cu = _driver()
        if chunk.device not in self._free:
            # All addresses at once: of a few megabytes the driver chooses the place itself.
            start = _BASE + _STRIDE * chunk.device
            reserved = int(_call("cuMemAddressReserve", _STRIDE, 0, start, 0))
            if reserved != start:
                _call("cuMemAddressFree", reserved, _STRIDE)
                raise UnavailableError(f"address {start:#x} is taken in a process")
        self._free[chunk.device] = chunk.address + chunk.size
        _call("cuMemMap", chunk.address, chunk.size, 0, chunk.handle, 0)
        access = []
        for device in own:
            entry = cu.CUmemAccessDesc()
            entry.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            entry.location.id = jax_private.local_index(device)
            entry.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            access.append(entry)
        _call("cuMemSetAccess", chunk.address, chunk.size, access, len(access))

    def _release(self, chunk: _Chunk) -> None:
        """Gives memory back that was made, and perhaps mapped."""
        for name, *arguments in (
            ("cuMemUnmap", chunk.address, chunk.size),
            ("cuMemRelease", chunk.handle),
        ):
            with contextlib.suppress(UnavailableError):
                _call(name, *arguments)
        if chunk.device in self._free:
            self._free[chunk.device] = chunk.address

    # --- other processes ----------------------------------------------------------

    def _round(self, processes: Sequence[int], value: Any) -> dict[int, Any]:
        """Tells other processes a value; returns what each says in the same round."""
        client = jax_private.key_value_client()
        if len(processes) == 1 or client is None:
            return dict.fromkeys(processes, value)
        group = _digest(processes)
        number = self._rounds[group] = self._rounds.get(group, 0) + 1
        path = f"triax/peers/{group}/{number}"
        client.set_first(f"{path}/{client.process}", json.dumps(value), 60_000)
        said = {}
        for process in processes:
            with _said_if_slow(f"process {process} has not lowered this program"):
                while (text := client.find(f"{path}/{process}")) is None:
                    if process in self._ended:
                        raise ConnectionResetError
                    time.sleep(0.02)
            said[process] = json.loads(text)
        return said

    def _listen(self) -> list[str]:
        """Returns this process's host, and the address of its socket there; "" if it has none."""
        try:
            # An abstract socket can be called from its own network namespace.
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            host = f"{boot} {os.readlink('/proc/self/ns/net')} {os.geteuid()}"
            if self._listener is None:
                listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                listener.bind(b"\0triax-" + os.urandom(16).hex().encode())
                listener.listen()
                self._listener = listener
                atexit.register(lambda: _host.say_bye())
            return [host, self._listener.getsockname().decode()]
        except OSError:
            return ["", ""]

    def _connect(self, addresses: dict[int, str]) -> None:
        """Opens a socket to each process, of which the one with the higher number calls."""
        for process, address in addresses.items():
            if process < jax.process_index() and process not in self._sockets:
                called = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                called.connect(address.encode())
                called.sendall(str(jax.process_index()).encode())
                self._add(process, called)
        while missing := addresses.keys() - self._sockets.keys():
            with _said_if_slow(f"process {min(missing)} has not connected"):
                caller, _ = self._listener.accept()
            if _credentials(caller)[1] == os.geteuid():
                self._add(int(caller.recv(64)), caller)

    def _add(self, process: int, connection: socket.socket) -> None:
        self._sockets[process] = connection
        threading.Thread(target=self._watch, args=(process, connection), daemon=True).start()

    def say_bye(self) -> None:
        for connection in self._sockets.values():
            with contextlib.suppress(OSError):
                connection.sendall(_BYE)

    def close(self) -> None:
        for connection in filter(None, (*self._sockets.values(), self._listener)):
            connection.close()

    def _share(
        self, group: Sequence[Any], room: int, others: Sequence[int], new: list[_Chunk]
    ) -> str:
        """Makes the memory of a group of devices, together with other processes; adds it to `new`.

        Returns why some of it is missing, or "". All processes tell each other what they have.
        """
        own = [device for device in group if device.process_index == jax.process_index()]
        indices = [jax_private.local_index(device) for device in own]
        chunks, fds, reason = [], [], ""
        try:
            _check_atomics(itertools.permutations(indices, 2))
            for device in own:
                chunk = self._create(device, (1 + 2 * room) * _UNIT)
                new.append(chunk)
                self._map(chunk, own)
                context, stream = self._contexts[device.id]
                _in(context, "cuMemsetD8Async", chunk.address, 0, _UNIT, stream)
                _in(context, "cuStreamSynchronize", stream)
                chunks.append(chunk)
            for chunk in chunks if others else []:
                fds.append(
                    int(_call("cuMemExportToShareableHandle", chunk.handle, _file_descriptor(), 0))
                )
        except UnavailableError as error:
            reason = str(error)
        message = json.dumps([] if reason else [chunk[:-1] for chunk in chunks]).encode()
        for process in others:
            socket.send_fds(self._sockets[process], [message], [] if reason else fds)
        for fd in fds:
            os.close(fd)
        for process in others:
            message, fds = self._receive(process)
            places = json.loads(message)
            if len(fds) < len(places):
                reason = f"process {jax.process_index()} can have no more file descriptors"
            for place, fd in zip(places, fds, strict=False):
                try:
                    handle = _call("cuMemImportFromShareableHandle", fd, _file_descriptor())
                    new.append(_Chunk(*place, handle))
                    self._map(new[-1], own)
                    _check_atomics((index, _ordinal(new[-1].bus)) for index in indices)
                except UnavailableError as error:
                    reason = str(error)
                os.close(fd)
        return reason

    def _receive(self, process: int) -> tuple[bytes, list[int]]:
        with _said_if_slow(f"process {process} has not made its memory"):
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
        level = logging.ERROR
        with contextlib.suppress(OSError):
            if connection.recv(len(_BYE), socket.MSG_PEEK | socket.MSG_DONTWAIT) == _BYE:
                level = logging.INFO
                time.sleep(1)  # at the end of a job this process ends, too
        self._ended.add(process)
        logger.log(
            level,
            "process %d of this job has ended: programs that exchange rows with it stop with "
            "CUDA_ERROR_LAUNCH_FAILED",
            process,
        )
        one = array.array("i", [1])
        for chunk, others in list(self._own):
            context, stream = self._contexts[chunk.device]
            target = chunk.address + 4 * PLACES["ABORT"]
            # A GPU whose kernels have stopped takes no calls any more.
            with contextlib.suppress(UnavailableError):
                if process in others:
                    source = one.buffer_info()[0]
                    _in(context, "cuMemcpyHtoDAsync", target, source, 4, stream)
                    _in(context, "cuStreamSynchronize", stream)


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


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
    try:
        status, *results = getattr(_driver(), name)(*arguments)
    except RuntimeError as error:  # the driver is not installed, or too old
        raise UnavailableError(f"{name}: {error}") from error
    if int(status):
        raise UnavailableError(f"{name}: {status.name}")
    return results[0] if results else None


def _bus(index: int) -> str:
    with contextlib.suppress(UnavailableError):
        return str(_call("cuDeviceGetPCIBusId", 16, index).split(b"\0")[0].decode())
    return ""


def _ordinal(bus: str) -> int | None:
    """Returns the driver's ordinal of a GPU; None if this process does not see it."""
    with contextlib.suppress(UnavailableError):
        return int(_call("cuDeviceGetByPCIBusId", bus.encode()))
    return None


def _check_atomics(pairs: Iterable[tuple[Any, Any]]) -> None:
    """Raises if GPUs cannot run atomics on each other's memory, as kernels do."""
    for pair in pairs:
        kind = _driver().CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
        is_known = None not in pair and pair[0] != pair[1]
        if is_known and not int(_call("cuDeviceGetP2PAttribute", kind, *pair)):
            raise UnavailableError(f"GPUs {pair[0]} and {pair[1]} are not connected by NVLink")


def _in(context: Any, name: str, *arguments: Any) -> Any:
    """Calls the driver with a context, and restores the thread's own."""
    _call("cuCtxPushCurrent", context)
    try:
        return _call(name, *arguments)
    finally:
        _call("cuCtxPopCurrent")


_host = _Host()


def _renew() -> None:
    """Replaces the host in a forked child, in whose name nobody may speak over the sockets."""
    global _host
    _host.close()
    _host = _Host()


os.register_at_fork(after_in_child=_renew)
