"""The record as JSON and as a table."""

import json

import pytest

from tests.bench.record import full_record, record, result
from triax.bench import report
from triax.bench.report import is_right, read, table, write
from triax.bridge.errors import ArgumentValueError


def lines_with(text, *words):
    return [line for line in text.splitlines() if all(word in line for word in words)]


def test_there_and_back(tmp_path):
    path = tmp_path / "folder" / "record.json"
    write(full_record(), path)
    assert read(path) == full_record()


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"schema": 2}', "\xff", "[" * 100_000, "9" * 5000]
)
def test_other_files_are_refused(content, tmp_path):
    path = tmp_path / "record.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(ArgumentValueError, match=r"Argument `file` .*record\.json"):
        read(path)


@pytest.mark.parametrize(
    ("change", "lacks"),
    [
        ({"results": None}, "results"),
        ({"machine": {"platform": "cuda"}}, r"machine\.device"),
        ({"complete": "yes", "written": 3}, "written, complete"),
        ({"results": [{"op": "plan", "preset": None}]}, r"results\[0\]\.tokens, .*seconds_method"),
        ({"results": ["plan"]}, r"results\[0\]\.op, "),
        ({"results": [{**result("plan", "x", 8), "tokens": "8"}]}, r"results\[0\]\.tokens\."),
        ({"results": [{**result("plan", "x", 8), "median_us": []}]}, r"results\[0\]\.median_us\."),
        ({"machine": {"device": 3}}, r"machine\.device"),
    ],
)
def test_parts_of_a_record_are_refused(change, lacks, tmp_path):
    path = tmp_path / "record.json"
    write(full_record() | change, path)
    with pytest.raises(ArgumentValueError, match=rf"record\.json lacks {lacks}.*Measure again"):
        read(path)
    path.write_text('{"schema": 1}')
    with pytest.raises(ArgumentValueError, match="lacks written, machine, versions, results"):
        read(path)


def test_a_target_is_checked_before_there_is_a_record(tmp_path, monkeypatch):
    path = tmp_path / "made" / "here" / "record.json"
    report.check_target(path)
    assert list(path.parent.iterdir()) == []
    with pytest.raises(ArgumentValueError, match=r"`--json` must name a file .*which is a folder"):
        report.check_target(path.parent)
    path.touch()
    report.check_target(path)
    with pytest.raises(ArgumentValueError, match=r"`--json` needs a folder .*record\.json: it is"):
        report.check_target(path / "record.json")
    with monkeypatch.context() as patch:
        patch.setattr(report.os, "access", lambda path, mode: False)
        with pytest.raises(ArgumentValueError, match=r"`--json` .*which must not be written"):
            report.check_target(path)

    def fail(dir):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(report.tempfile, "TemporaryFile", fail)
    with pytest.raises(ArgumentValueError, match=r"`--json` needs a folder .*Permission denied"):
        report.check_target(path.with_name("other.json"))


def test_a_missing_file(tmp_path):
    with pytest.raises(ArgumentValueError, match=r"Argument `file` cannot be read: .*none\.json"):
        read(tmp_path / "none.json")


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


def test_ops_and_shapes_stand_in_order():
    text = table(full_record())
    ops = [line for line in text.splitlines() if line and not line.startswith(" ")][1:]
    assert ops[:3] == ["plan", "permute", "permute+plan"]
    rows = lines_with(text, "mixtral-8x7b")
    assert [row.split()[1] for row in rows[:3]] == ["128", "8192", "16384"]
    (sort, grad) = lines_with(text, "64 chunks×4096")
    assert sort.split()[2:4] == ["524288", "bfloat16"]
    assert grad


def test_how_many_times_as_fast():
    text = table(
        record(
            [
                result("permute", "deepseek-v3", 128, median_us=100.0),
                result("permute", "deepseek-v3", 128, "jnp.take", median_us=250.0),
                result("permute", "deepseek-v3", 128, "torch", median_us=90.0),
            ]
        )
    )
    (row,) = lines_with(text, "deepseek-v3")
    assert row.endswith("  2.50× jnp.take, 0.90× torch")


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


def test_a_host_that_could_not_keep_up_is_told():
    text = table(
        record([result("permute", "kimi-k2", 128, median_us=50.0, seconds_method="host-bound")])
    )
    (row,) = lines_with(text, "kimi-k2")
    assert row.split()[4:] == ["≤50.00", "-", "-"]
    assert lines_with(text, "≤ the host could not keep up")


@pytest.mark.parametrize("side", [0, 1])
def test_a_host_bound_time_is_compared_with_nothing(side):
    results = [
        result("permute", "kimi-k2", 128, median_us=50.0),
        result("permute", "kimi-k2", 128, "jnp.take", median_us=100.0),
    ]
    results[side]["seconds_method"] = "host-bound"
    text = table(record(results))
    assert "2.00×" not in text
    (row,) = lines_with(text, "kimi-k2")
    assert row.endswith(f"jnp.take {'≤' * side}100.00 µs")


def test_times_of_the_host_s_clock_have_no_rate_and_no_ratio():
    text = table(
        record(
            [
                result("permute", "kimi-k2", 128, median_us=50.0, seconds_method="host clock"),
                result(
                    "permute",
                    "kimi-k2",
                    128,
                    "jnp.take",
                    median_us=75.0,
                    seconds_method="host clock",
                ),
            ]
        )
    )
    (row,) = lines_with(text, "kimi-k2")
    assert row.split()[4:] == ["50.00", "-", "-", "jnp.take", "75.00", "µs"]
    assert "times as fast" not in text


def test_the_time_in_a_graph_has_a_column_where_there_is_one():
    results = [
        result("plan", "kimi-k2", 128, median_us=200.0, graph_us=3.456),
        result("plan", "kimi-k2", 8192, median_us=400.0, graph_us=None),
        result("plan", "kimi-k2", 128, "transformer_engine", median_us=2500.0, graph_us=7.0),
        result("permute", "kimi-k2", 128, median_us=100.0, graph_us=None),
    ]
    text = table(record(results))
    small, large, permute = lines_with(text, "kimi-k2")
    assert small.split()[4:] == ["200.00", "3.46", "5.00", "12.50×", "transformer_engine"]
    assert large.split()[4:] == ["400.00", "-", "2.50"]
    assert permute.split()[4:] == ["100.00", "10.00"]
    (head,) = lines_with(text, "tokens", "in a graph")
    assert head.index("in a graph") + len("in a graph") == small.index("3.46") + 4
    assert lines_with(text, "in a graph: µs of one of many runs inside one program")
    assert max(map(len, text.splitlines())) <= report.WIDTH
    assert "in a graph" not in table(record(results[3:]))


def test_marks_are_explained_where_they_stand():
    plan = result("plan", "kimi-k2", 128, median_us=5.0, seconds_method="graph")
    text = table(record([plan]))
    assert "*5.00" in text
    assert lines_with(text, "* one of many runs inside one program")
    assert "one of many runs" not in table(record([result("plan", "kimi-k2", 128)]))


def test_first_calls_memory_and_notes():
    entry = record([result("plan", "kimi-k2", 128)]) | {
        "first_call": [
            {"implementation": "triax", "cached": False, "total_s": 3.21, "parts": {"run": 0.5}},
            {"implementation": "xla", "cached": True, "total_s": None, "parts": {}},
        ],
        "memory": [
            {
                "program": "route+grad",
                "preset": "kimi-k2",
                "tokens": 128,
                "dtype": "bfloat16",
                "implementation": "triax",
                "argument_bytes": 1,
                "output_bytes": 1,
                "temporary_bytes": 2.5e9,
            }
        ],
        "notes": ["something is left out: " + "of all that there is " * 9],
    }
    text = table(entry)
    assert lines_with(text, "triax", "nothing cached", "3.21 s", "run 0.50")
    assert lines_with(text, "xla", "all cached", "error")
    assert lines_with(text, "route+grad", "temporary   2.50 GB")
    assert lines_with(text, "something is left out")
    assert max(map(len, text.splitlines())) <= report.WIDTH


def test_what_went_wrong_with_first_calls_is_told_and_counts():
    entry = {"implementation": "xla", "cached": False, "total_s": 1.0, "parts": {}}
    failed = {"total_s": None, "error": "first_call_program.py failed: " + "ImportError: no " * 9}
    noted = {"note": "no GPU: only the path of plain JAX can be measured"}
    whole = record([result("plan", "kimi-k2", 128)])
    text = table(whole | {"first_call": [entry | failed, entry | noted, entry | noted]})
    assert lines_with(text, "first_call_program.py failed: ImportError: no")
    assert max(map(len, text.splitlines())) <= report.WIDTH
    assert text.count("no GPU: only the path of plain JAX") == 1
    assert not is_right(whole | {"first_call": [entry, entry | failed]})
    assert is_right(whole | {"first_call": [entry, entry | noted]})


def test_a_record_is_plain_json():
    assert json.loads(json.dumps(full_record())) == full_record()
