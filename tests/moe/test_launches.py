"""What plans, the router and `ragged_dot` launch is what `launches.txt` says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.moe import launches

pytest.importorskip("triton")
# An empty line stands between cases, and in none of them.
EXPECTED = (Path(__file__).parent / "launches.txt").read_text().removesuffix("\n").split("\n\n")
NAMES = [expected.partition(":\n")[0] for expected in EXPECTED]


@pytest.mark.parametrize("name", launches.CASES)
def test_launches(name):
    """A change that is meant: `python -m tests.moe.launches > tests/moe/launches.txt`."""
    assert launches.text(name) == EXPECTED[NAMES.index(name)] + "\n"


def test_the_file_has_no_other_cases():
    assert [*launches.CASES] == NAMES
