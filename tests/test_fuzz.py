"""The fuzzer: a few hundred cases, and that it finds faults that are planted."""

from __future__ import annotations

import pytest

from tests.fuzz import many, programs


@pytest.mark.parametrize("path", ["xla", "interpret"])
def test_random_cases_are_right(path):
    each = {"xla": 12, "interpret": 1}[path]
    for index in range(len(programs.OPS)):
        _, done, failure = many.run(many.Job(path, 2026, index, each))
        assert failure is None, failure.reproduction
        assert done.cases == each
