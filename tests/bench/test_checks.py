"""The checks accept what is right, on every path, and find whatever is not."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.bench.shapes import ONE, small_case
from triax.bench import checks
from triax.bench.cases import DTYPES
from triax.bench.programs import OPS

# More tokens than one slice, and no whole number of slices.
TOKENS = checks._SLICE_TOKENS + 24


def outputs_of(case, inputs):
    return jax.tree.map(np.array, case.compiled("xla")(inputs))


def at_an_end(array, value, last):
    """The array with its first or last element set."""
    spoiled = np.array(array)
    spoiled.reshape(-1)[-1 if last else 0] = value
    return spoiled


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_right_results(op, dtype):
    case = small_case(op, dtype, "skewed", tokens=TOKENS)
    inputs = case.make_inputs()
    assert checks.problem(case, inputs, case.compiled("xla")(inputs)) is None


@pytest.mark.parametrize("op", [op for op in OPS if "chunks" not in op])
def test_right_results_of_the_kernels(op):
    case = small_case(op)
    inputs = case.make_inputs()
    assert checks.problem(case, inputs, case.program(inputs, "interpret")) is None


@pytest.mark.parametrize("op", OPS)
def test_one_slot(op):
    case = small_case(op, preset=ONE)
    inputs = case.make_inputs()
    assert checks.problem(case, inputs, outputs_of(case, inputs)) is None


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("op", OPS)
def test_one_wrong_element_is_found(op, last):
    case = small_case(op, tokens=TOKENS)
    inputs = case.make_inputs()
    leaves, tree = jax.tree.flatten(outputs_of(case, inputs))
    for index, leaf in enumerate(leaves):
        value = leaf.reshape(-1)[-1 if last else 0]
        spoiled = [*leaves[:index], at_an_end(leaf, value + 1, last), *leaves[index + 1 :]]
        wrong = checks.problem(case, inputs, jax.tree.unflatten(tree, spoiled))
        assert wrong is not None, f"output {index}"
        assert wrong.startswith("wrong: ")


@pytest.mark.parametrize("op", [op for op in OPS if op != "plan"])
def test_nan_is_found(op):
    case = small_case(op, tokens=TOKENS)
    inputs = case.make_inputs()
    leaves, tree = jax.tree.flatten(outputs_of(case, inputs))
    spoiled = jax.tree.unflatten(tree, [at_an_end(leaves[0], np.nan, True), *leaves[1:]])
    assert checks.problem(case, inputs, spoiled).startswith("wrong: ")


@pytest.mark.parametrize("op", ["permute", "sort_chunks", "sort_chunks_grad"])
def test_moves_are_compared_by_bits(op):
    """Minus zero is not zero."""
    case = small_case(op)
    inputs = {
        name: jnp.zeros_like(array) if name in ("x", "gradient") else array
        for name, array in case.make_inputs().items()
    }
    moved = outputs_of(case, inputs)
    assert checks.problem(case, inputs, moved) is None
    wrong = checks.problem(case, inputs, at_an_end(moved, -0.0, True))
    assert "1 elements of" in wrong


def test_a_small_error_everywhere_is_found():
    """Each element is within the limit of the largest error, and all of them together are not."""
    case = small_case("unpermute", tokens=TOKENS)
    inputs = case.make_inputs()
    y = outputs_of(case, inputs)
    limit = checks.TOLERANCES["float32"] * np.sqrt(case.top_k) * np.abs(y).max()
    wrong = checks.problem(case, inputs, (y + 0.8 * limit).astype(y.dtype))
    assert "the RMS error of tokens" in wrong
    assert checks.problem(case, inputs, at_an_end(y, y[-1, -1] + 0.8 * limit, True)) is None


def test_wrong_types():
    case = small_case("unpermute_grad")
    inputs = case.make_inputs()
    d_rows, d_weights = outputs_of(case, inputs)
    problem = lambda outputs: checks.problem(case, inputs, outputs)
    assert "float16[48, 32] is not float32[48, 32]" in problem((np.float16(d_rows), d_weights))
    assert "float32[47, 32] is not" in problem((d_rows[1:], d_weights))
    assert "the outputs are" in problem(d_rows)
    assert "the outputs are" in problem([d_rows, d_weights])


def test_a_plan_that_is_not_stable():
    """Two rows of one group, the other way round: still a permutation, still grouped."""
    case = small_case("plan", tokens=TOKENS)
    inputs = case.make_inputs()
    plan = case.compiled("xla")(inputs)
    row_of = np.array(plan.row_of)
    first, second = np.argwhere(np.asarray(plan.expert_of) == 3)[:2]
    row_of[tuple(first)], row_of[tuple(second)] = row_of[tuple(second)], row_of[tuple(first)]
    wrong = checks.problem(case, inputs, dataclasses.replace(plan, row_of=jnp.asarray(row_of)))
    assert wrong == f"wrong: 2 of {row_of.size} values of `row_of` differ"
