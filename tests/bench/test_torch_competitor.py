"""PyTorch as a competitor, told from a small module that stands in for it."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types

import jax
import numpy as np
import pytest

from tests.bench.test_competitors import assert_as_triax, make_case
from triax.bench import torch_competitor
from triax.bench.torch_competitor import OPS, TorchMove, problem


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
def torch(monkeypatch):
    module = types.ModuleType("torch")
    module.__spec__ = importlib.machinery.ModuleSpec("torch", None)
    module.from_dlpack = np.from_dlpack
    module.index_select = lambda array, axis, index: np.take(array, index, axis=axis)
    module.cuda = types.SimpleNamespace(
        is_available=lambda: True,
        synchronize=lambda: None,
        empty_cache=lambda: None,
        Event=Event,
        _sleep=lambda ticks: None,
    )
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


@pytest.mark.parametrize("op", OPS)
def test_moves_as_triax_does(torch, op):
    case = make_case(op)
    inputs = case.make_inputs(seed=2)
    assert problem(case) is None
    output = TorchMove(case, inputs).output()
    assert isinstance(output, jax.Array)
    assert_as_triax(case, inputs, output)


def test_time_is_that_of_its_events(torch):
    case = make_case("permute")
    timing = TorchMove(case, case.make_inputs()).time(target_ms=1)
    assert timing.method == "events"
    assert timing.median_us == pytest.approx(30)
    assert timing.samples >= 15


def test_no_gpu(torch):
    torch.cuda.is_available = lambda: False
    assert problem(make_case("permute")) == "PyTorch finds no GPU"


def test_broken_library(torch):
    del torch.cuda
    assert "cannot be imported: AttributeError" in problem(make_case("permute"))


def test_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert problem(make_case("permute")) == "PyTorch is not installed"


def test_other_ops_have_no_problem():
    assert problem(make_case("route+grad")) is None


def test_is_imported_late(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # an import would fail
    importlib.reload(torch_competitor)
