"""The command line."""

import dataclasses
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tuning.records import key, record
from triax import cli
from triax.tuning import store

ROOT = Path(__file__).parents[2]


def program(tmp_path, text, name="program.py"):
    file = tmp_path / name
    file.write_text(text)
    return file


def run(command, **environment):
    """Runs a line of shell in which `triax` is the command; a pipe's exit status is that of it."""
    triax = f"{shlex.quote(sys.executable)} -m triax"
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command.replace("triax", triax, 1)],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "PYTHONUNBUFFERED": "",
            **environment,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "\ndef main():\n    raise ValueError('two', 'words')\n",
            ":3: ValueError: ('two', 'words')",
        ),
        ("def main():\n    assert 0\n", ":2: AssertionError"),
        ("import nothing_here\n", ":1: ModuleNotFoundError: No module named 'nothing_here'"),
        ("def main():\n    open('/no/file')\n", ":2: FileNotFoundError: [Errno 2] No such file"),
        ("def main(:\n    pass\n", ":1: SyntaxError: invalid syntax"),
        ("x = '\0'\n", "source code string cannot contain null bytes"),
        (
            "import json\ndef main():\n    json.loads('{')\n",
            ":3: JSONDecodeError: Expecting property name",
        ),
        (
            "import triax\ndef main():\n    triax.tuning_mode('fast').__enter__()\n",
            ":3: Argument `mode` must be one of",
        ),
    ],
)
def test_tune_of_a_program_that_raises(tmp_path, capsys, text, expected):
    file = program(tmp_path, text)
    assert cli.main(["tune", f"{file}:main"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"triax: {file}")
    assert expected in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("command", ["explain", "tune"])
def test_a_program_whose_triton_is_not_installed(tmp_path, capsys, monkeypatch, command):
    monkeypatch.setitem(sys.modules, "triton", None)
    file = program(tmp_path, "import triton.language as tl\n")
    assert cli.main([command, f"{file}:main"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"triax: {file}:1: ModuleNotFoundError: ")
    assert "On Linux, `pip install 'triton>=3.5'`" in said


def test_tune_takes_a_file_of_any_name(tmp_path, capsys):
    file = program(tmp_path, "def main():\n    return 1\n", "program of mine")
    assert cli.main(["tune", f"{file}:main"]) == 0
    assert "nothing to tune" in capsys.readouterr().out


@pytest.mark.slow("its processes take seconds")
def test_verbose_shows_where_a_program_raised(tmp_path):
    file = program(tmp_path, "def main():\n    raise ValueError('no')\n")
    loud = run(f"triax -v tune {file}:main")
    assert loud.returncode == 1
    assert "Traceback" in loud.stderr


@pytest.mark.slow("what is printed to, and how, is Python's alone")
def test_a_reader_that_leaves():
    store.user_store().put(record(0))
    done = run("triax cache list | true")
    assert done.returncode == 141
    assert done.stderr == ""


@pytest.mark.slow("what is printed to, and how, is Python's alone")
def test_output_that_cannot_be_written():
    done = run("triax doctor > /dev/full")
    assert (done.returncode, done.stderr) == (1, "triax: No space left on device\n")


@pytest.mark.slow("what is printed to, and how, is Python's alone")
def test_output_of_any_encoding():
    odd = dataclasses.replace(key(0), kernel="café")
    store.user_store().put(dataclasses.replace(record(0), key=odd))
    done = run("triax cache list", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "caf\\xe9" in done.stdout


@pytest.mark.slow("what is printed to, and how, is Python's alone")
def test_no_output_at_all():
    done = run("triax cache list >&-")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["TRIAX_CACHE_DIR", "TRIAX_CACHE_PATH"])
def test_settings_that_cannot_be(monkeypatch, capsys, name):
    monkeypatch.setenv(name, "tuned")
    assert cli.main(["cache", "list"]) == 1
    expected = f"triax: {name} must hold absolute paths; got 'tuned'.\n"
    assert capsys.readouterr().err == expected


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
    for words in (["cache", "list", "kernel_1"], ["explain", "a:b", "--fast"]):
        with pytest.raises(SystemExit):
            cli.main(words)
        assert f"unrecognized arguments: {words[-1]}" in capsys.readouterr().err


@pytest.mark.cuda_plugin
def test_explain(tmp_path, capsys):
    file = program(
        tmp_path,
        "import numpy as np\n"
        "from tests import kernels\n"
        "from tests.cases import blockwise\n"
        "def main():\n"
        "    x = np.zeros(300, np.float32)\n"
        "    return blockwise(kernels.autotuned_add_kernel, x, x, n=300)\n"
        "def nothing():\n"
        "    return 1\n"
        "def matmul():\n"
        "    from triax import moe\n"
        "    rows = np.ones((40, 64), np.float32)\n"
        "    return moe.ragged_dot(rows, np.ones((2, 64, 16), np.float32), np.array([20, 20]))\n",
    )
    assert cli.main(["explain", f"{file}:matmul"]) == 0
    *_, choice = capsys.readouterr().out.partition("ragged_dot of float32[40, 64] × ")
    assert choice.startswith("float32[2, 64, 16]: any_gpu\n  not very_few_rows, which needs ")
    assert cli.main(["explain", f"{file}:main"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("add_kernel: BLOCK=64, ")
    assert "grid " in told
    assert ".version" not in told
    assert cli.main(["explain", "--ptx", f"{file}:main"]) == 0
    assert re.search(r"^\.target sm_90", capsys.readouterr().out, re.M)
    assert cli.main(["explain", "--resources", f"{file}:main"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("add_kernel: BLOCK=64, num_ctas=1, num_stages=3, num_warps=1  (first ")
    used = re.findall(r"^  \d+ registers, 0 bytes .* (\d) warps  BLOCK=(\d+), ", told, re.M)
    assert used == [("1", "64"), ("2", "256"), ("4", "1024")]  # not only the one that is chosen
    assert cli.main(["explain", f"{file}:nothing"]) == 0
    assert "nothing to explain" in capsys.readouterr().out
    assert cli.main(["explain", "main"]) == 1
    assert "as in `triax explain main:main`" in capsys.readouterr().err
