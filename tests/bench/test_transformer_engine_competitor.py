"""TransformerEngine as a competitor, told from a small module that stands in for it."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types

import jax
import pytest

from tests.bench.test_competitors import assert_as_triax, make_case
from triax.bench.competitors import competitors, left_out
from triax.bench.presets import Preset
from triax.bench.transformer_engine_competitor import FUNCTIONS, MODULE, NAME, OPS
from triax.moe import transformer_engine as same_functions


@pytest.fixture
def module(monkeypatch):
    """A package in TransformerEngine's place, with Triax's functions of the same names."""
    names = MODULE.split(".")
    for count in range(1, len(names) + 1):
        name = ".".join(names[:count])
        made = types.ModuleType(name)
        made.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        made.__path__ = []
        monkeypatch.setitem(sys.modules, name, made)
    for name in FUNCTIONS:
        setattr(made, name, getattr(same_functions, name))
    return made


@pytest.mark.parametrize("op", OPS)
def test_results_are_those_of_triax(module, op):
    case = make_case(op, "bfloat16")
    inputs = case.make_inputs(seed=5)
    competitor = competitors(case)[NAME]
    outputs = jax.jit(competitor.program)(competitor.prepare(inputs))
    assert_as_triax(case, inputs, outputs)
    assert left_out(case) == {}


def test_single_moves_make_no_map(module):
    """What it makes of the mask is prepared, also for gradients."""
    calls = []
    module.token_dispatch = lambda *args: calls.append(1) or same_functions.token_dispatch(*args)
    for op in ("unpermute", "permute_grad", "unpermute_grad"):
        case = make_case(op)
        competitor = competitors(case)[NAME]
        prepared = competitor.prepare(case.make_inputs())
        calls.clear()
        jax.jit(competitor.program)(prepared)
        assert not calls, op


def test_older_results_will_do(module):
    """Three results instead of five, as its first versions had."""
    module.token_dispatch = lambda *args: same_functions.token_dispatch(*args)[:3]
    case = make_case("route")
    inputs = case.make_inputs()
    assert_as_triax(case, inputs, competitors(case)[NAME](inputs))


def test_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    case = make_case("route")
    assert NAME not in competitors(case)
    assert left_out(case) == {NAME: "it is not installed"}


def reason(op="route", **how):
    case = make_case(op, **how)
    assert NAME not in competitors(case)
    return left_out(case)[NAME]


def test_function_is_missing(module):
    del module.token_combine
    assert reason().endswith("has no token_combine")


def test_function_takes_other_arguments(module):
    def token_dispatch(inp, *, mask):
        return inp, None, mask

    module.token_dispatch = token_dispatch
    assert "other arguments: TypeError" in reason()


def test_function_gives_other_results(module):
    module.sort_chunks_by_index = lambda x, sizes, indices: (x.T, indices)
    assert "other results" in reason("sort_chunks")


def test_import_fails(module, monkeypatch):
    monkeypatch.setitem(sys.modules, MODULE, None)
    assert "cannot be imported" in reason()


def test_skewed_routing_has_no_mask(module):
    assert "twice" in reason(routing="skewed")
    one_each = Preset("one", hidden=24, experts=4, top_k=1)
    assert NAME in competitors(make_case("route", routing="skewed", shape=one_each))


def test_op_that_it_has_not(module):
    assert NAME not in competitors(make_case("permute"))
    assert left_out(make_case("permute")) == {}
