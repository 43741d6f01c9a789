"""`tools/mutants`: which changes are made, where, and which tests are chosen for one."""

from __future__ import annotations

import json

import pytest
from tools.mutants import __main__ as command
from tools.mutants.operators import mutants

SOURCE = '''\
"""A module's text."""
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    LIMIT = 1

def clip(x: "list[int]", low: int = 3) -> "int | None":
    """Clips."""
    if x["low"] < low and not x.get("é"):
        raise ValueError("too low" + str(low))
    for y in x:
        break
    x.sort(key=len, reverse=y)
    logger.info("sorted %s", 4)
    return f"{x + y}"
'''
CHANGES = """\
8: 3 → 4
10: 'low' → 'not low'
10: 'é' → 'not é'
10: not x.get('é') → x.get('é')
10: x['low'] < low and (not x.get('é')) → False
10: x['low'] < low and (not x.get('é')) → True
10: x['low'] < low and (not x.get('é')) → x['low'] < low or not x.get('é')
10: x['low'] < low → x['low'] <= low
11: raise ValueError('too low' + str(low)) removed
13: break → continue
14: x.sort(key=len, reverse=y) removed
14: x.sort(…) without key=
14: x.sort(…) without reverse=
16: return f'{x + y}' → return None
"""


def made(folder, source=SOURCE):
    file = folder / "module.py"
    file.write_text(source)
    return mutants(file, folder)


def test_changes_of_a_source(tmp_path):
    found = sorted(f"{mutant.line:02}: {mutant.change}" for mutant in made(tmp_path))
    assert [line.removeprefix("0") for line in found] == CHANGES.splitlines()


def test_a_change_is_made_where_it_says(tmp_path):
    by_change = {mutant.change: mutant for mutant in made(tmp_path)}
    of = by_change["not x.get('é') → x.get('é')"]
    code = SOURCE.encode()
    changed = (code[: of.start] + of.text.encode() + code[of.end :]).decode()
    assert changed == SOURCE.replace('not x.get("é")', "(x.get('é'))")


def test_names_of_changes_outlive_other_changes(tmp_path):
    before = {mutant.key for mutant in made(tmp_path)}
    assert len(before) == len(made(tmp_path))
    after = {mutant.key for mutant in made(tmp_path, "first = 5\n" + SOURCE)}
    assert len(after - before) == 1
    assert not before - after


def test_tests_are_the_closest_first(tmp_path):
    [mutant, *_] = made(tmp_path)
    mutant = mutant._replace(file="src/triax/moe/plans/api.py", line=8)
    file = mutant.file
    covered = {
        "tests/test_call.py::test_far": (0.1, {file: [8]}),
        "tests/test_call.py::test_quick": (0.01, {file: [8]}),
        "tests/moe/plans/test_plan.py::test_slow": (9.0, {file: [8]}),
        "tests/moe/plans/test_plan.py::test_cases[0]": (0.2, {file: [8]}),
        "tests/moe/plans/test_plan.py::test_cases[1]": (0.1, {file: [8, 9]}),
        "tests/moe/plans/test_api.py::test_refused": (0.3, {file: [8]}),
        "tests/moe/plans/test_api.py::test_elsewhere": (0.1, {file: [9]}),
    }
    names = [name.rpartition("::")[2] for name in command.tests_for(mutant, covered, 10.0)[0]]
    assert names == ["test_quick", "test_refused", "test_cases[1]", "test_cases[0]", "test_far"]
    assert command.tests_for(mutant, covered, 0.0)[0] == [
        "tests/moe/plans/test_api.py::test_refused"
    ]


@pytest.fixture(scope="module")
def every():
    return {(of.file, of.code, of.change) for of in command.population()}


def test_every_reason_is_of_a_change_that_is_made(every):
    reasons = json.loads(command.EQUIVALENT.read_text())
    assert [of for of in reasons if tuple(of[:3]) not in every] == []
    assert all(of[3] for of in reasons)


def test_a_sample_stays_when_it_grows():
    assert command.sample(1, 20)[:10] == command.sample(1, 10)
    assert command.sample(2, 10) != command.sample(1, 10)


def test_kernels_are_not_changed(every):
    files = {file for file, _, _ in every}
    assert not [file for file in files if "kernels" in file]
    assert {"src/triax/moe/router/api.py", "src/triax/tuning/policy.py"} < files
