"""Processes share memory with each other, also if one is late, cannot, or dies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import jobs

ROOT = Path(__file__).parents[2]


def job(scenario, processes=2):
    """What each process printed, and its errors."""
    with jobs.address() as address:
        return _run(address, scenario, processes)


def _run(address, scenario, processes):
    script = str(Path(__file__).with_name("peer_process.py"))
    flags = "--xla_force_host_platform_device_count=1"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "XLA_FLAGS": flags}
    started = [
        subprocess.Popen(
            [sys.executable, script, address, str(process), str(processes), scenario],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(processes)
    ]
    try:
        return [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()


@pytest.mark.slow("processes that import JAX")
@pytest.mark.parametrize("processes", [2, 3])
def test_all_processes_write_to_all_memory(processes):
    for found, errors in job("", processes):
        lines = found.splitlines()
        assert lines[0] == f"{[*range(1, processes + 1)]} 2 3", errors
        assert lines[1] == f"{2 * processes} True"  # two channels


@pytest.mark.slow("processes that import JAX")
def test_a_process_that_is_late_is_waited_for():
    (_, errors), (found, _) = job("late")
    assert "[1, 2]" in found
    assert "process 1 has not" in errors


@pytest.mark.slow("processes that import JAX")
def test_what_one_cannot_no_process_does():
    for found, errors in job("full"):
        assert found == "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY\n", errors


@pytest.mark.slow("processes that import JAX")
def test_kernels_that_wait_for_a_dead_process_are_stopped():
    (found, errors), _ = job("dies")
    assert found.endswith("abort 1\n"), errors
    assert "process 1 of this job has ended" in errors


def test_the_peers_of_each_device_on_a_mesh_of_two_axes(monkeypatch):
    import jax
    from jax.sharding import Mesh

    from triax.compat import peer_memory

    made = []

    def channel(members, room):
        made.append([device.id for device in members])
        addresses = {device.id: (device.id + 1) * peer_memory.PLACES["UNIT"] for device in members}
        return peer_memory._Channel(addresses, room)

    monkeypatch.setattr(peer_memory._host, "channel", channel)
    devices = np.array(jax.devices()[:8]).reshape(2, 4)[:, ::-1]
    peers = peer_memory.peers(Mesh(devices, ("a", "b")), "b", 100)
    assert made == [[3, 2, 1, 0], [7, 6, 5, 4]]
    assert peers.tolist() == [[4, 3, 2, 1, 1]] * 4 + [[8, 7, 6, 5, 1]] * 4
    peers = peer_memory.peers(Mesh(devices, ("a", "b")), ("b", "a"), 100)
    assert made[2:] == [[device.id for device in devices.T.flat]]
    assert peers.tolist() == [[*(device.id + 1 for device in devices.T.flat), 1]] * 8


@pytest.mark.parametrize("linked", [0, 1])
def test_gpus_of_one_process_without_nvlink(monkeypatch, linked):
    from types import SimpleNamespace

    from triax.compat import peer_memory

    asked = []
    kinds = SimpleNamespace(CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED="atomics")
    ask = lambda *given: asked.append(given) or (0, linked)
    driver = SimpleNamespace(CUdevice_P2PAttribute=kinds, cuDeviceGetP2PAttribute=ask)
    monkeypatch.setattr(peer_memory, "_driver", lambda: driver)
    if linked:
        peer_memory._check_atomics([0, 2])
        assert asked == [("atomics", 0, 2), ("atomics", 2, 0)]
    else:
        with pytest.raises(peer_memory.UnavailableError, match="GPUs 0 and 2 are not connected"):
            peer_memory._check_atomics([0, 2])
