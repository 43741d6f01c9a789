"""The record as a table."""

import pytest

from benchmarks.ops.report import WIDTH, is_right, table
from tests.benchmarks.shared import COMMITTED, PLAN, record, result


def lines_with(text, *words):
    return [line for line in text.splitlines() if all(word in line for word in words)]


def row_of(*results, head=4):
    """What the one row of a table has after its shape."""
    (row,) = lines_with(table(record(*results)), f"  {results[0]['preset']}", results[0]["routing"])
    return row.split(maxsplit=head)[head]


def test_the_committed_record():
    text = table(COMMITTED)
    (row,) = lines_with(text, "deepseek-v3", "16384", "7.26× argsort+take,")
    (head,) = {line for line in lines_with(text, "tokens", "stream", "times") if "graph" in line}
    assert lines_with(text, "1.44× hand-fused vjp")
    assert head.index("times as fast as") == row.index("7.26×")
    assert lines_with(text, "in a graph: µs of one of many runs")
    assert lines_with(text, "first call", "triax", "all cached", "0.44 s")
    assert lines_with(text, "memory", "deepseek-v3", "triax", "3.76 GB")
    assert all(len(line) <= WIDTH for line in text.splitlines() if "first call" not in line)


def test_rows_of_moves_and_of_matmuls():
    move = result(median_us=571.234, terabytes_per_second=1.754, fraction_of_stream=0.951)
    assert row_of(move).split() == ["571.23", "-", "1.75", "95.1%"]
    more = {"teraflops_per_second": 700.04, "fraction_of_dense": 0.913, "seconds_method": "bursts"}
    text = table(record(result(op="ragged_dot", median_us=9.0, **more)))
    assert lines_with(text, " 9.00 ", " 700.0 ", " 91.3%")
    assert lines_with(text, "TFLOP/s", "dense")
    assert lines_with(text, "bursts")
    star = result(like=PLAN, median_us=9.0, graph_us=9.0, seconds_method="graph")
    assert row_of(star).split()[:2] == ["*9.00", "9.00"]


def test_a_wrong_result_prints_no_speed():
    wrong = {"median_us": None, "error": "wrong: 3 elements differ", "seconds_method": None}
    results = [result(**wrong), result("jnp.take", median_us=250.0)]
    assert row_of(*results).split() == ["error", "-", "-", "-", "jnp.take", "250.00", "µs"]
    assert row_of(result(), result("jnp.take", **wrong)).endswith("jnp.take: error")
    text = table(record(*results))
    assert lines_with(text, "error: permute mixtral-8x7b T=8192 H", "uniform triax: wrong: 3 e")
    assert not is_right(record(*results))
    assert is_right(record(*results[1:]))
    failed = {"implementation": "xla", "cached": False, "total_s": None, "parts": {}, "error": "no"}
    assert not is_right(record(first_call=[failed]))
    assert lines_with(table(record(first_call=[failed])), "first call", "xla", "error", "no")


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(
    ("method", "times"),
    [("host-bound", ("≤50.00", "≤100.00 µs")), ("host clock", ("0.050", "0.100 ms"))],
)
def test_a_time_of_the_host_is_compared_with_nothing(side, method, times):
    results = [result(median_us=50.0), result("jnp.take", median_us=100.0)]
    results[side]["seconds_method"] = method
    assert row_of(*results).endswith(f"jnp.take {times[1] if side else '100.00 µs'}")
    if side == 0:
        assert row_of(*results).split()[:4] == [times[0], "-", "-", "-"]
