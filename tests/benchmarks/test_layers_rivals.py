"""The layer's rivals: how SonicMoE's weights are stored, and what gets a time."""

from __future__ import annotations

import sys
import types

import jax
import numpy as np
import pytest

from benchmarks import layers_rivals
from benchmarks.harness import torch_layers
from benchmarks.harness.inputs import normal
from benchmarks.ops import competitors
from benchmarks.ops.competitors import Competitor
from tests.benchmarks.shared import small_case
from triax.benchmark import CallTiming


def test_sonicmoe_stores_gate_and_up_in_turn_and_the_depth_innermost(monkeypatch):
    swiglu = types.SimpleNamespace(SWIGLU="swiglu")
    for name, module in {
        "torch": types.ModuleType("torch"),
        "sonicmoe": types.ModuleType("sonicmoe"),
        "sonicmoe.functional": types.ModuleType("sonicmoe.functional"),
        "sonicmoe.enums": types.SimpleNamespace(ActivationType=swiglu),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    stored = torch_layers.sonicmoe(2).stored
    ours = normal(0, 3, 8, 2 * 4), normal(1, 3, 4, 8)  # experts, hidden, width
    first, second = stored(*ours)
    assert (first.shape, second.shape) == ((3, 2 * 4, 8), (3, 8, 4))
    for column in range(4):
        np.testing.assert_array_equal(first[:, 2 * column], ours[0][:, :, column])
        np.testing.assert_array_equal(first[:, 2 * column + 1], ours[0][:, :, 4 + column])
    np.testing.assert_array_equal(second, ours[1].swapaxes(1, 2))
    for got, want in zip(stored(first, second, back=True), ours, strict=True):
        np.testing.assert_array_equal(got, want)


def test_only_what_is_right_gets_a_time(monkeypatch):
    def missing(_):
        raise ModuleNotFoundError("No module named 'sonicmoe'")

    wrong = lambda *operands: 1.1 * jax.lax.ragged_dot(*operands)
    us = {1: 200.0, 2: 100.0, 3: 300.0}  # of Triax, of dense products, and of the rival
    order = iter([1, 2, 3, 2, 3, 1, 3, 1, 2])
    timed = lambda way: CallTiming.of([us[next(order)]], "bursts")
    monkeypatch.setattr(layers_rivals, "timed", timed)
    monkeypatch.setattr(torch_layers, "LAYERS", {"SonicMoE": missing})
    rivals = {
        "wrong": lambda case: Competitor(case.program(wrong)),
        "jax.lax.ragged_dot": lambda case: Competitor(case.program(jax.lax.ragged_dot)),
        "tokamax": missing,
    }
    monkeypatch.setitem(competitors.TABLE, "layer", rivals)
    results, left_out = layers_rivals.measure(small_case("layer", "bfloat16"))
    found = {
        r["implementation"]: (r["median_us"], r["over_triax"], r["fraction_of_dense"])
        for r in results
    }
    assert found == {
        "triax": (200.0, 1.0, 0.5),
        "dense": (100.0, 0.5, 1.0),
        "jax.lax.ragged_dot": (300.0, 1.5, pytest.approx(1 / 3)),
    }
    assert all(r["peak_bytes"] > 0 for r in results)
    assert left_out.pop("wrong").startswith("ArithmeticError: wrong: output 0 has errors up to ")
    of_missing = "ModuleNotFoundError: No module named 'sonicmoe'"
    assert left_out == {"SonicMoE": of_missing, "tokamax": of_missing}
