"""The GPUs that the driver reports, as its tool prints them."""

import pytest

from triax import devices


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
