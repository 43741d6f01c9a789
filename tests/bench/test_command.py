"""The command `triax bench`: its words and flags, and what is refused before a run."""

import json
import sys
from types import SimpleNamespace

import pytest

from tests.bench.record import full_record, record, result
from triax import cli
from triax.bench import plots, runner
from triax.bench.cases import ROUTINGS
from triax.bench.presets import PRESETS, SUITES
from triax.bench.programs import OPS


@pytest.fixture
def bench(monkeypatch):
    """What `triax bench` asks to be run, and the record that it is given for it."""
    asked = SimpleNamespace(record=full_record(), request=None, drawn=None)

    def run(request):
        asked.request = request
        return asked.record

    def draw(record, folder):
        asked.drawn = record
        return [folder / "speedup.png"]

    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setattr(plots, "draw", draw)
    return asked


def test_runs_a_suite(bench, capsys):
    assert cli.main(["bench"]) == 0
    request = bench.request
    assert (request.suite, request.command) == ("quick", "triax bench")
    assert request.ops is request.presets is request.tokens is request.dtypes is None
    assert request.competitors
    assert not request.first_call
    assert not request.memory
    assert "route+grad\n" in capsys.readouterr().out


def test_hands_on_what_it_is_told(bench):
    words = "bench full --ops plan permute --presets kimi-k2 --tokens 64 128 --dtypes float32"
    words += " --routing skewed --no-competitors --first-call --memory"
    assert cli.main(words.split()) == 0
    request = bench.request
    assert request.suite == "full"
    assert (request.ops, request.presets) == (["plan", "permute"], ["kimi-k2"])
    assert (request.tokens, request.dtypes) == ([64, 128], ["float32"])
    assert request.routings == ["skewed"]
    assert not request.competitors
    assert request.first_call
    assert request.memory
    assert request.command == f"triax {words}"


@pytest.mark.parametrize("join", [" ", "="])
def test_a_record_names_no_folder(bench, tmp_path, join):
    words = f"bench quick --json{join}{tmp_path / 'record.json'}"
    assert cli.main(words.split()) == 0
    assert bench.request.command == f"triax bench quick --json{join}record.json"


def test_writes_and_draws(bench, tmp_path, capsys):
    file = tmp_path / "record.json"
    assert cli.main(["bench", "--json", str(file), "--plots", str(tmp_path / "plots")]) == 0
    assert json.loads(file.read_text()) == bench.drawn == bench.record
    assert str(tmp_path / "plots" / "speedup.png") in capsys.readouterr().out
    bench.drawn = None
    assert cli.main(["bench", "draw", str(file), "--plots", str(tmp_path)]) == 0
    assert bench.drawn == bench.record
    assert capsys.readouterr().out == f"{tmp_path / 'speedup.png'}\n"


def test_fails_where_a_result_is_wrong(bench, tmp_path, capsys):
    bench.record["results"][0] |= {"error": "wrong: 1 elements of rows differ", "median_us": None}
    file = tmp_path / "record.json"
    assert cli.main(["bench", "--json", str(file)]) == 1
    assert "wrong: 1 elements of rows differ" in capsys.readouterr().out
    assert file.exists()


@pytest.mark.parametrize(
    "words",
    ["draw FILE --plots FOLDER", "draw --plots FOLDER FILE", "--plots FOLDER draw FILE"],
)
def test_words_stand_anywhere_between_flags(words, bench, tmp_path):
    file = tmp_path / "record.json"
    file.write_text(json.dumps(bench.record))
    words = words.replace("FILE", str(file)).replace("FOLDER", str(tmp_path / "plots"))
    assert cli.main(["bench", *words.split()]) == 0
    assert bench.drawn == bench.record
    assert cli.main(["bench", "--no-competitors", "full"]) == 0
    assert bench.request.suite == "full"


def test_lists_with_commas_and_names_given_twice(bench):
    words = "bench --tokens 128,8192 64 128 --ops plan,permute --ops plan --dtypes float32,"
    assert cli.main(words.split()) == 0
    assert bench.request.tokens == [128, 8192, 64]
    assert bench.request.ops == ["plan", "permute"]
    assert bench.request.dtypes == ["float32"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tokens 8k", "`--tokens` must be whole numbers from 1, such as 128,8192; got '8k'"),
        ("--tokens 128 0", "`--tokens` must be whole numbers from 1, such as 128,8192; got '0'"),
        (
            f"--tokens {'9' * 5000}",
            "`--tokens` must be whole numbers from 1, such as 128,8192; got",
        ),
        ("--tokens 128 full", "Put that first: triax bench full --tokens ..."),
        ("--ops ,", "`--ops` must name something; got ','"),
        ("fast", "`SUITE` must be one of quick, full, scaling, or draw for a FILE; got 'fast'"),
        ("quick record.json", "`triax bench quick` takes nothing more; got 'record.json'"),
        ("draw", "lacks a FILE that --json wrote and --plots FOLDER."),
        ("draw record.json", "`triax bench draw FILE --plots FOLDER` lacks --plots FOLDER."),
        ("--plots plots draw", "lacks a FILE that --json wrote."),
        ("draw a.json b.json --plots plots", "takes nothing more; got 'b.json'"),
        ("draw none.json --plots plots", "Argument `file` cannot be read: none.json"),
        ("--json .", "`--json` must name a file to write; got ., which is a folder"),
        ("--json file/record.json", "`--json` needs a folder that can be written to; got file:"),
        ("--plots file", "`--plots` needs a folder that can be written to; got file: it is a file"),
    ],
)
def test_refused_before_anything_is_measured(words, message, bench, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert cli.main(["bench", *words.split()]) == 1
    assert message in capsys.readouterr().err
    assert bench.request is bench.drawn is None


def test_a_disk_that_is_full_costs_the_file_and_not_the_table(bench, capsys):
    assert cli.main(["bench", "--json", "/dev/full"]) == 1
    out, err = capsys.readouterr()
    assert "deepseek-v3" in out
    assert err == "triax: No space left on device\n"


@pytest.mark.parametrize(
    "error", [RuntimeError("Unable to initialize backend 'x'\nfor these reasons"), AssertionError()]
)
def test_no_device(error, monkeypatch, capsys):
    def fail():
        raise error

    monkeypatch.setattr("triax.bench.runner.jax.devices", fail)
    assert cli.main(["bench"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"triax: JAX finds no device to measure on ({type(error).__name__}: ")
    assert said.count("\n") == 1


def test_matplotlib_is_missed_before_anything_is_measured(bench, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["bench", "--plots", str(tmp_path)]) == 1
    assert "pip install 'triax[bench]'" in capsys.readouterr().err
    assert bench.request is None


def test_nothing_to_draw_is_told(bench, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plots, "draw", lambda record, folder: [])
    bench.record = record([result("plan", "kimi-k2", 128)])
    file = tmp_path / "record.json"
    assert cli.main(["bench", "--json", str(file), "--plots", str(tmp_path)]) == 0
    assert "triax: nothing to draw" in capsys.readouterr().err
    assert cli.main(["bench", "draw", str(file), "--plots", str(tmp_path)]) == 1
    assert "triax: nothing to draw" in capsys.readouterr().err


def test_help_lists_all_there_is_to_choose(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    words = capsys.readouterr().out.split()
    assert {*OPS, *PRESETS, *ROUTINGS, *SUITES, "float16", "FILE"} <= set(words)
    told = " ".join(words)
    for suite in SUITES.values():
        assert str(suite) in told
