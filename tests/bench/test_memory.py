"""What is told of a route's memory: XLA's numbers."""

from __future__ import annotations

import pytest

from triax.bench.memory import IMPLEMENTATIONS, measure_memory
from triax.bench.presets import Preset

SHAPE = Preset("odd", hidden=48, experts=11, top_k=3)
TOKENS = 37


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_record(implementation):
    record = measure_memory(SHAPE, TOKENS, "bfloat16", implementation)
    tokens, pairs = TOKENS * 48 * 2, TOKENS * 3 * 4
    assert record["argument_bytes"] == 2 * tokens + 2 * pairs
    # XLA adds its table of pointers to what the program returns.
    assert 0 <= record["output_bytes"] - (2 * tokens + pairs) < 64
    assert record["temporary_bytes"] >= 3 * tokens  # the rows
    names = ("program", "preset", "tokens", "dtype", "implementation")
    expected = ["route+grad", "odd", TOKENS, "bfloat16", implementation]
    assert [record[name] for name in names] == expected
