"""`make stress` finds what is planted, and runs."""

import json
import random

import pytest

from tests.stress import __main__ as command
from tests.stress import scenarios

pytestmark = pytest.mark.cuda_plugin


def test_wrong_results_are_found():
    found = scenarios.planted_wrong(0.1, random.Random(0))
    assert found["findings"][0] == "program 0 gave another result"


def test_what_threads_raise_is_found():
    found = scenarios.in_threads(2, 0.1, lambda rng: 1 / 0)
    assert "ZeroDivisionError" in found["findings"][0]


@pytest.mark.nightly("it waits for a process that never ends")
def test_a_scenario_that_does_not_end_is_found():
    found = command.run("planted_hang", 1, 0, after=20)
    (finding,) = found["findings"]
    assert "did not end" in finding
    assert "planted_hang" in finding


@pytest.mark.nightly("it starts many processes")
def test_scenarios_find_nothing(tmp_path):
    names = "donated", "kernels_by_thousand", "interrupted", "full_disk", "clock"
    path = tmp_path / "stress.json"
    status = command.main(
        ["--only", *names, "--seconds", "1", "--jobs", "2", "--output", str(path)]
    )
    record = json.loads(path.read_text())
    assert status == 0, record
    assert {*record["results"]} == {*names}
    assert all(found["count"] for found in record["results"].values())
