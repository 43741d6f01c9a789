"""`make flags` counts what passes under a setting, and names what does not."""

import textwrap

import pytest

from tools import flags


@pytest.mark.nightly("it tests a tool, not the package")
def test_counts_and_failures(tmp_path):
    tests, logs = tmp_path / "tests", tmp_path / "logs"
    tests.mkdir(), logs.mkdir()
    some = """
        import os, pytest
        pytestmark = pytest.mark.gpu
        def test_setting(): assert os.environ["A_SETTING"] == "1"
        def test_wrong(): assert False
        def test_skipped(): pytest.skip("no reason")
    """
    (tests / "test_some.py").write_text(textwrap.dedent(some))
    (tests / "test_broken.py").write_text("import nothing_of_this_name")
    (tests / "test_endless.py").write_text("import time; time.sleep(1000)")

    found = flags.run({"A_SETTING": "1"}, 8, logs, tests)

    assert (found["passed"], found["skipped"]) == (1, 1)
    broken, endless, wrong = sorted(found["failed"])
    assert broken.startswith("test_broken0: ")
    assert endless == "test_endless0: TimeoutExpired"
    assert wrong == "test_some0: test_wrong"
