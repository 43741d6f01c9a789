"""Cases: their inputs, their bytes, and how their runs are chained."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.bench.shapes import ONE, TINY, small_case
from triax import moe
from triax.bench.cases import Case, Stream
from triax.bench.inputs import plan_by_definition, source_rows
from triax.bench.presets import PRESETS, Chunks
from triax.bench.programs import OPS
from triax.testing import assert_same_bits

DEEPSEEK = PRESETS["deepseek-v3"]


def types_of(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


# --- inputs ------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_inputs_follow_from_the_seed(op):
    case = small_case(op)
    first, again, other = case.make_inputs(3), case.make_inputs(3), case.make_inputs(4)
    assert tuple(first) == OPS[op].inputs
    jax.tree.map(assert_same_bits, first, again)
    differ = jax.tree.map(lambda a, b: not np.array_equal(a, b), first, other)
    assert all(any(jax.tree.leaves(differ[name])) for name in first)


def test_a_pool_shares_inputs():
    pool = {}
    rows = small_case("unpermute").make_inputs(pool=pool)["rows"]
    assert set(pool) == {"rows", "plan", "weights"}
    assert small_case("unpermute_grad").make_inputs(pool=pool)["rows"] is rows
    assert "gradient" in pool


def test_values_differ_between_arrays():
    inputs = small_case("route+grad").make_inputs()
    assert not np.array_equal(inputs["x"], inputs["gradient"])
    assert abs(float(inputs["x"].mean())) < 0.2
    assert 0.9 < float(inputs["x"].std()) < 1.4


@pytest.mark.parametrize("preset", [TINY, DEEPSEEK], ids=lambda p: p.name)
def test_uniform_experts_are_distinct(preset):
    case = Case.routed("plan", preset, 512, "bfloat16", "uniform")
    selected = np.asarray(case.make_inputs()["selected_experts"])
    assert all(len(set(row)) == preset.top_k for row in selected.tolist())
    counts = np.bincount(selected.reshape(-1), minlength=preset.experts)
    assert counts.min() > 0
    assert counts.max() < 4 * counts.mean()


def test_skewed_experts_crowd():
    case = Case.routed("plan", DEEPSEEK, 512, "bfloat16", "skewed")
    selected = np.asarray(case.make_inputs()["selected_experts"])
    assert 0.45 < (selected == 0).mean() < 0.55
    assert len(np.unique(selected)) > 200


def test_more_slots_than_experts_end():
    preset = dataclasses.replace(TINY, experts=2, top_k=3)
    selected = Case.routed("plan", preset, 8, "float32", "uniform").make_inputs()
    assert set(np.unique(selected["selected_experts"])) == {0, 1}


def test_weights_sum_up_to_one():
    weights = small_case("route").make_inputs()["weights"]
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-6)
    assert weights.dtype == np.float32


def test_chunks_are_uneven_and_cover_all_rows():
    case = Case.chunked("sort_chunks", Chunks(tokens=1000, hidden=4, count=64), "float32")
    inputs = case.make_inputs()
    assert inputs["split_sizes"].sum() == 1000
    assert len(np.unique(inputs["split_sizes"])) > 8
    assert sorted(inputs["sorted_indices"].tolist()) == list(range(64))


@pytest.mark.parametrize("routing", ["uniform", "skewed"])
def test_the_plan_by_definition_is_the_plan(routing):
    selected = small_case("plan", routing=routing).make_inputs()["selected_experts"]
    expected = moe.make_plan(selected, TINY.experts)
    actual = plan_by_definition(np.asarray(selected), TINY.experts)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(assert_same_bits, actual, expected)


def test_source_rows():
    assert source_rows([2, 0, 3], [2, 1, 0]).tolist() == [2, 3, 4, 0, 1]


# --- programs ----------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("preset", [TINY, ONE], ids=lambda p: p.name)
def test_chained_inputs_fit(op, preset):
    case = small_case(op, "bfloat16", preset=preset)
    inputs = case.make_inputs()
    outputs = case.compiled()(inputs)
    if case.chain is None:
        assert preset.top_k > 1
        return
    following = case.chain(inputs, outputs)
    assert types_of(following) == types_of(inputs)
    # Something that was computed goes in, or the run before could be left out.
    given, made = map(jax.tree.leaves, (following, outputs))
    assert any(leaf is output for leaf in given for output in made)


def test_route_comes_back():
    """With weights that sum up to one, tokens come back as they were."""
    case = small_case("route")
    inputs = case.make_inputs()
    np.testing.assert_allclose(case.compiled()(inputs), inputs["x"], rtol=1e-6)


def test_one_compiled_program_for_both_routings():
    uniform, skewed = (small_case("route", routing=r) for r in ("uniform", "skewed"))
    assert uniform.compiled() is skewed.compiled()
    assert uniform.compiled("xla") is not uniform.compiled()


def test_implementation_is_handed_on():
    case = small_case("permute")
    jaxpr = jax.make_jaxpr(lambda i: case.program(i, "interpret"))(case.make_inputs())
    assert "triton_call" in str(jaxpr)


# --- bytes -------------------------------------------------------------------------

T, H, E, K = 16384, 7168, 256, 8
TOKENS, ROWS, PAIRS, GROUPS = 2 * T * H, 2 * T * H * K, 4 * T * K, 4 * E
BYTES = {
    "plan": (PAIRS, 2 * PAIRS + 3 * GROUPS),
    "permute": (TOKENS + PAIRS + 2 * GROUPS, ROWS),
    "permute+plan": (TOKENS + PAIRS + 2 * GROUPS, ROWS),
    "unpermute": (ROWS + 2 * PAIRS, TOKENS),
    "permute_grad": (ROWS + PAIRS, TOKENS),
    "unpermute_grad": (ROWS + TOKENS + 2 * PAIRS + 2 * GROUPS, ROWS + PAIRS),
}


@pytest.mark.parametrize("op", BYTES)
def test_bytes(op):
    case = Case.routed(op, DEEPSEEK, T, "bfloat16", "uniform")
    assert (case.reads_bytes, case.writes_bytes) == BYTES[op]
    assert case.num_bytes == sum(BYTES[op])


def test_a_route_is_the_sum_of_its_passes():
    case = Case.routed("route+grad", DEEPSEEK, T, "bfloat16", "uniform")
    streams = [stream for stream, _ in case.streams]
    assert streams == [Stream(*ratio, TOKENS) for ratio in ((1, 8), (8, 1), (9, 8), (8, 1))]
    assert sum(s.reads + s.writes for s in streams) == 44
    assert sum(num_bytes for _, num_bytes in case.streams) == case.num_bytes
    assert round(case.num_bytes / TOKENS, 1) == 44
    forward = Case.routed("route", DEEPSEEK, T, "bfloat16", "uniform")
    assert forward.streams == case.streams[:2]


def test_models_of_one_width_share_streams():
    streams = lambda name, op: [
        stream for stream, _ in Case.routed(op, PRESETS[name], T, "bfloat16", "uniform").streams
    ]
    assert streams("kimi-k2", "permute") == streams("deepseek-v3", "permute")
    assert streams("kimi-k2", "unpermute") == streams("kimi-k2", "permute_grad")


def test_streams_of_the_others():
    assert Case.routed("plan", DEEPSEEK, T, "bfloat16", "uniform").streams == ()
    chunks = Case.chunked("sort_chunks", Chunks(T, H, 64), "float32")
    assert chunks.streams == ((Stream(1, 1, 4 * T * H), chunks.num_bytes),)
    assert chunks.num_bytes == 2 * 4 * T * H + 2 * 64 * 4


def test_memory_holds_what_is_read_and_written():
    for op in OPS:
        case = small_case(op, tokens=4096)
        if len(case.streams) == 1:
            assert 0.9 * case.num_bytes < case.memory_bytes < 1.1 * case.num_bytes


def test_label():
    case = Case.routed("permute", DEEPSEEK, 128, "bfloat16", "skewed")
    assert case.label == "permute deepseek-v3 T=128 H=7168 bfloat16 skewed"
    case = Case.chunked("sort_chunks", Chunks(128, 64, 4), "float32")
    assert case.label == "sort_chunks T=128 H=64 float32"
