"""The command `triax bench`: a run on the CPU at small sizes, and what is refused before one."""

import contextlib
import json
import sys

import jax
import jax.numpy as jnp
import pytest

from tests.bench.shared import COMMITTED, PLAN, record, result
from triax import cli
from triax.bench import competitors, runner, streams
from triax.bench.cases import OPS
from triax.bench.competitors import Competitor
from triax.bench.suites import LAYERS, SUITES, select
from triax.bench.timing import CallTiming

EVENTS = CallTiming(10.0, 9.0, 11.0, 20, "events", graph_us=4.0)


def fail(text):
    raise RuntimeError(text)


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Runs the command with a file for its record and a time for all; exit status and record."""

    def run(words, timing=EVENTS):
        monkeypatch.setattr(runner, "time_program", lambda *args, **kwargs: timing)
        file = tmp_path / "record.json"
        status = cli.main(["bench", *words.split(), "--json", str(file)])
        return status, json.loads(file.read_text())

    return run


def test_measures_on_the_cpu(tmp_path, capsys):
    file = tmp_path / "made" / "here" / "record.json"
    words = "quick --tokens 8 --no-competitors --ops plan ragged_dot --routing uniform even --json"
    assert cli.main(["bench", *words.split(), str(file)]) == 0
    made = json.loads(file.read_text())
    assert [(r["op"], r["implementation"], r["routing"]) for r in made["results"]] == [
        ("plan", "triax", "uniform"),
        ("ragged_dot", "triax", "even"),
        ("ragged_dot", "dense", "even"),
    ]
    assert all(r["median_us"] > 0 and r["seconds_method"] == "host clock" for r in made["results"])
    assert made["command"] == f"triax bench {words} record.json"
    assert made["machine"]["platform"] == "cpu"
    assert made["complete"]
    told = capsys.readouterr().out
    assert "There is no NVIDIA GPU here" in told
    assert "routing         ms  in a graph" in told
    assert "ragged_dot\n" in told


@pytest.mark.slow("the benchmark is of one Python")
def test_a_wrong_competitor_has_no_speed(bench, monkeypatch, capsys):
    take = lambda i: jnp.take(i["x"], jnp.argsort(i["plan"].row_of.reshape(-1)) // 8, axis=0)

    rivals = {
        "right": lambda case: Competitor(take),
        "wrong": lambda case: Competitor(lambda i: take(i) + 1),
        "failing": lambda case: Competitor(lambda i: fail("no such function\nat all")),
        "large": lambda case: Competitor(lambda i: fail("RESOURCE_EXHAUSTED: Out of memory")),
        "missing": lambda case: fail("it is not installed"),
    }
    monkeypatch.setitem(competitors.TABLE, "permute", rivals)
    status, made = bench("--ops permute --tokens 16 --presets deepseek-v3")
    found = {r["implementation"]: r for r in made["results"]}
    assert list(found) == ["triax", "right", "wrong", "failing"]
    assert found["right"]["median_us"] == 10.0
    assert found["wrong"]["error"].startswith("wrong: ")
    assert found["wrong"]["median_us"] is found["wrong"]["terabytes_per_second"] is None
    assert found["failing"]["error"] == "failed: RuntimeError: no such function"
    assert "missing is left out: RuntimeError: it is not installed" in made["notes"]
    assert any("out of memory: permute" in n and "by large" in n for n in made["notes"])
    assert status == 1
    told = capsys.readouterr().out
    assert all(text in told for text in ("1.00× right", "wrong: error", "failing: error"))


@pytest.mark.slow("the benchmark is of one Python")
def test_a_run_that_ends_early_leaves_the_cases_that_were_finished(bench, tmp_path, monkeypatch):
    """On the disk at any time, for a run that is killed; and in the end, for an interrupted one."""
    seen = []

    def look(case, how, i):
        seen.append(json.loads((tmp_path / "record.json").read_text()))
        raise KeyboardInterrupt

    monkeypatch.setitem(OPS, "router", OPS["router"]._replace(run=look))
    status, made = bench("--ops plan router --tokens 16 --presets mixtral-8x7b")
    for found in (*seen, made):
        assert [r["op"] for r in found["results"]] == ["plan"]
        assert not found["complete"]
    assert (status, len(seen)) == (1, 1)
    assert "interrupted: the record is not whole" in made["notes"]
    assert [*tmp_path.iterdir()] == [tmp_path / "record.json"]


@pytest.mark.slow("the benchmark is of one Python")
def test_fractions_are_of_limits_of_the_same_run(bench, monkeypatch):
    limit = {"bytes": 10**6, "median_us": 1.0}
    monkeypatch.setattr(runner, "is_cuda", lambda device: True)
    monkeypatch.setattr(streams, "find_limit", lambda stream: limit)
    words = "--ops permute --presets mixtral-8x7b --tokens 16 --no-competitors"
    _, made = bench(words)
    (found,) = made["results"]
    assert made["streams"] == [limit]
    assert found["graph_us"] == 4.0
    assert found["fraction_of_stream"] == pytest.approx(found["bytes"] / 10**6 / 10)
    assert found["terabytes_per_second"] == pytest.approx(found["bytes"] / 10e6)
    (host_bound,) = bench(words, CallTiming(10, 9, 11, 20, "host-bound"))[1]["results"]
    assert host_bound["fraction_of_stream"] is None
    monkeypatch.setattr(streams, "find_limit", lambda stream: fail("too little"))
    (note,) = bench(words)[1]["notes"]
    assert note.startswith("no stream limit for permute mixtral-8x7b")
    assert "RuntimeError: too little" in note


def test_matmuls_are_compared_with_dense_ones(bench, capsys):
    words = "--ops ragged_dot --routing even --presets qwen3-235b"
    found = bench(words, CallTiming(50, 50, 50, 3, "bursts"))[1]["results"]
    assert {r["implementation"] for r in found} >= {"triax", "dense", "jax.lax.ragged_dot"}
    assert {r["fraction_of_dense"] for r in found} == {1.0}
    assert found[0]["teraflops_per_second"] > 0
    assert "100.0%" in capsys.readouterr().out


@pytest.mark.slow("the benchmark is of one Python")
def test_memory_and_first_calls_are_asked_for(bench, monkeypatch):
    calls = [{"implementation": "xla", "cached": False, "total_s": 1.0, "parts": {}}]
    monkeypatch.setattr(runner, "measure_first_calls", lambda on_gpu: calls)
    words = "--ops plan --presets mixtral-8x7b --tokens 16 8 --first-call --memory"
    _, made = bench(words)
    assert made["first_call"] == calls
    names = ["triax", "argsort+take", "hand-written vjp", "hand-fused vjp"]
    assert [(m["implementation"], m["tokens"]) for m in made["memory"]] == [(n, 16) for n in names]
    rows_bytes = 16 * 2 * 4096 * 2
    assert all(found["temporary_bytes"] >= rows_bytes for found in made["memory"])


# --- what is selected --------------------------------------------------------------------


def selected(words, monkeypatch):
    found = []
    keep = lambda options, *_: found.append(options) or COMMITTED
    monkeypatch.setattr(runner, "run", keep)
    cli.main(["bench", *words.split()])
    return select(found[0], SUITES[found[0].suite], small=False)


def test_full_is_all_combinations_and_more(monkeypatch):
    cases = selected("full", monkeypatch)
    assert len(cases) == len(set(cases))
    moves = [c for c in cases if c.op == "permute"]
    assert len(moves) == 6 * 2 * 2 + 8
    assert len([c for c in cases if c.op == "router"]) == 6 * 2 + 8
    assert sorted(c.preset for c in cases if c.op == "layer") == sorted(LAYERS)
    assert {(c.tokens, c.hidden, c.experts) for c in cases if not c.preset} == {(524288, 4096, 64)}
    rivals = {(c.op, c.tokens) for c in moves if SUITES["full"].competes(c)}
    assert rivals == {("permute", 16384)}


def test_lists_take_the_place_of_the_suite_s(monkeypatch, capsys):
    words = "--ops unpermute permute --tokens 64 32 --dtypes float32 --routing skewed"
    cases = selected(f"full {words} --presets kimi-k2", monkeypatch)
    assert [(c.op, c.tokens) for c in cases] == [
        (op, tokens) for tokens in (64, 32) for op in ("permute", "unpermute")
    ]
    assert {(c.preset, c.dtype, c.routing) for c in cases} == {("kimi-k2", "float32", "skewed")}
    assert {c.preset for c in selected("--presets kimi-k2", monkeypatch)} == {"kimi-k2"}
    assert len(selected("--presets kimi-k2 --ops sort_chunks", monkeypatch)) == 1
    assert {c.op for c in selected("--ops route router", monkeypatch)} == {"moves", "router"}
    assert "the op `route` is now called `moves`" in capsys.readouterr().err
    assert {c.op for c in selected("scaling", monkeypatch)} == {
        name for name, op in OPS.items() if "uniform" in op.routings and not op.matmuls
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tokens 8k", "8k"),
        ("--tokens 0", "0"),
        ("--ops fast", "fast"),
        ("--presets gpt-2", "gpt-2"),
        ("fast", "'fast' is none of quick, full, scaling, nor FILE:FUNCTION"),
        ("quick record.json", "unrecognized arguments: record.json"),
        ("--json .", "Is a directory"),
        ("--json /dev/null", "`--json` must name a regular file; got /dev/null"),
    ],
)
def test_refused_before_anything_is_measured(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "run", None)
    monkeypatch.chdir(tmp_path)
    with contextlib.suppress(SystemExit):  # of argparse
        assert cli.main(["bench", *words.split()]) == 1
    assert message in capsys.readouterr().err


def test_nothing_to_measure(capsys):
    assert cli.main(["bench", "--ops", "layer", "--routing", "skewed"]) == 1
    assert "leave nothing of the suite" in capsys.readouterr().err


def test_draw(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["draw", "record.json", "plots"]
    assert cli.main(words) == 1
    assert capsys.readouterr().err == "triax: record.json: No such file or directory\n"
    file = tmp_path / "record.json"
    file.write_text(json.dumps(record(result(fraction_of_stream=None), result("jnp.take"))))
    assert cli.main(words) == 0
    assert capsys.readouterr().out == "plots/speedup.png\nplots/speedup.svg\n"
    assert cli.main([*words[:2], "record.json"]) == 1
    assert "File exists" in capsys.readouterr().err
    file.write_text(json.dumps(record(PLAN)))
    assert cli.main(words) == 1
    assert "triax: nothing to draw" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(words) == 1
    assert "`pip install matplotlib`" in capsys.readouterr().err


def test_no_device(monkeypatch, capsys):
    monkeypatch.setattr(jax, "devices", lambda: fail("Unable to initialize 'x'\nfor these reasons"))
    assert cli.main(["bench"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("triax: JAX finds no device to measure on (RuntimeError: ")
    assert said.count("\n") == 1
