"""The competitors compute what Triax does; those of other libraries against stand-ins."""

from __future__ import annotations

import sys
import types

import jax
import numpy as np
import pytest

from benchmarks.ops.cases import OPS
from benchmarks.ops.checks import problem
from benchmarks.ops.competitors import TABLE, competitors, dense
from tests.benchmarks.shared import small_case
from triax.moe import transformer_engine as same_functions

MODULE = "transformer_engine.jax.permutation"


@pytest.fixture
def libraries(monkeypatch):
    """Modules in the place of other libraries; PyTorch's is returned."""
    torch = types.SimpleNamespace(
        from_dlpack=np.from_dlpack,
        index_select=lambda array, axis, index: np.take(array, index, axis=axis),
        cuda=types.SimpleNamespace(is_available=lambda: True, synchronize=lambda: None),
    )
    for name, module in {
        "transformer_engine": types.ModuleType("transformer_engine"),
        "transformer_engine.jax": types.ModuleType("transformer_engine.jax"),
        MODULE: same_functions,
        "tokamax": types.SimpleNamespace(ragged_dot=jax.lax.ragged_dot),
        "torch": torch,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    return torch


@pytest.mark.sampled(0, 6)
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
                run = jax.jit(competitor.program) if competitor.is_own else competitor.program
                outputs = competitor.finish(run(competitor.prepare(inputs)))
                assert problem(case, inputs, outputs) is None, name


@pytest.mark.parametrize("op", [op for op in OPS if OPS[op].matmuls])
def test_the_dense_matmuls_have_as_many_operations(op):
    case = small_case(op, tokens=256)
    competitor = dense(case)
    operands = jax.eval_shape(lambda: competitor.prepare(case.make_inputs()))
    cost = jax.jit(competitor.program).lower(operands).compile().cost_analysis()
    assert cost["flops"] == pytest.approx(case.flops, rel=0.01)


def test_what_is_not_there_says_why(libraries, monkeypatch):
    libraries.cuda.is_available = lambda: False
    monkeypatch.setitem(sys.modules, MODULE, None)
    found = competitors(small_case("sort_chunks"))
    assert found["torch.index_select"] == "RuntimeError: PyTorch finds no GPU"
    assert found["transformer_engine"].startswith("ModuleNotFoundError: ")


@pytest.mark.parametrize(
    ("op", "name", "sorts", "scatters"),
    [
        ("permute", "jnp.take", 0, 0),
        ("unpermute", "jnp.take", 0, 0),
        ("moves", "argsort+take", 2, 0),
        ("moves+grad", "argsort+take", 2, 2),
        ("moves+grad", "argsort+take+sum", 2, 2),
        ("moves+grad", "hand-fused vjp", 1, 1),
        ("sort_chunks", "jnp.take", 0, 0),
    ],
)
def test_what_is_on_the_clock(op, name, sorts, scatters):
    """By hand no row is scattered; an index made before is not made again."""
    case = small_case(op)
    competitor = competitors(case)[name]
    prepared = jax.eval_shape(lambda: competitor.prepare(case.make_inputs()))
    program = jax.jit(competitor.program).lower(prepared).as_text()
    counts = [program.count(f'"stablehlo.{kind}"(') for kind in ("sort", "scatter")]
    assert counts == [sorts, scatters]
