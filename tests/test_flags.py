"""`make flags` counts what passes under a setting, and names what does not."""

import os
import subprocess
import sys
import textwrap

import pytest

from tools import flags


def test_every_setting_has_tests():
    for setting in flags.SETTINGS.values():
        assert [*flags.TESTS.glob(setting.files)]
    assert {file.stem for file in flags.TESTS.glob("test_*.py")} >= flags.WORKERS.keys()


@pytest.mark.slow("it starts JAX for each setting")
@pytest.mark.parametrize("name", flags.SETTINGS)
def test_xla_knows_every_flag(name):
    """XLA ends the process at a flag, or a value, that it does not know."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **flags.SETTINGS[name].environment}
    command = (sys.executable, "-c", "import jax; jax.devices()")
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=120)


@pytest.mark.nightly("it tests a tool, not the package")
def test_counts_and_failures(tmp_path, monkeypatch):
    monkeypatch.setattr(flags, "WORKERS", {"test_some": 2})
    tests, logs = tmp_path / "tests", tmp_path / "logs"
    tests.mkdir(), logs.mkdir()
    some = """
        import os, pytest
        pytestmark = pytest.mark.gpu
        def test_setting(): assert os.environ["A_SETTING"] == "1"
        def test_workers(): assert os.environ["PYTEST_XDIST_WORKER_COUNT"] == "2"
        def test_wrong(): assert False
        def test_skipped(): pytest.skip("no reason")
    """
    (tests / "test_some.py").write_text(textwrap.dedent(some))
    (tests / "test_broken.py").write_text("import nothing_of_this_name")
    (tests / "test_endless.py").write_text("import time; time.sleep(1000)")

    found = flags.run({"A_SETTING": "1"}, 20, logs, sorted(tests.glob("test_*.py")))

    assert (found["passed"], found["skipped"]) == (2, 1)
    broken, endless, wrong = sorted(found["failed"])
    assert broken.startswith("test_broken: ")
    assert endless == "test_endless: TimeoutExpired"
    assert wrong == "test_some: test_wrong"
