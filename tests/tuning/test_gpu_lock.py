"""One measurement at a time per GPU."""

import os
import subprocess
import sys
import threading
import time

import pytest

from triax import settings
from triax.errors import TuningError
from triax.tuning import gpu_lock

HOLD = """
import sys
from triax.tuning import gpu_lock
with gpu_lock.one_at_a_time("one-gpu"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def elsewhere():
    """Another process, which sees the GPU under another index and holds it until its input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "3", "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout.readline() == b"held\n"
        yield process


@pytest.mark.slow("processes are the same on every Python")
def test_waits_for_another_process_and_says_so(elsewhere, caplog):
    with gpu_lock.one_at_a_time("another-gpu"):
        pass
    assert caplog.text == ""
    start = time.monotonic()
    threading.Timer(0.5, elsewhere.stdin.close).start()
    with gpu_lock.one_at_a_time("one-gpu"):
        assert time.monotonic() - start > 0.4
    assert "another process that measures on this GPU" in caplog.text


@pytest.mark.slow("processes are the same on every Python")
def test_waiting_is_bounded_and_logged(elsewhere, caplog):
    start = time.monotonic()
    with (
        pytest.raises(TuningError, match=r"have measured on this GPU for 0\.3 s"),
        gpu_lock.one_at_a_time("one-gpu", timeout_s=0.3),
    ):
        pytest.fail("it is held")
    assert time.monotonic() - start < 20
    assert "another process that measures on this GPU" in caplog.text


@pytest.mark.slow("its processes take seconds")
def test_a_process_that_dies_lets_go(elsewhere):
    elsewhere.kill()
    elsewhere.wait()
    with gpu_lock.one_at_a_time("one-gpu"):
        pass


@pytest.fixture
def temporary(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"triax-{os.getuid()}"


def test_does_not_follow_links(tmp_path, temporary):
    target = tmp_path / "precious"
    target.write_text("text")
    for folder in (settings.cache_folder(), temporary):
        folder.mkdir(parents=True)
        (folder / "gpu-x.lock").symlink_to(target)
    with pytest.raises(TuningError, match=r"no file can be locked.*set TRIAX_CACHE_DIR"):
        gpu_lock.one_at_a_time("x").__enter__()
    assert target.read_text() == "text"


def test_where_the_cache_folder_cannot_be_it_is_in_the_temporary_one(monkeypatch, temporary):
    """As for an unknown user in a container, whose home is / and not theirs."""
    monkeypatch.setenv("TRIAX_CACHE_DIR", "/proc/triax")
    with gpu_lock.one_at_a_time("x"):
        assert (temporary / "gpu-x.lock").exists()


def test_not_in_a_temporary_folder_of_somebody_else(monkeypatch, temporary):
    monkeypatch.setenv("TRIAX_CACHE_DIR", "/proc/triax")
    somebody_else = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: somebody_else)
    temporary.with_name(f"triax-{somebody_else}").mkdir()
    with pytest.raises(TuningError, match="belongs to another user"):
        gpu_lock.one_at_a_time("x").__enter__()


def test_without_a_home_it_is_in_the_temporary_folder(monkeypatch, temporary):
    monkeypatch.setattr(settings, "cache_folder", lambda: None)
    with gpu_lock.one_at_a_time("x"):
        assert (temporary / "gpu-x.lock").exists()


def test_where_nothing_is_temporary_it_is_in_the_cache_folder(monkeypatch):
    def refuse():
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", refuse)
    with gpu_lock.one_at_a_time("x"):
        assert (settings.cache_folder() / "gpu-x.lock").exists()
