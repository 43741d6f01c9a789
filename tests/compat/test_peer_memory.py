"""Processes share memory with each other, also if one is late, cannot, or dies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from tests import jobs
from triax.compat import peer_memory

ROOT = Path(__file__).parents[2]


def job(scenario, processes=2, devices=1):
    """What each process printed, in lines, and its errors."""
    with jobs.address() as address:
        return [
            (found.splitlines(), errors)
            for found, errors in _run(address, scenario, processes, devices)
        ]


def _run(address, scenario, processes, devices):
    script = str(Path(__file__).with_name("peer_process.py"))
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "XLA_FLAGS": flags}
    started = [
        subprocess.Popen(
            [sys.executable, script, address, str(process), str(processes), scenario],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(processes)
    ]
    try:
        # The first has the job's service, and ends last: when its input does.
        return [process.communicate(timeout=120) for process in started[::-1]][::-1]
    finally:
        for process in started:
            process.kill()


SLOW = pytest.mark.slow("processes that import JAX")


@SLOW
@pytest.mark.parametrize("processes", [2, 3])
def test_all_processes_write_to_all_memory(processes):
    found = job("writes", processes)
    for lines, errors in found:
        # Two channels.
        wanted = [f"{[*range(1, processes + 1)]} 2 4", f"{2 * processes} True"]
        assert lines == wanted, errors
    assert "process 1 has not lowered this program for 0.2 s" in found[0][1]


@SLOW
def test_what_one_process_cannot_no_process_does():
    why = "UnavailableError: {}: CUDA_ERROR_OUT_OF_MEMORY"
    for lines, errors in job("fails"):
        assert len(lines) == 9
        assert lines[:7] == [
            why.format("cuMemCreate"),
            why.format("cuMemSetAccess"),
            why.format("cuMemExportToShareableHandle"),
            why.format("cuMemImportFromShareableHandle"),
            "UnavailableError: cuMemMap: no libcuda",
            why.format("cuDeviceGetP2PAttribute"),
            "UnavailableError: process 1 can have no more file descriptors",
        ], errors
        for line in lines[7:]:
            assert "several hosts, or in several containers, or of several users" in line


@SLOW
def test_processes_that_lower_programs_in_another_order_are_told():
    for process, (lines, errors) in enumerate(job("orders")):
        assert len(lines) == 2, errors
        for line in lines:
            assert line.startswith(f"TriaxError: Process {1 - process} lowers another program")
            assert "Lower such programs in the same order in all processes" in line


@SLOW
def test_groups_of_an_axis_decide_together():
    (one, errors), (two, _) = job("groups", devices=2)
    assert one[0] == "UnavailableError: cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY", errors
    assert one[:2] == two[:2]
    assert one[2:] == ["True", "True"]
    assert two[2:] == ["False", "True"]


@SLOW
def test_kernels_that_wait_for_a_dead_process_are_stopped():
    """On all GPUs, also if the first takes no more calls, but no others."""
    (lines, errors), _ = job("dies", devices=2)
    assert lines == ["[True, True]", "[False, False]"], errors
    assert "ERROR:triax.compat.peer_memory:process 1 of this job has ended" in errors


@SLOW
def test_a_process_that_ends_and_a_child_that_ends():
    (lines, errors), (others, _) = job("ends")
    assert lines == ["True", "True"], errors
    assert others == ["True"]
    assert "INFO:triax.compat.peer_memory:process 1 of this job has ended" in errors


def test_the_peers_of_each_device_on_a_mesh_of_two_axes(monkeypatch):
    made = []

    def rows(groups, room):
        made.extend([device.id for device in group] for group in groups)
        return [[*(device.id + 1 for device in group), room] for group in groups]

    monkeypatch.setattr(peer_memory._host, "rows", rows)
    devices = np.array(jax.devices()[:8]).reshape(2, 4)[:, ::-1]
    peers = peer_memory.peers(Mesh(devices, ("a", "b")), "b", 100)
    assert made == [[3, 2, 1, 0], [7, 6, 5, 4]]
    assert peers.tolist() == [[4, 3, 2, 1, 1]] * 4 + [[8, 7, 6, 5, 1]] * 4
    peers = peer_memory.peers(Mesh(devices, ("a", "b")), ("b", "a"), 100)
    assert made[2:] == [[device.id for device in devices.T.flat]]
    assert peers.tolist() == [[*(device.id + 1 for device in devices.T.flat), 1]] * 8


def test_devices_that_a_program_is_only_compiled_for():
    for platform in ("cpu", "nowhere"):
        devices = np.array([mock.Mock(id=i, platform=platform) for i in range(2)])
        mesh = SimpleNamespace(devices=devices, size=2, axis_names=("a",))
        with pytest.raises(peer_memory.UnavailableError, match="this process cannot use"):
            peer_memory.peers(mesh, "a", 1)


def test_rooms_are_few(monkeypatch):
    rooms = []
    monkeypatch.setattr(
        peer_memory._host, "_make", lambda *given: rooms.append(given[-1]) or [[1, 1]]
    )
    monkeypatch.setattr(peer_memory._host, "_rows", {})
    mesh = Mesh(np.array(jax.devices()[:1]), ("a",))
    for units in (1, 3, 4, 2, 5, 8, 7, 9):
        peer_memory.peers(mesh, "a", units * peer_memory.PLACES["UNIT"] - 1)
    assert rooms == [1, 4, 8, 16]


@pytest.mark.parametrize("linked", [0, 1])
def test_gpus_of_one_process_without_nvlink(monkeypatch, linked):
    asked = []
    kinds = SimpleNamespace(CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED="atomics")
    ask = lambda *given: asked.append(given) or (0, linked)
    driver = SimpleNamespace(CUdevice_P2PAttribute=kinds, cuDeviceGetP2PAttribute=ask)
    monkeypatch.setattr(peer_memory, "_driver", lambda: driver)
    if linked:
        peer_memory._check_atomics([(0, 2), (2, 0), (0, None), (2, 2)])
        assert asked == [("atomics", 0, 2), ("atomics", 2, 0)]
    else:
        with pytest.raises(peer_memory.UnavailableError, match="GPUs 0 and 2 are not connected"):
            peer_memory._check_atomics([(0, 2), (2, 0), (0, None), (2, 2)])
