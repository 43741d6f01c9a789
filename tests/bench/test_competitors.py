"""The competitors compute what Triax does; those of other libraries against stand-ins."""

from __future__ import annotations

import sys
import types

import jax
import numpy as np
import pytest

from tests.bench.shapes import small_case
from triax.bench.cases import OPS
from triax.bench.checks import problem
from triax.bench.competitors import TABLE, competitors, dense
from triax.bench.timing import time_program
from triax.moe import transformer_engine as same_functions

MODULE = "transformer_engine.jax.permutation"


class Event:
    """Fires at once; every one 30 µs of the device's time after the one before."""

    count = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        Event.count += 1
        self.at_ms = 0.03 * Event.count

    def query(self):
        return False

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return other.at_ms - self.at_ms


@pytest.fixture
def libraries(monkeypatch):
    """Packages in the place of TransformerEngine, tokamax and PyTorch."""
    for name in ("transformer_engine", "transformer_engine.jax"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, MODULE, same_functions)
    tokamax = types.SimpleNamespace(ragged_dot=jax.lax.ragged_dot)
    monkeypatch.setitem(sys.modules, "tokamax", tokamax)
    torch = types.SimpleNamespace(
        from_dlpack=np.from_dlpack,
        index_select=lambda array, axis, index: np.take(array, index, axis=axis),
        cuda=types.SimpleNamespace(
            is_available=lambda: True,
            synchronize=lambda: None,
            Event=Event,
            _sleep=lambda ticks: None,
        ),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch


@pytest.mark.parametrize("op", TABLE)
def test_results_are_those_of_triax(op, libraries):
    dtype = "float32" if "torch.index_select" in TABLE[op] else "bfloat16"  # as NumPy's DLPack
    for routing in OPS[op].routings:
        case = small_case(op, dtype, routing)
        inputs = case.make_inputs()
        found = competitors(case)
        assert found.keys() == TABLE[op].keys()
        for name, competitor in found.items():
            if isinstance(competitor, str):
                assert (name, routing) == ("transformer_engine", "skewed")
                assert "a mask cannot name an expert twice" in competitor
            else:
                run = competitor.program if competitor.clock else jax.jit(competitor.program)
                outputs = competitor.finish(run(competitor.prepare(inputs)))
                assert problem(case, inputs, outputs) is None, name


@pytest.mark.parametrize("op", [op for op in OPS if OPS[op].matmuls])
def test_the_dense_matmuls_have_as_many_operations(op):
    case = small_case(op, tokens=256)
    competitor = dense(case)
    operands = competitor.prepare(case.make_inputs())
    cost = jax.jit(competitor.program).lower(operands).compile().cost_analysis()
    assert cost["flops"] == pytest.approx(case.flops, rel=0.01)


def test_torch_is_timed_by_its_own_events(libraries):
    competitor = competitors(small_case("permute"))["torch.index_select"]
    prepared = competitor.prepare(small_case("permute").make_inputs())
    timing = time_program(competitor.program, prepared, clock=competitor.clock, target_ms=1)
    assert timing.method == "events"
    assert timing.median_us == pytest.approx(30)


def test_what_is_not_there_says_why(libraries, monkeypatch):
    libraries.cuda.is_available = lambda: False
    monkeypatch.setitem(sys.modules, MODULE, None)
    found = competitors(small_case("sort_chunks"))
    assert found["torch.index_select"] == "RuntimeError: PyTorch finds no GPU"
    assert found["transformer_engine"].startswith("ModuleNotFoundError: ")


@pytest.mark.parametrize(
    ("op", "name", "sorts", "scatters", "scatter_adds"),
    [
        ("permute", "jnp.take", 0, 0, 0),
        ("unpermute", "jnp.take", 0, 0, 0),
        ("route", "argsort+take", 2, 0, 0),
        ("route+grad", "argsort+take", 2, 0, 2),
        ("route+grad", "argsort+take+sum", 2, 0, 2),
        ("route+grad", "hand-fused vjp", 1, 1, 0),
        ("sort_chunks", "jnp.take", 0, 0, 0),
    ],
)
def test_what_is_on_the_clock(op, name, sorts, scatters, scatter_adds):
    """By hand nothing is scatter-added; an index made before is not made again."""
    case = small_case(op)
    competitor = competitors(case)[name]
    program = str(jax.make_jaxpr(competitor.program)(competitor.prepare(case.make_inputs())))
    counts = [program.count(f" {primitive}[") for primitive in ("sort", "scatter", "scatter-add")]
    assert counts == [sorts, scatters, scatter_adds]
