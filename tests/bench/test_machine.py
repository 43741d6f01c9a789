"""What is told of a machine."""

import subprocess
from types import SimpleNamespace

import jax
import pytest

from triax.bench import machine


def device(**attributes):
    return SimpleNamespace(**{"device_kind": "NVIDIA H200", "platform": "gpu", **attributes})


@pytest.fixture
def one_gpu(monkeypatch):
    stats = {"bytes_limit": 100}
    monkeypatch.setattr(jax, "devices", lambda: [device(memory_stats=lambda: stats)])
    monkeypatch.setattr(machine, "is_cuda", lambda device: True)
    return stats


@pytest.fixture
def tool(monkeypatch):
    """Stands in for nvidia-smi."""
    monkeypatch.setattr(machine.shutil, "which", lambda name: f"/bin/{name}")

    def use(run):
        monkeypatch.setattr(machine.subprocess, "run", run)

    return use


def test_versions_are_those_installed():
    found = machine.versions()
    assert found["jax"] == jax.__version__
    assert {"triax", "python", "jaxlib"} <= set(found)
    assert None not in found.values()


@pytest.mark.usefixtures("one_gpu")
def test_a_gpu(tool):
    tool(lambda command, **how: SimpleNamespace(stdout="580.1\n580.1\n"))
    found = machine.describe()
    assert found["platform"] == "cuda"
    assert found["device"] == "NVIDIA H200"
    assert found["driver"] == "580.1"
    assert found["host_cores"] >= 1


@pytest.mark.usefixtures("one_gpu")
def test_a_driver_that_nobody_tells(tool, monkeypatch):
    def fail(command, **how):
        raise subprocess.CalledProcessError(9, command)

    tool(fail)
    assert machine.describe()["driver"] is None
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    assert machine.describe()["driver"] is None


def test_memory(one_gpu):
    assert machine.memory_limit_bytes() == 92
    del one_gpu["bytes_limit"]
    assert machine.memory_limit_bytes() is None
