"""`make bench`: a run on the CPU at small sizes, and what is refused before one."""

import json

import jax.numpy as jnp
import pytest

from benchmarks.harness.inputs import LAYERS
from benchmarks.harness.streams import Stream
from benchmarks.ops import competitors, run
from benchmarks.ops.cases import OPS
from benchmarks.ops.competitors import Competitor
from benchmarks.ops.suites import SUITES, select
from tests.benchmarks.shared import COMMITTED, PLAN, record, result, small_case
from triax.benchmark import CallTiming

EVENTS = CallTiming(10.0, 9.0, 11.0, 20, "events")


def fail(text):
    raise RuntimeError(text)


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Runs the command with a file for its record and a time for all; exit status and record."""

    def bench(words, timing=EVENTS, graph_us=4.0):
        monkeypatch.setattr(run, "time_program", lambda *args, **kwargs: timing)
        monkeypatch.setattr(run, "one_of_many_us", lambda *args: graph_us)
        file = tmp_path / "record.json"
        status = run.main([*words.split(), "--json", str(file)])
        return status, json.loads(file.read_text())

    return bench


@pytest.mark.slow("it tests a tool, not the package")
def test_measures_on_the_cpu(tmp_path, capsys):
    file = tmp_path / "made" / "here" / "record.json"
    words = "quick --tokens 8 --no-competitors --ops plan ragged_dot --routing uniform even --json"
    assert run.main([*words.split(), str(file)]) == 0
    made = json.loads(file.read_text())
    assert [(r["op"], r["implementation"], r["routing"]) for r in made["results"]] == [
        ("plan", "triax", "uniform"),
        ("ragged_dot", "triax", "even"),
        ("ragged_dot", "dense", "even"),
    ]
    assert all(r["median_us"] > 0 and r["seconds_method"] == "host clock" for r in made["results"])
    assert made["command"] == f"make bench ARGS='{words} record.json'"
    assert made["device"] == "cpu"
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
    monkeypatch.setattr(run, "is_cuda", lambda device: True)
    monkeypatch.setattr(run, "find_limit", lambda stream: limit)
    words = "--ops permute --presets llama4-maverick --tokens 16 --no-competitors"
    _, made = bench(words)
    (found,) = made["results"]
    assert made["streams"] == [limit]
    assert found["graph_us"] == 4.0
    assert found["fraction_of_stream"] == pytest.approx(found["bytes"] / 10**6 / 10)
    assert found["terabytes_per_second"] == pytest.approx(found["bytes"] / 10e6)
    (host_bound,) = bench(words, CallTiming(10, 9, 11, 20, "host-bound"), None)[1]["results"]
    assert host_bound["fraction_of_stream"] is None
    monkeypatch.setattr(run, "find_limit", lambda stream: fail("too little"))
    (note,) = bench(words)[1]["notes"]
    assert note.startswith("no stream limit for permute llama4-maverick")
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
    monkeypatch.setattr(run, "measure_first_calls", lambda on_gpu: calls)
    words = "--ops plan --presets mixtral-8x7b --tokens 16 8 --first-call --memory"
    _, made = bench(words)
    assert made["first_call"] == calls
    names = ["triax", "argsort+take", "hand-written vjp", "hand-fused vjp"]
    assert [(m["implementation"], m["tokens"]) for m in made["memory"]] == [(n, 16) for n in names]
    rows_bytes = 16 * 2 * 4096 * 2
    assert all(found["temporary_bytes"] >= rows_bytes for found in made["memory"])


def selected(words, monkeypatch):
    found = []
    keep = lambda options, *_: found.append(options) or COMMITTED
    monkeypatch.setattr(run, "run", keep)
    run.main(words.split())
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


def test_lists_take_the_place_of_the_suite_s(monkeypatch):
    words = "--ops unpermute permute --tokens 64 32 --dtypes float32 --routing skewed"
    cases = selected(f"full {words} --presets kimi-k2", monkeypatch)
    assert [(c.op, c.tokens) for c in cases] == [
        (op, tokens) for tokens in (64, 32) for op in ("permute", "unpermute")
    ]
    assert {(c.preset, c.dtype, c.routing) for c in cases} == {("kimi-k2", "float32", "skewed")}
    assert {c.preset for c in selected("--presets kimi-k2", monkeypatch)} == {"kimi-k2"}
    assert len(selected("--presets kimi-k2 --ops sort_chunks", monkeypatch)) == 1
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
        ("fast", "argument suite: invalid choice: 'fast'"),
        ("quick record.json", "unrecognized arguments: record.json"),
    ],
)
def test_refused_before_anything_is_measured(words, message, monkeypatch, capsys):
    monkeypatch.setattr(run, "run", None)
    with pytest.raises(SystemExit):
        run.main(words.split())
    assert message in capsys.readouterr().err


def test_nothing_to_measure():
    with pytest.raises(SystemExit, match="leave nothing of the suite"):
        run.main(["--ops", "layer", "--routing", "skewed"])


def test_draw(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "record.json"
    file.write_text(json.dumps(record(result(fraction_of_stream=None), result("jnp.take"))))
    assert run.main(["--draw", "record.json", "plots"]) == 0
    assert capsys.readouterr().out == "plots/speedup.png\nplots/speedup.svg\n"
    file.write_text(json.dumps(record(PLAN)))
    assert run.main(["--draw", "record.json", "plots"]) == 1
    assert "nothing to draw" in capsys.readouterr().out


def test_limits_are_measured_once_and_added_up(monkeypatch):
    rates = iter([10.0, 20.0])
    monkeypatch.setattr(
        run, "find_limit", lambda stream: {"bytes": 10**4, "median_us": next(rates)}
    )
    known = {}
    # As far as the ops' bytes go at the rate of the stream.
    (_, there), (_, back) = small_case("moves").passes
    for op, us in [("permute", 10 * there), ("moves", 10 * there + 20 * back)] * 2:
        assert run.limit_us(small_case(op), known) == pytest.approx(us / 10**4)
    assert run.limit_us(small_case("plan"), known) is None
    assert {type(stream) for stream in known} == {Stream}
