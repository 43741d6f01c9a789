"""Cases: what they read, what they count, how their runs are chained, and what is found wrong."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.harness.streams import Stream
from benchmarks.ops.cases import MAKERS, OPS
from benchmarks.ops.checks import problem
from tests.benchmarks.shared import small_case


def outputs_of(case, inputs):
    return jax.tree.map(np.array, jax.jit(case.program("xla"))(inputs))


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


@pytest.mark.parametrize(("routing", "first"), [("uniform", 1 / 8), ("skewed", 9 / 16)])
def test_tokens_choose_distinct_experts_or_the_first(routing, first):
    case = small_case("plan", routing=routing, tokens=4096)
    experts = np.asarray(MAKERS["selected_experts"](case))
    counts = np.bincount(experts.ravel(), minlength=8) / experts.size
    np.testing.assert_allclose(counts, [first, *[(1 - first) / 7] * 7], atol=0.01)
    assert (routing == "skewed") == bool(np.any(experts[:, 0] == experts[:, 1]))


def test_bytes_streams_and_operations():
    moves = small_case("moves+grad", "bfloat16")
    unit = 24 * 80 * 2
    streams, sizes = zip(*moves.passes, strict=True)
    there, back, both = Stream(1, 2, unit), Stream(2, 1, unit), Stream(3, 2, unit)
    assert streams == (there, back, both, back)
    assert 14 * unit < sum(sizes) < 15 * unit
    ((stream, size),) = small_case("plan").passes
    assert (stream.reads, stream.writes) == (0, 0)
    assert 4 * 24 * 6 <= size < 800
    assert small_case("ragged_dot").flops == 2 * 48 * 80 * 48
    assert small_case("layer").flops == 9 * small_case("ragged_dot").flops


@pytest.mark.slow("the benchmark is of one Python")
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("op", [op for op in OPS if OPS[op].next])
def test_chained_inputs_hold_what_was_computed(op, top_k):
    case = small_case(op, "bfloat16", top_k=top_k)
    inputs = case.make_inputs()
    chain = case.chain(case.program(), inputs)
    if chain is None:
        assert top_k == 2
        return
    outputs = jax.eval_shape(case.program(), inputs)
    given, made = map(jax.tree.leaves, (chain(inputs, outputs), outputs))
    assert any(leaf is output for leaf in given for output in made)


# --- results ---------------------------------------------------------------------------


@pytest.mark.sampled(0, 6)
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


@pytest.mark.sampled(1, 2)
@pytest.mark.parametrize("op", ["permute", "sort_chunks", "sort_chunks_grad"])
def test_moves_are_compared_by_bits(op):
    """Minus zero is not zero."""
    case = small_case(op)
    inputs = case.make_inputs()
    inputs |= {name: jnp.zeros_like(inputs[name]) for name in inputs.keys() & {"x", "gradient"}}
    moved = outputs_of(case, inputs)
    assert problem(case, inputs, moved) is None
    jax.tree.leaves(moved)[0][-1, -1] = -0.0
    assert problem(case, inputs, moved) == "wrong: 1 elements of output 0 differ"


def test_outputs_of_another_shape_are_wrong():
    case = small_case("permute")
    inputs = case.make_inputs()
    assert "should be float32[48, 80]" in problem(case, inputs, outputs_of(case, inputs)[:, :1])
