"""What plans, the router and `ragged_dot` launch is what `launches.txt` says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.moe import launches

pytest.importorskip("triton")
EXPECTED = (Path(__file__).parent / "launches.txt").read_text()


@pytest.mark.parametrize("name", launches.CASES)
def test_launches(name):
    """A change that is meant: `python -m tests.moe.launches > tests/moe/launches.txt`."""
    assert launches.text(name) in EXPECTED
