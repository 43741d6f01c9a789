"""First calls: the measured program in a separate process, and what is made of its times."""

from __future__ import annotations

import os

import pytest

from benchmarks.ops.first_call import measure_first_calls, run_program

PARTS = ["import_triax_s", "trace_s", "lower_s", "compile_s", "run_s"]


@pytest.mark.nightly("it tests a tool, not the package")
def test_program_runs_and_fills_its_caches(tmp_path):
    first = run_program("xla", str(tmp_path))
    assert list(first) == PARTS
    assert all(seconds >= 0 for seconds in first.values())
    programs = sorted((tmp_path / "jax").glob("*-cache"))
    assert any(path.name.startswith("jit_op") for path in programs)
    run_program("xla", str(tmp_path))
    assert sorted((tmp_path / "jax").glob("*-cache")) == programs, "compiled again"
    with pytest.raises(RuntimeError, match=r"failed: triax\S*ArgumentValueError: .*`implementa"):
        run_program("best", str(tmp_path))


@pytest.fixture
def runs():
    """Where the programs' caches were, with times in place of their runs."""
    seconds = {"triton": iter([2.0, 0.5, 0.3, 0.4]), "xla": iter([0.6, 0.2, 0.15, 0.1])}
    folders = []

    def run(implementation, folder):
        folders.append(folder)
        if (left := next(seconds[implementation], None)) is None:
            raise RuntimeError("no cubin")
        return {"compile_s": left, "import_triax_s": 0.05}

    return folders, run


def test_records(runs):
    folders, run = runs
    records = measure_first_calls(True, run)
    assert [(r["implementation"], r["cached"], r["total_s"]) for r in records] == [
        ("xla", False, pytest.approx(0.65)),
        ("xla", True, pytest.approx(0.15)),
        ("triax", False, pytest.approx(2.05)),
        ("triax", True, pytest.approx(0.35)),
    ]
    # Plain JAX does not import Triax.
    assert [r["over_xla_s"] for r in records[2:]] == [pytest.approx(1.45), pytest.approx(0.25)]
    assert len(set(folders[:4])) == len(set(folders[4:])) == 1
    assert not os.path.exists(folders[0])
    failed = measure_first_calls(True, run)
    assert [r["error"] for r in failed] == ["RuntimeError: no cubin"] * 4
    assert [r["total_s"] for r in failed] == [r["over_xla_s"] for r in failed] == [None] * 4


def test_without_a_gpu_there_is_only_plain_jax(runs):
    records = measure_first_calls(False, runs[1])
    assert [(r["implementation"], "no GPU" in r["note"]) for r in records] == [("xla", True)] * 2
