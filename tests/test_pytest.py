"""What pyproject.toml tells pytest."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PLUGIN = """
import warnings

def pytest_configure(config):
    warnings.warn("benchmarks are disabled")
"""
TESTS = """
import warnings

def test_of_ours():
    warnings.warn("ours")

def test_another():
    pass
"""


@pytest.mark.slow("its processes take seconds")
def test_plugins_may_warn_and_we_may_not(tmp_path):
    """As pytest-benchmark does beside pytest-xdist, and pytest-asyncio, if they are installed."""
    (tmp_path / "pytest_other.py").write_text(PLUGIN)
    (tmp_path / "test_it.py").write_text(TESTS)
    settings = Path(__file__).parents[1] / "pyproject.toml"
    command = [sys.executable, "-m", "pytest", "-c", settings, "-p", "pytest_other", tmp_path]
    done = subprocess.run(
        [*map(str, command), "--rootdir", str(tmp_path), "-p", "no:cacheprovider"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "UserWarning: ours" in done.stdout
