"""Runs of small suites on whatever this machine is: what is recorded, and what a failure costs."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from tests.bench.shapes import TINY
from triax.bench import competitors, presets, programs, report, runner, torch_competitor
from triax.bench.competitors import Competitor
from triax.bench.presets import Chunks, Competition, Suite
from triax.bench.programs import OPS
from triax.bench.runner import run
from triax.bench.selection import Request
from triax.bench.timing import Timing

SUITE = Suite(
    presets=("tiny",),
    tokens=(24,),
    routings=("uniform",),
    chunks=Chunks(tokens=24, hidden=32, count=5),
    competition=None,
    target_ms=1.0,
)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setitem(presets.PRESETS, "tiny", TINY)
    use(monkeypatch, SUITE)
    monkeypatch.setattr(torch_competitor, "problem", lambda case: None)
    monkeypatch.setattr(torch_competitor, "OPS", ())


def use(monkeypatch, suite):
    """Makes a suite the quick one, here and on the host."""
    monkeypatch.setitem(presets.SUITES, "quick", suite)
    monkeypatch.setattr(presets, "on_host", lambda suite: suite)


def replace_program(monkeypatch, op, program):
    monkeypatch.setitem(programs.OPS, op, dataclasses.replace(OPS[op], program=program))
    from triax.bench import cases

    cases._compiled.cache_clear()


@pytest.fixture(autouse=True)
def _fresh_programs():
    yield
    from triax.bench import cases

    cases._compiled.cache_clear()


def results_by_op(record):
    return {result["op"]: result for result in record["results"]}


def test_a_record():
    record = run(Request(command="triax bench quick"))
    assert record["schema"] == 1
    assert record["command"] == "triax bench quick"
    assert [result["op"] for result in record["results"]] == list(OPS)
    assert record["versions"]["jax"] == jax.__version__
    assert record["machine"]["platform"] in ("cpu", "cuda")
    assert record["first_call"] == record["memory"] == []
    for result in record["results"]:
        assert result["error"] is None
        assert 0 < result["p10_us"] <= result["median_us"] <= result["p90_us"]
        assert result["samples"] >= 5
        rate = result["bytes"] / result["median_us"] / 1e6
        assert result["terabytes_per_second"] == pytest.approx(rate)
    permute = results_by_op(record)["permute"]
    shape = ("preset", "tokens", "hidden", "experts", "top_k", "dtype", "routing", "implementation")
    assert [permute[key] for key in shape] == [
        *("tiny", 24, 32, 8, 2, "bfloat16", "uniform", "triax"),
    ]
    sort = results_by_op(record)["sort_chunks"]
    assert [sort[key] for key in shape] == [None, 24, 32, 5, 1, "float32", None, "triax"]


def test_on_the_host_nothing_is_compared_with_a_stream():
    record = run(Request(ops=["permute"]))
    if record["machine"]["platform"] != "cpu":
        pytest.skip("this machine has a GPU")
    (result,) = record["results"]
    assert result["stream_us"] is result["fraction_of_stream"] is None
    assert result["seconds_method"] == "host clock"
    assert record["streams"] == []
    assert "no NVIDIA GPU here: sizes are small (24 tokens; --tokens choo" in record["notes"][0]


def test_a_wrong_result_has_no_speed(monkeypatch, capsys):
    right = OPS["permute"].program
    wrong = lambda inputs, *how: right(inputs, *how).at[3, 3].add(1)
    replace_program(monkeypatch, "permute", wrong)
    record = run(Request(ops=["plan", "permute", "unpermute"]))
    found = results_by_op(record)
    assert found["permute"]["error"] == "wrong: 1 elements of rows differ"
    for key in ("median_us", "p10_us", "p90_us", "terabytes_per_second", "seconds_method"):
        assert found["permute"][key] is None
    assert found["permute"]["samples"] == 0
    assert found["plan"]["error"] is found["unpermute"]["error"] is None
    assert "case 3/3: unpermute tiny T=24" in capsys.readouterr().err


def test_a_failure_does_not_stop_the_others(monkeypatch):
    def fail(inputs, *how):
        raise ValueError("INTERNAL: no such thing\nmore of it")

    replace_program(monkeypatch, "plan", fail)
    found = results_by_op(run(Request(ops=["plan", "permute"])))
    assert found["plan"]["error"] == "failed: ValueError: INTERNAL: no such thing"
    assert found["plan"]["median_us"] is None
    assert found["permute"]["error"] is None


def test_too_little_memory_is_a_note_and_no_error(monkeypatch):
    def fail(inputs, *how):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes")

    replace_program(monkeypatch, "plan", fail)
    record = run(Request(ops=["plan", "permute"]))
    assert [result["op"] for result in record["results"]] == ["permute"]
    assert report.is_right(record)
    (note,) = (note for note in record["notes"] if "out of memory" in note)
    assert note.startswith("left out, out of memory: plan tiny T=24")
    assert report.table(record)


def test_what_does_not_fit_is_left_out(monkeypatch):
    monkeypatch.setattr(runner.machine, "memory_limit_bytes", lambda: 6000)
    record = run(Request(ops=["permute", "unpermute_grad"]))
    assert [result["op"] for result in record["results"]] == ["permute"]
    (note,) = (note for note in record["notes"] if "left out" in note)
    assert note.startswith("left out, too large: unpermute_grad tiny")
    assert note.endswith("XLA_PYTHON_CLIENT_MEM_FRACTION raises that")


def test_inputs_are_shared_until_room_is_needed(monkeypatch):
    made = []
    from triax.bench import inputs

    for name, make in list(inputs.MAKERS.items()):
        note = lambda case, seed, name=name, make=make: (made.append(name), make(case, seed))[1]
        monkeypatch.setitem(inputs.MAKERS, name, note)
    ops = ["permute", "unpermute", "unpermute_grad"]
    run(Request(ops=ops))
    assert sorted(made) == ["gradient", "plan", "rows", "weights", "x"]
    made.clear()
    # Enough for each alone, and for `unpermute` beside x: `permute_grad` drops x and weights.
    monkeypatch.setattr(runner.machine, "memory_limit_bytes", lambda: 6200)
    run(Request(ops=["permute", "unpermute", "permute_grad", "route"]))
    assert sorted(made) == ["plan", "rows", "selected_experts", "weights", "weights", "x", "x"]


def test_limits_are_measured_before_the_inputs_are_made(monkeypatch):
    order = []
    monkeypatch.setattr(runner, "is_cuda", lambda device: True)
    monkeypatch.setattr(runner.Limits, "measure", lambda self, case: order.append(case.op))
    monkeypatch.setattr(runner.Limits, "time_us", lambda self, case: 7.0)
    monkeypatch.setattr(
        runner, "time_program", lambda *args, **kwargs: Timing(10.0, 9.0, 11.0, 20, "events")
    )
    make = runner.Case.make_inputs
    monkeypatch.setattr(
        runner.Case,
        "make_inputs",
        lambda self, **how: (order.append("inputs"), make(self, **how))[1],
    )
    (result, _) = run(Request(ops=["permute", "unpermute"]))["results"]
    assert order == ["permute", "unpermute", "inputs", "inputs"]
    assert result["stream_us"] == 7.0
    assert result["fraction_of_stream"] == pytest.approx(0.7)


def test_a_limit_that_is_not_known_is_a_note(monkeypatch):
    from triax.bench import streams

    def fail(stream, target_ms):
        raise MemoryError("out of memory")

    monkeypatch.setattr(runner, "is_cuda", lambda device: True)
    monkeypatch.setattr(streams, "find_limit", fail)
    monkeypatch.setattr(
        runner, "time_program", lambda *args, **kwargs: Timing(10.0, 9.0, 11.0, 20, "events")
    )
    record = run(Request(ops=["plan", "permute", "permute+plan"], competitors=False))
    (note,) = record["notes"]
    assert note.startswith("no fraction of a stream for permute, permute+plan of tiny at 24 tokens")
    assert note.endswith("could not be measured: out of memory")
    assert [result["fraction_of_stream"] for result in record["results"]] == [None] * 3
    assert [result["median_us"] for result in record["results"]] == [10.0] * 3


def test_host_bound_times_are_no_fraction(monkeypatch):
    monkeypatch.setattr(runner, "is_cuda", lambda device: True)
    monkeypatch.setattr(runner.Limits, "measure", lambda self, case: None)
    monkeypatch.setattr(runner.Limits, "time_us", lambda self, case: 7.0)
    monkeypatch.setattr(
        runner, "time_program", lambda *args, **kwargs: Timing(10.0, 9.0, 11.0, 20, "host-bound")
    )
    (result,) = run(Request(ops=["permute"]))["results"]
    assert result["fraction_of_stream"] is None
    assert result["seconds_method"] == "host-bound"


def test_the_time_in_a_graph_is_recorded(monkeypatch):
    timing = Timing(10.0, 9.0, 11.0, 20, "events", graph_us=4.0)
    monkeypatch.setattr(runner, "time_program", lambda *args, **kwargs: timing)
    (result,) = run(Request(ops=["permute"]))["results"]
    assert (result["median_us"], result["graph_us"]) == (10.0, 4.0)


# --- competitors ---------------------------------------------------------------------


@pytest.fixture
def rivals(monkeypatch):
    """Competitors of `permute`: one that is right, one that is wrong, one that fails."""
    use(monkeypatch, dataclasses.replace(SUITE, competition=Competition(ops=("permute",))))
    take = lambda made: jnp.take(made["x"], made["token"], axis=0)

    def prepare(inputs):
        order = jnp.argsort(inputs["plan"].row_of.reshape(-1))
        return {**inputs, "token": order // 2}

    def fail(inputs):
        raise ValueError("no such function")

    found = {
        "right": Competitor(take, prepare),
        "wrong": Competitor(lambda made: take(made) + 1, prepare),
        "failing": Competitor(fail),
    }
    monkeypatch.setattr(competitors, "competitors", lambda case: found)
    monkeypatch.setattr(competitors, "left_out", lambda case: {"another": "it is not installed"})
    return found


def test_competitors_stand_beside(rivals):
    record = run(Request(ops=["permute", "unpermute"]))
    found = {(r["op"], r["implementation"]): r for r in record["results"]}
    assert list(found) == [
        *(("permute", name) for name in ("triax", "right", "wrong", "failing")),
        ("unpermute", "triax"),
    ]
    assert found["permute", "right"]["median_us"] > 0
    assert found["permute", "wrong"]["error"] == "wrong: 1536 elements of rows differ"
    assert found["permute", "wrong"]["median_us"] is None
    assert found["permute", "failing"]["error"] == "failed: ValueError: no such function"
    assert "another is left out: it is not installed" in record["notes"]


def test_a_competitor_s_lack_of_memory_is_a_note(rivals):
    def fail(inputs):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    rivals["failing"] = Competitor(fail)
    record = run(Request(ops=["permute"]))
    assert [r["implementation"] for r in record["results"]] == ["triax", "right", "wrong"]
    (note,) = (note for note in record["notes"] if "out of memory" in note)
    assert "permute tiny T=24 H=32 bfloat16 uniform by failing" in note


def test_competitors_can_be_left_out(rivals):
    record = run(Request(ops=["permute"], competitors=False))
    assert [result["implementation"] for result in record["results"]] == ["triax"]


@pytest.mark.parametrize(
    "competition",
    [
        Competition(presets=("other",)),
        Competition(tokens=(25,)),
        Competition(routings=("skewed",)),
        Competition(ops=("unpermute",)),
        None,
    ],
)
def test_competitors_only_where_the_suite_says(rivals, competition, monkeypatch):
    use(monkeypatch, dataclasses.replace(SUITE, competition=competition))
    record = run(Request(ops=["permute"]))
    assert [result["implementation"] for result in record["results"]] == ["triax"]
    assert any(note.startswith("no competitors: suite `quick`") for note in record["notes"])


def test_torch_brings_its_own_clock(rivals, monkeypatch):
    class Move:
        def __init__(self, case, inputs):
            self.program, self.inputs = case.compiled("xla"), inputs

        def output(self):
            return self.program(self.inputs)

        def time(self, target_ms):
            assert target_ms == SUITE.target_ms
            return Timing(3.0, 2.0, 4.0, 20, "events")

    monkeypatch.setattr(torch_competitor, "OPS", ("permute",))
    monkeypatch.setattr(torch_competitor, "TorchMove", Move)
    last = run(Request(ops=["permute"]))["results"][-1]
    assert (last["implementation"], last["median_us"]) == ("torch.index_select", 3.0)
    monkeypatch.setattr(torch_competitor, "problem", lambda case: "it finds no GPU")
    assert "torch.index_select is left out: it finds no GPU" in run(Request())["notes"]


def test_what_was_measured_before_an_interruption_is_kept(monkeypatch):
    measure = runner._Bench.measure

    def interrupted(self, case):
        if case.op == "unpermute":
            raise KeyboardInterrupt
        measure(self, case)

    monkeypatch.setattr(runner._Bench, "measure", interrupted)
    record = run(Request(ops=["plan", "unpermute", "permute_grad"]))
    assert [result["op"] for result in record["results"]] == ["plan"]
    assert "interrupted: the record is not whole" in record["notes"]
    assert not report.is_right(record)
    assert report.is_right(record | {"complete": True})


# --- first calls and memory ------------------------------------------------------------


def test_first_calls_and_memory_are_asked_for(monkeypatch):
    from triax.bench import first_call, memory

    asked = []
    monkeypatch.setattr(first_call, "measure_first_calls", lambda: [{"cached": False}])
    monkeypatch.setattr(
        memory, "measure_memory", lambda *args: (asked.append(args), {"program": "route+grad"})[1]
    )
    use(monkeypatch, dataclasses.replace(SUITE, tokens=(24, 48, 32)))
    record = run(Request(ops=["plan"], first_call=True, memory=True))
    assert record["first_call"] == [{"cached": False}]
    assert asked == [(TINY, 48, "bfloat16", name) for name in memory.IMPLEMENTATIONS]
    assert len(record["memory"]) == len(asked)


def test_their_failure_is_a_note(monkeypatch):
    from triax.bench import first_call

    def fail():
        raise RuntimeError("no child process")

    monkeypatch.setattr(first_call, "measure_first_calls", fail)
    record = run(Request(ops=["plan"], first_call=True))
    assert record["first_call"] == []
    assert "no first calls: RuntimeError: no child process" in record["notes"]
    assert record["results"][0]["error"] is None


def test_an_implementation_whose_memory_is_not_told_costs_the_others_nothing(monkeypatch):
    from triax.bench import memory

    def measure(preset, tokens, dtype, implementation):
        if implementation == "argsort+take":
            raise RuntimeError("no analysis")
        return {"implementation": implementation}

    monkeypatch.setattr(memory, "measure_memory", measure)
    record = run(Request(ops=["plan"], memory=True))
    others = [name for name in memory.IMPLEMENTATIONS if name != "argsort+take"]
    assert [found["implementation"] for found in record["memory"]] == others
    note = f"no memory of argsort+take at {TINY.name}: RuntimeError: no analysis"
    assert note in record["notes"]
