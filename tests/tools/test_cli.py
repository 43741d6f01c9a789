"""The command line."""

import json
from types import SimpleNamespace

import pytest

from tests.bench import record as records
from tests.tuning.records import key, record
from triax import cli
from triax.tuning import store


@pytest.fixture
def filled():
    for index in range(3):
        store.user_store().put(record(index, time=0.25))
    return store.user_store()


def test_list_and_show(filled, capsys):
    (filled.folder / "broken-0.json").write_text("{")
    assert cli.main(["cache", "list"]) == 0
    out = capsys.readouterr().out
    assert out.count("0.2500 ms") == 3
    assert "broken-0" in out
    assert "(not usable)" in out
    assert cli.main(["cache", "show", "kernel_1"]) == 0
    shown = capsys.readouterr().out
    assert json.loads(shown[shown.index("{") :])["config"] == "BLOCK=64"
    assert cli.main(["cache", "show", "kernel_9"]) == 1
    assert "no tuned config named 'kernel_9'" in capsys.readouterr().err


def test_clear(filled, capsys):
    assert cli.main(["cache", "clear", "kernel_1"]) == 0
    assert [r.key.kernel for _, r in filled.records()] == ["kernel_0", "kernel_2"]
    assert cli.main(["cache", "clear"]) == 0
    assert filled.paths() == []


def test_export_and_import(filled, tmp_path, capsys):
    (filled.folder / "broken-0.json").write_text("{")
    file = tmp_path / "tuned.zip"
    assert cli.main(["cache", "export", str(file)]) == 0
    assert "wrote 3 configs" in capsys.readouterr().out
    cli.main(["cache", "clear"])
    assert cli.main(["cache", "import", str(file)]) == 0
    assert all(filled.find(key(index)) is not None for index in range(3))
    file.write_text("no archive")
    assert cli.main(["cache", "import", str(file)]) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_tune_needs_a_function(tmp_path):
    with pytest.raises(SystemExit, match="is not FILE:FUNCTION"):
        cli.main(["tune", "nothing.py:main"])
    file = tmp_path / "program.py"
    file.write_text("x = 1\n")
    with pytest.raises(SystemExit, match="has no function 'main'"):
        cli.main(["tune", f"{file}:main"])


def test_tune_without_calls(tmp_path, capsys):
    file = tmp_path / "program_without_calls.py"
    file.write_text("def main():\n    return 1\n")
    assert cli.main(["tune", f"{file}:main"]) == 0
    assert "nothing to tune" in capsys.readouterr().out


@pytest.mark.cuda_plugin
def test_tune_without_a_gpu_says_so(tmp_path, capsys):
    file = tmp_path / "program_on_cpu.py"
    file.write_text(
        "import numpy as np\n"
        "from tests.cases import heuristics\n"
        "def main():\n"
        "    x = np.zeros(64, np.float32)\n"
        "    return heuristics(x, x)\n"
    )
    assert cli.main(["tune", f"{file}:main"]) == 1
    assert "tuning needs its operands on one GPU" in capsys.readouterr().err


@pytest.fixture
def bench(monkeypatch):
    """What `triax bench` asks to be run, and the record that it is given for it."""
    from triax.bench import plots, runner

    asked = SimpleNamespace(record=records.full_record(), request=None, drawn=None)

    def run(request):
        asked.request = request
        return asked.record

    def draw(record, folder):
        asked.drawn = record
        return [folder / "speedup.png"]

    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setattr(plots, "draw", draw)
    return asked


def test_bench_runs_a_suite(bench, capsys):
    assert cli.main(["bench"]) == 0
    request = bench.request
    assert (request.suite, request.command) == ("quick", "triax bench")
    assert request.ops is request.presets is request.tokens is request.dtypes is None
    assert request.competitors
    assert not request.first_call
    assert not request.memory
    assert "route+grad\n" in capsys.readouterr().out


def test_bench_hands_on_what_it_is_told(bench):
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


def test_bench_writes_and_draws(bench, tmp_path, capsys):
    file = tmp_path / "record.json"
    assert cli.main(["bench", "--json", str(file), "--plots", str(tmp_path / "plots")]) == 0
    assert json.loads(file.read_text()) == bench.drawn == bench.record
    assert str(tmp_path / "plots" / "speedup.png") in capsys.readouterr().out
    bench.drawn = None
    assert cli.main(["bench", "draw", str(file), "--plots", str(tmp_path)]) == 0
    assert bench.drawn == bench.record
    assert capsys.readouterr().out == f"{tmp_path / 'speedup.png'}\n"


def test_bench_fails_where_a_result_is_wrong(bench, tmp_path, capsys):
    bench.record["results"][0] |= {"error": "wrong: 1 elements of rows differ", "median_us": None}
    file = tmp_path / "record.json"
    assert cli.main(["bench", "--json", str(file)]) == 1
    assert "wrong: 1 elements of rows differ" in capsys.readouterr().out
    assert file.exists()


def test_bench_draw_needs_a_file(bench, tmp_path, capsys):
    with pytest.raises(SystemExit, match="needs FILE and --plots FOLDER"):
        cli.main(["bench", "draw", "record.json"])
    with pytest.raises(SystemExit, match=r"record\.json is for `triax bench draw`"):
        cli.main(["bench", "quick", "record.json"])
    missing = str(tmp_path / "none.json")
    assert cli.main(["bench", "draw", missing, "--plots", str(tmp_path)]) == 1
    assert "Argument `file` cannot be read" in capsys.readouterr().err


@pytest.mark.cuda_plugin
def test_doctor(capsys):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert '"triax": "0.1.0"' in out
    assert "Triton kernels can be launched" in out
