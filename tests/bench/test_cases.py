"""Cases: what they read, what they count, how their runs are chained, and what is found wrong."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.bench.shapes import small_case
from triax.bench.cases import OPS, Stream
from triax.bench.checks import problem
from triax.bench.runner import _chain
from triax.testing import assert_same_bits


def outputs_of(case, inputs, implementation="xla"):
    return jax.tree.map(np.array, jax.jit(case.program(implementation))(inputs))


@pytest.mark.parametrize("op", OPS)
def test_inputs_are_the_same_each_time(op):
    case = small_case(op)
    first, again = case.make_inputs(), case.make_inputs()
    assert list(first) == OPS[op].inputs.split()
    jax.tree.map(assert_same_bits, first, again)


def test_chunks_and_groups_cover_all_rows():
    chunks = dataclasses.replace(small_case("sort_chunks"), tokens=1000, experts=64).make_inputs()
    assert chunks["split_sizes"].sum() == 1000
    assert len(np.unique(chunks["split_sizes"])) > 8
    assert sorted(chunks["sorted_indices"].tolist()) == list(range(64))
    sizes = lambda routing: small_case("ragged_dot", routing=routing).make_inputs()["group_sizes"]
    assert sizes("even").tolist() == [6] * 8
    assert sizes("half").tolist() == [24, 3, 3, 4, 3, 4, 3, 4]
    assert sizes("uneven").sum() == 48
    assert len(np.unique(sizes("uneven"))) > 3


def test_bytes_streams_and_operations():
    route = small_case("route+grad", "bfloat16")
    unit = 24 * 80 * 2
    there, back, both, again = (stream for stream, _ in route.streams)
    assert (there, back, again) == (Stream(1, 2, unit), Stream(2, 1, unit), Stream(2, 1, unit))
    assert both == Stream(3, 2, unit)
    assert 14 * unit < route.num_bytes == sum(size for _, size in route.streams) < 15 * unit
    assert not small_case("plan").streams
    assert small_case("ragged_dot").flops == 2 * 48 * 80 * 48
    assert small_case("layer").flops == 9 * small_case("ragged_dot").flops


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("op", [op for op in OPS if OPS[op].chain])
def test_chained_inputs_hold_what_was_computed(op, top_k):
    case = small_case(op, "bfloat16", top_k=top_k)
    inputs = case.make_inputs()
    outputs = jax.jit(case.program())(inputs)
    chain = _chain(case, case.program(), inputs)
    if chain is None:
        assert top_k == 2
        return
    given, made = map(jax.tree.leaves, (chain(inputs, outputs), outputs))
    assert any(leaf is output for leaf in given for output in made)


# --- results ---------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_right_results_and_one_wrong_element(op):
    case = small_case(op, "bfloat16")
    inputs = case.make_inputs()
    outputs = outputs_of(case, inputs)
    assert problem(case, inputs, outputs) is None
    leaves, tree = jax.tree.flatten(outputs)
    for index, leaf in enumerate(leaves):
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        for value in (leaf.max() + leaf.reshape(-1)[-1] + 1, *([np.nan] if is_float else [])):
            spoiled = [*leaves[:index], leaf.copy(), *leaves[index + 1 :]]
            spoiled[index].reshape(-1)[-1] = value
            wrong = problem(case, inputs, tree.unflatten(spoiled))
            assert wrong is not None, (index, value)
            assert wrong.startswith("wrong: ")


@pytest.mark.parametrize("op", ["permute+plan", "unpermute_grad", "route+grad", "ragged_dot"])
def test_right_results_of_the_kernels(op):
    case = small_case(op)
    inputs = case.make_inputs()
    assert problem(case, inputs, case.program("interpret")(inputs)) is None


@pytest.mark.parametrize("op", ["permute", "sort_chunks", "sort_chunks_grad"])
def test_moves_are_compared_by_bits(op):
    """Minus zero is not zero."""
    case = small_case(op)
    inputs = case.make_inputs()
    inputs |= {name: jnp.zeros_like(inputs[name]) for name in inputs.keys() & {"x", "gradient"}}
    moved = outputs_of(case, inputs)
    assert problem(case, inputs, moved) is None
    moved[-1, -1] = -0.0
    assert problem(case, inputs, moved) == "wrong: 1 elements of output 0 differ"
