"""The record as a table."""

import json
from pathlib import Path

import pytest

from tests.bench.record import full_record, record, result
from triax.bench import report
from triax.bench.report import is_right, read, table
from triax.bridge.errors import ArgumentValueError

COMMITTED = Path(__file__).parents[2] / "benchmarks" / "h200.json"


def lines_with(text, *words):
    return [line for line in text.splitlines() if all(word in line for word in words)]


def test_the_committed_record():
    text = table(read(COMMITTED))
    assert max(map(len, text.splitlines())) <= report.WIDTH + 60  # first calls are one line each
    assert lines_with(text, "deepseek-v3", "16384", "7.26× argsort+take,")
    assert lines_with(text, "first call", "triax", "all cached", "0.44 s")
    assert lines_with(text, "memory", "deepseek-v3", "triax", "3.76 GB")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"schema": 2}', "\xff", "[" * 100_000])
def test_other_files_are_refused(content, tmp_path):
    path = tmp_path / "record.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(ArgumentValueError, match=r"Argument `file` .*record\.json"):
        read(path)
    path.write_text(json.dumps(full_record()))
    assert read(path) == full_record()


def test_a_row():
    text = table(
        record([result("permute", "deepseek-v3", 16384, median_us=571.234, fraction=0.951)])
    )
    (row,) = lines_with(text, "deepseek-v3")
    figures = ["deepseek-v3", "16384", "bfloat16", "uniform", "571.23", "1.75", "95.1%"]
    assert row.split() == figures
    (head,) = lines_with(text, "tokens")
    ends = lambda line, words: [line.index(word) + len(word) for word in words]
    assert ends(head, ["tokens", "µs", "TB/s", "stream"]) == ends(
        row, ["16384", "571.23", "1.75", "95.1%"]
    )
    assert text.startswith("NVIDIA H200; triax 0.1, jax 0.11, triton 3; 2026-11-21T15:00:00Z\n")


def test_a_row_of_matmuls():
    more = {"teraflops_per_second": 700.04, "fraction_of_dense": 0.913, "seconds_method": "bursts"}
    text = table(record([result("ragged_dot", "qwen3-235b", 8192, **more)]))
    (row,) = lines_with(text, "qwen3-235b")
    assert row.split()[4:] == ["100.00", "700.0", "91.3%"]
    assert lines_with(text, "TFLOP/s", "dense")
    assert lines_with(text, "bursts")


def test_many_competitors_take_several_lines():
    names = ["argsort+take", "hand-written vjp", "transformer_engine", "torch.index_select"]
    results = [
        result("route+grad", "llama4-maverick", 16384, name, median_us=1e4)
        for name in ["triax", *names]
    ]
    text = table(record(results))
    assert max(map(len, text.splitlines())) <= report.WIDTH
    for name in names:
        assert len(lines_with(text, f"1.00× {name}")) == 1
    (head,) = lines_with(text, "tokens")
    starts = {line.index("1.00×") for line in lines_with(text, "1.00×")}
    assert starts == {head.index("times as fast as")}


def test_a_wrong_result_prints_no_speed():
    wrong = {"median_us": None, "error": "wrong: 3 elements of rows differ", "seconds_method": None}
    results = [
        result("permute", "kimi-k2", 128, **wrong),
        result("permute", "kimi-k2", 128, "jnp.take", median_us=250.0),
        result("unpermute", "kimi-k2", 128),
        result("unpermute", "kimi-k2", 128, "jnp.take", **wrong),
    ]
    text = table(record(results))
    own, other = lines_with(text, "kimi-k2", "uniform")
    assert own.split()[4:] == ["error", "jnp.take", "250.00", "µs"]
    assert other.endswith("jnp.take: error")
    for who in ("permute", "unpermute"):
        shape = "T=128 H=7168 bfloat16"
        assert lines_with(text, f"error: {who} kimi-k2 {shape} ", "3 elements of rows differ")
    assert not is_right(record(results))
    assert is_right(record(results[2:3]))


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(("method", "mark"), [("host-bound", "≤"), ("host clock", "")])
def test_a_time_of_the_host_is_compared_with_nothing(side, method, mark):
    results = [
        result("permute", "kimi-k2", 128, median_us=50.0),
        result("permute", "kimi-k2", 128, "jnp.take", median_us=100.0),
    ]
    results[side]["seconds_method"] = method
    text = table(record(results))
    assert "2.00×" not in text
    (row,) = lines_with(text, "kimi-k2")
    assert row.endswith(f"jnp.take {mark * side}100.00 µs")
    if side == 0:
        assert row.split()[4:7] == [f"{mark}50.00", "-", "-"]


def test_times_in_a_graph_have_a_column():
    results = [
        result("plan", "kimi-k2", 128, median_us=7.0, graph_us=3.5),
        result("plan", "kimi-k2", 512, median_us=9.0, seconds_method="graph"),
    ]
    text = table(record(results))
    first, second = lines_with(text, "kimi-k2")
    assert first.split()[4:6] == ["7.00", "3.50"]
    assert second.split()[4:6] == ["*9.00", "-"]
    assert lines_with(text, "in a graph: µs of one")


def test_what_went_wrong_with_first_calls_is_told_and_counts():
    entry = {"implementation": "xla", "cached": False, "total_s": None, "parts": {}, "error": "no"}
    whole = record([result("plan", "kimi-k2", 128)]) | {"first_call": [entry | {"note": "no GPU"}]}
    assert lines_with(table(whole), "first call", "xla", "error", "no")
    assert lines_with(table(whole), "no GPU")
    assert not is_right(whole)
