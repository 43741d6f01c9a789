"""Which cases a run has."""

import itertools

import pytest

from triax.bench.presets import PRESETS, SUITES
from triax.bench.programs import CHUNK_OPS, OPS
from triax.bench.selection import Request, competes, select
from triax.bridge.errors import ArgumentValueError

QUICK, FULL = SUITES["quick"], SUITES["full"]


def test_quick_is_all_ops_at_one_shape():
    cases = select(Request(), QUICK)
    assert [case.op for case in cases] == list(OPS)
    assert {(c.preset.name, c.tokens) for c in cases if c.preset} == {("deepseek-v3", 8192)}
    assert {(c.tokens, c.hidden, c.experts) for c in cases if not c.preset} == {(524288, 4096, 64)}
    assert {c.dtype for c in cases if c.preset} == {"bfloat16"}
    assert {c.dtype for c in cases if not c.preset} == {"float32"}


def test_full_is_all_combinations_and_more_shape_by_shape():
    cases = select(Request(suite="full"), FULL)
    routed = len(OPS) - len(CHUNK_OPS)
    num_shapes = 6 * 2 * 2 + 8
    assert len(cases) == len(set(cases)) == num_shapes * routed + len(CHUNK_OPS)
    shapes = [(c.preset, c.tokens, c.routing) for c in cases]
    changes = sum(a != b for a, b in itertools.pairwise(shapes))
    assert changes == num_shapes  # nobody comes back to a shape: inputs are made once
    more = {(c.preset.name, c.tokens, c.routing) for c in cases if c.preset and c.tokens == 16384}
    assert more == {
        (name, 16384, "uniform") for name in ("deepseek-v3", "qwen3-235b", "mixtral-8x7b")
    }


@pytest.mark.parametrize(
    "lists", [{"presets": ["kimi-k2"]}, {"tokens": [8192]}, {"routings": ["skewed"]}], ids=str
)
def test_no_more_than_was_asked_for(lists):
    cases = select(Request(suite="full", **lists), FULL)
    assert {c.tokens for c in cases if c.preset} <= {8192, 32768}


def test_lists_take_the_place_of_the_suite_s():
    request = Request(
        ops=["unpermute", "permute"],
        presets=["kimi-k2"],
        tokens=[64, 32],
        dtypes=["float32"],
        routings=["skewed"],
    )
    cases = select(request, QUICK)
    assert [(c.op, c.tokens) for c in cases] == [
        ("permute", 64),
        ("unpermute", 64),
        ("permute", 32),
        ("unpermute", 32),
    ]
    assert {(c.preset, c.dtype, c.routing) for c in cases} == {
        (PRESETS["kimi-k2"], "float32", "skewed")
    }


def test_what_is_named_twice_is_measured_once():
    twice = Request(
        ops=["unpermute", "plan", "unpermute", "sort_chunks"],
        presets=["kimi-k2", "kimi-k2"],
        tokens=[64, 32, 64],
        dtypes=["float32", "float16", "float32"],
        routings=["skewed", "skewed"],
    )
    cases = select(twice, QUICK)
    assert len(cases) == len(set(cases)) == 2 * 2 * 2 + 2
    assert list(dict.fromkeys(c.tokens for c in cases if c.preset)) == [64, 32]
    assert list(dict.fromkeys(c.dtype for c in cases)) == ["float32", "float16"]


def test_who_competes():
    cases = select(Request(suite="full"), FULL)
    found = {(c.op, c.preset and c.preset.name, c.tokens) for c in cases if competes(c, FULL)}
    ops, names = ("route+grad", "permute", "unpermute"), ("deepseek-v3", "qwen3-235b")
    routed = {(op, name, 16384) for op in ops for name in (*names, "mixtral-8x7b")}
    assert found == routed | {("sort_chunks", None, 524288)}
    assert all(competes(case, QUICK) for case in cases)
    assert not any(competes(case, SUITES["scaling"]) for case in cases)


def test_chunk_sorts_go_with_their_ops():
    ops = lambda request: {case.op for case in select(request, QUICK)}
    assert not ops(Request(presets=["kimi-k2"])) & set(CHUNK_OPS)
    assert ops(Request(presets=["kimi-k2"], ops=["sort_chunks"])) == {"sort_chunks"}
    assert ops(Request(ops=["plan"])) == {"plan"}


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ({"ops": ["permit"]}, r"`--ops` must name some of plan, .*; got 'permit'"),
        ({"presets": ["kimi"]}, r"`--presets` must name some of .*; got 'kimi'"),
        ({"routings": ["even"]}, r"`--routing` must name some of uniform, skewed; got 'even'"),
        ({"dtypes": ["int8"]}, r"`--dtypes` must name some of bfloat16, .*; got 'int8'"),
        ({"tokens": [0]}, r"`--tokens` must be at least 1"),
    ],
)
def test_names_that_are_none(lists, message):
    with pytest.raises(ArgumentValueError, match=message):
        select(Request(**lists), QUICK)


def test_nothing_left():
    with pytest.raises(
        ArgumentValueError, match=r"`--ops sort_chunks` leaves nothing of suite `scal"
    ):
        select(Request(suite="scaling", ops=["sort_chunks"]), SUITES["scaling"])
