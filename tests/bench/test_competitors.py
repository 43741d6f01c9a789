"""The competitors in plain JAX compute what Triax does, and put on the clock what they say."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from triax.bench.cases import Case
from triax.bench.competitors import competitors, left_out
from triax.bench.presets import Chunks, Preset
from triax.testing import assert_close, assert_same_bits

SHAPE = Preset("odd", hidden=48, experts=11, top_k=3)
CHUNKS = Chunks(tokens=99, hidden=40, count=7)
MOVES = ("permute", "sort_chunks", "sort_chunks_grad")
ROUTES = {"argsort+take", "argsort+take+sum", "hand-written vjp", "hand-fused vjp"}
NAMES = {
    "plan": set(),
    "permute": {"jnp.take"},
    "permute+plan": set(),
    "unpermute": {"jnp.take"},
    "permute_grad": {"jnp.take", "hand-fused vjp"},
    "unpermute_grad": {"jnp.take", "hand-fused vjp"},
    "route": ROUTES,
    "route+grad": ROUTES,
    "sort_chunks": {"jnp.take", "argsort+take"},
    "sort_chunks_grad": {"jnp.take", "argsort+take", "hand-written vjp"},
}


def make_case(op, dtype="float32", routing="uniform", shape=SHAPE):
    if op.startswith("sort_chunks"):
        return Case.chunked(op, CHUNKS, dtype)
    return Case.routed(op, shape, 37, dtype, routing)


def assert_as_triax(case, inputs, outputs):
    expected = case.program(inputs, "xla")
    assert jax.tree.structure(outputs) == jax.tree.structure(expected)
    for got, want in zip(jax.tree.leaves(outputs), jax.tree.leaves(expected), strict=True):
        assert got.dtype == want.dtype
        if case.op in MOVES:
            assert_same_bits(got, want)
        else:
            terms = 1 if got.shape[-1] == case.hidden else case.hidden
            assert_close(got, np.asarray(want, np.float64), terms=terms * case.top_k)


@pytest.mark.parametrize("op", NAMES)
def test_names(op):
    assert competitors(make_case(op)).keys() == NAMES[op]


@pytest.mark.parametrize(("routing", "dtype"), [("uniform", "bfloat16"), ("skewed", "float32")])
@pytest.mark.parametrize("op", [op for op in NAMES if NAMES[op]])
def test_results_are_those_of_triax(op, routing, dtype):
    case = make_case(op, dtype, routing)
    inputs = case.make_inputs(seed=3)
    for competitor in competitors(case).values():
        outputs = jax.jit(competitor.program)(competitor.prepare(inputs))
        assert_as_triax(case, inputs, outputs)


@pytest.mark.parametrize("top_k", [1, 5])
@pytest.mark.parametrize("op", ["permute", "permute_grad", "unpermute_grad", "route+grad"])
def test_tokens_that_name_one_expert_only(op, top_k):
    case = make_case(op, shape=Preset("one", hidden=24, experts=1, top_k=top_k))
    inputs = case.make_inputs()
    for competitor in competitors(case).values():
        assert_as_triax(case, inputs, jax.jit(competitor)(inputs))


def test_chunks_that_are_empty():
    case = Case.chunked("sort_chunks_grad", Chunks(tokens=5, hidden=8, count=16), "float32")
    inputs = case.make_inputs()
    assert (inputs["split_sizes"] == 0).any()
    for competitor in competitors(case).values():
        assert_as_triax(case, inputs, jax.jit(competitor)(inputs))


def count_of(primitive, op, name):
    competitor = competitors(make_case(op))[name]
    prepared = competitor.prepare(make_case(op).make_inputs())
    program = str(jax.make_jaxpr(competitor.program)(prepared))
    return program.count(f" {primitive}[")


@pytest.mark.parametrize(
    ("op", "name", "sorts", "scatters", "scatter_adds"),
    [
        ("permute", "jnp.take", 0, 0, 0),
        ("unpermute", "jnp.take", 0, 0, 0),
        ("permute_grad", "jnp.take", 0, 0, 1),
        ("permute_grad", "hand-fused vjp", 0, 0, 0),
        ("unpermute_grad", "jnp.take", 0, 0, 1),
        ("unpermute_grad", "hand-fused vjp", 0, 0, 0),
        ("route", "argsort+take", 2, 0, 0),
        ("route+grad", "argsort+take", 2, 0, 2),
        ("route+grad", "argsort+take+sum", 2, 0, 2),
        ("route+grad", "hand-fused vjp", 1, 1, 0),
        ("sort_chunks", "jnp.take", 0, 0, 0),
        ("sort_chunks_grad", "jnp.take", 0, 0, 1),
    ],
)
def test_what_is_on_the_clock(op, name, sorts, scatters, scatter_adds):
    """By hand nothing is scatter-added; an index made before is not made again."""
    assert count_of("sort", op, name) == sorts
    assert count_of("scatter", op, name) == scatters
    assert count_of("scatter-add", op, name) == scatter_adds


def test_sorting_rows_by_hand_scatters_nothing():
    """How often equal sorts are printed is up to JAX's version."""
    assert count_of("sort", "route+grad", "hand-written vjp") >= 2
    assert count_of("scatter", "route+grad", "hand-written vjp") == 0
    assert count_of("scatter-add", "route+grad", "hand-written vjp") == 0


def test_no_reason_where_nothing_is_left_out():
    assert left_out(make_case("permute")) == {}
