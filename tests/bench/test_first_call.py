"""First calls: the measured program in a process of its own, and what is made of its times."""

from __future__ import annotations

import os

import jax
import pytest

from triax.bench import first_call
from triax.bench.first_call import (
    FirstCallError,
    child_environment,
    measure_first_calls,
    parse,
    run_program,
    with_differences,
)

PARTS = ["import_triton_s", "import_triax_s", "trace_s", "lower_s", "compile_s", "run_s"]


def test_program_runs_and_fills_its_caches(tmp_path):
    environment = child_environment(os.environ, tmp_path, on_gpu=False)
    first = run_program("xla", environment)
    assert list(first) == PARTS
    assert all(seconds >= 0 for seconds in first.values())
    assert first["compile_s"] > 0
    programs = sorted((tmp_path / "jax").glob("*-cache"))
    assert any(path.name.startswith("jit_step") for path in programs)
    run_program("xla", environment)
    assert sorted((tmp_path / "jax").glob("*-cache")) == programs, "compiled again"


def test_program_that_fails(tmp_path):
    environment = child_environment(os.environ, tmp_path, on_gpu=False)
    with pytest.raises(
        FirstCallError,
        match=r"failed: triax\S*ArgumentValueError: .*`implementation` must be one of",
    ):
        run_program("best", environment)


def test_environment(tmp_path):
    given = {"PYTHONPATH": "/mine", "HOME": "/home", "TRITON_CACHE_DIR": "/shared"}
    made = child_environment(given, tmp_path, on_gpu=True)
    assert made["PYTHONPATH"].endswith(f"{os.pathsep}/mine")
    assert made["HOME"] == "/home"
    assert made["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert "JAX_PLATFORMS" not in made
    caches = [made[name] for name in made if name.endswith(("CACHE_DIR", "CACHE_PATH"))]
    assert len(caches) == 4
    assert all(os.path.dirname(folder) == str(tmp_path) for folder in caches)
    assert given["TRITON_CACHE_DIR"] == "/shared"
    assert child_environment(given, tmp_path, on_gpu=False)["JAX_PLATFORMS"] == "cpu"


@pytest.fixture
def runs(monkeypatch):
    """Programs that take as long as told here, and the caches they were given."""
    seconds = {"triton": iter([2.0, 0.5, 0.3, 0.4]), "xla": iter([0.6, 0.2, 0.15, 0.1])}
    given = []

    def run(implementation, environment):
        given.append((implementation, environment["JAX_COMPILATION_CACHE_DIR"]))
        return {"compile_s": next(seconds[implementation]), "run_s": 0.0}

    monkeypatch.setattr(first_call, "run_program", run)
    return given


def test_records_on_a_gpu(monkeypatch, runs):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    records = measure_first_calls()
    assert [(r["implementation"], r["cached"], r["total_s"]) for r in records] == [
        ("xla", False, 0.6),
        ("xla", True, 0.1),
        ("triax", False, 2.0),
        ("triax", True, 0.3),
    ]
    assert [r.get("over_xla_s") for r in records] == [None, None, pytest.approx(1.4), 0.3 - 0.1]
    assert records[3]["parts"] == {"compile_s": 0.3, "run_s": 0.0}
    folders = [folder for name, folder in runs if name == "triton"]
    assert len(folders) == 4
    assert len(set(folders)) == 1
    assert not os.path.exists(folders[0])


def test_records_without_a_gpu(monkeypatch, runs):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    records = measure_first_calls()
    assert [(r["implementation"], r["cached"]) for r in records] == [("xla", False), ("xla", True)]
    assert all("no GPU" in r["note"] for r in records)


def test_failure_is_told_and_others_go_on(monkeypatch):
    def run(implementation, environment):
        if implementation == "triton":
            raise FirstCallError("no cubin")
        return {"run_s": 1.0}

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(first_call, "run_program", run)
    *plain, uncached, cached = measure_first_calls()
    assert [r["total_s"] for r in plain] == [1.0, 1.0]
    for record in (uncached, cached):
        assert record["error"] == "no cubin"
        assert record["total_s"] is None
        assert record["over_xla_s"] is None


def test_differences_are_of_equal_states():
    records = [
        {"implementation": "triax", "cached": True, "total_s": 3.0},
        {"implementation": "xla", "cached": False, "total_s": 1.0, "parts": {"run_s": 1.0}},
    ]
    assert with_differences(records)[0]["over_xla_s"] is None


def test_plain_jax_does_not_import_triax():
    parts = {"import_triax_s": 0.25, "compile_s": 0.75}
    records = [
        {"implementation": "xla", "cached": True, "total_s": 1.0, "parts": parts},
        {"implementation": "triax", "cached": True, "total_s": 3.0, "parts": parts},
    ]
    assert with_differences(records)[1]["over_xla_s"] == 2.25


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("", "no times"),
        ("hello\n", "no times"),
        ('{"ok": true, "parts": 3}', "no times"),
        ('{"ok": false, "parts": {"run_s": 1}}', "not finite"),
    ],
)
def test_output_that_makes_no_sense(output, message):
    with pytest.raises(FirstCallError, match=message):
        parse(output)


def test_output_after_a_log_line():
    assert parse('a warning\n{"ok": true, "parts": {"run_s": 1}}\n') == {"run_s": 1.0}
