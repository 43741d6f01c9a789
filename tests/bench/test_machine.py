"""What is told of a machine."""

import datetime
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


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes"), True),
        (RuntimeError("RESOURCE_EXHAUSTED: Shared memory size limit exceeded"), False),
        (RuntimeError("INTERNAL: cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY: out of memory"), True),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA: tried to allocate 2 GiB"), True),
        (ValueError("no such function"), False),
        ("RESOURCE_EXHAUSTED: Failed to allocate request for 5.2GiB", True),
    ],
)
def test_out_of_memory(error, expected):
    assert machine.is_out_of_memory(error) is expected


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(128.4e9, "128 GB"), (1.54e9, "1.5 GB"), (0.117e9, "0.12 GB"), (2e6, "0.002 GB")],
)
def test_gigabytes(num_bytes, text):
    assert machine.gigabytes(num_bytes) == text


def test_memory(one_gpu):
    assert machine.memory_limit_bytes() == 92
    del one_gpu["bytes_limit"]
    assert machine.memory_limit_bytes() is None


def test_records_have_the_time_in_utc_to_the_second():
    told = datetime.datetime.strptime(machine.now(), "%Y-%m-%dT%H:%M:%SZ")
    age = datetime.datetime.now(datetime.UTC).replace(tzinfo=None) - told
    assert datetime.timedelta(0) <= age < datetime.timedelta(minutes=1)
