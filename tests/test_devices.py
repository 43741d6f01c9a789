"""The GPUs that the driver reports, as its tool prints them, and those that programs are for."""

from types import SimpleNamespace

import pytest

from triax import devices
from triax.devices import Device
from triax.errors import ArgumentValueError, UnsupportedError


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 'NVIDIA H200, 570.1\nNVIDIA H200, 570.1'", [("NVIDIA H200", "570.1")] * 2),
        ("echo 'No devices were found'", []),
        ("echo 'NVIDIA-SMI has failed'; exit 9", []),
    ],
)
def test_reported_by_driver(tmp_path, monkeypatch, script, expected):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert devices.reported_by_driver() == expected


def test_no_driver(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert devices.reported_by_driver() == []


# --- the GPU whose configs a program takes --------------------------------------------------


def a_gpu(name, capability, process=0):
    return SimpleNamespace(
        platform="gpu",
        device_kind=name,
        compute_capability=capability,
        process_index=process,
        local_hardware_id=3,
    )


H100, A100, FAR = a_gpu("H100", "9.0"), a_gpu("A100", "8.0"), a_gpu("H100", "9.0", process=1)


@pytest.fixture
def target(monkeypatch):
    """The architecture of a program, and the GPU whose configs it takes."""

    def target(here, *, exporting=False, given=None, **environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        devices._say_ignored.cache_clear()
        monkeypatch.setattr(devices.jax_private, "lowering_devices", lambda ctx: here)
        monkeypatch.setattr(devices.jax_private, "exported_platforms", lambda ctx: exporting)
        found = devices.gpus(None)
        capability = devices.compute_capability("k", given, found)
        return capability, devices.for_tuning(None, found, capability)

    return target


def test_a_program_that_runs_here_takes_the_configs_of_the_gpu_here(target, caplog):
    expected = (90, Device(3, "H100"))
    assert target([H100]) == target([H100], TRIAX_GPU="H100") == expected
    assert caplog.text == ""
    assert target([H100], TRIAX_GPU="A100", TRIAX_CUDA_ARCH="80") == expected
    assert "TRIAX_GPU is 'A100', but programs that run here use the tuned configs" in caplog.text


def test_an_exported_program_takes_those_of_the_gpu_that_is_named(target, caplog):
    assert target([H100], exporting=True) == (90, Device(3, "H100", measurable=False))
    assert target([H100], exporting=True, TRIAX_GPU="H100") == (90, Device(3, "H100", False))
    with pytest.raises(ArgumentValueError, match=r"no A100 here to take the arch.*_ARCH"):
        target([H100], exporting=True, TRIAX_GPU="A100")
    expected = (80, Device(-1, "A100", measurable=False))
    assert target([H100], exporting=True, given=80) == expected
    assert target([H100], exporting=True, TRIAX_CUDA_ARCH="80") == expected
    assert caplog.text == ""


def test_the_setting_decides_for_gpus_of_several_architectures(target):
    with pytest.raises(UnsupportedError, match=r"80, 90 at once\. Set TRIAX_CUDA_ARCH to the low"):
        target([H100, A100])
    assert target([H100, A100], given=80) == (80, Device(3, "A100"))
    assert target([H100, A100], TRIAX_CUDA_ARCH="80") == (80, Device(3, "A100"))


def test_so_does_one_for_a_gpu_that_is_not_here(target):
    assert target([], TRIAX_CUDA_ARCH="90") == (90, None)
    named = Device(-1, "H100", measurable=False)
    assert target([], TRIAX_GPU="H100") == (90, named)
    assert target([FAR]) == target([A100], given=90) == (90, named)
