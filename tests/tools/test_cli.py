"""The command line."""

import json

import pytest

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


def test_words_that_no_command_takes(capsys):
    for words in (["cache", "list", "kernel_1"], ["bench", "quick", "--fast"]):
        with pytest.raises(SystemExit):
            cli.main(words)
        assert f"unrecognized arguments: {words[-1]}" in capsys.readouterr().err


@pytest.mark.cuda_plugin
def test_doctor(capsys):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert '"triax": "0.1.0"' in out
    assert "Triton kernels can be launched" in out
