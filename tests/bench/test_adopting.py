"""`benchmarks/adopting.py`: what it compares, and that no way runs with another one's kernels."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def adopting(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("adopting")
    monkeypatch.setattr(module, "ROUNDS", 1)
    return module


def test_nan_differs(adopting):
    ones = jnp.ones(4)
    nan = ones.at[1].set(math.nan)
    assert adopting.difference([ones], [ones]) == 0
    assert adopting.difference([nan], [ones]) == math.inf
    assert adopting.difference([ones], [nan]) == math.inf


def test_a_way_that_raises_finds_no_kernel_that_another_one_traced(adopting):
    there = []

    @jax.jit
    def kernel(x):
        if not there:
            raise AttributeError("dot")
        return 2 * x

    def with_dot(x):
        there.append("dot")
        try:
            return kernel(x)
        finally:
            there.clear()

    ways = {"auto": lambda x: kernel(x), "with dot": with_dot, "patched": lambda x: x + x}
    found = adopting.measure(ways, jnp.ones(4))
    assert found["auto"] == {"error": "AttributeError: dot"}
    assert {"ms", "of_patched"} < set(found["with dot"])
