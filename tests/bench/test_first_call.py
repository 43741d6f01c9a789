"""First calls: the measured program in a process of its own, and what is made of its times."""

from __future__ import annotations

import os

import jax
import pytest

from triax.bench import first_call
from triax.bench.first_call import measure_first_calls, run_program

PARTS = ["import_triax_s", "trace_s", "lower_s", "compile_s", "run_s"]


def test_program_runs_and_fills_its_caches(tmp_path):
    first = run_program("xla", tmp_path, on_gpu=False)
    assert list(first) == PARTS
    assert all(seconds >= 0 for seconds in first.values())
    programs = sorted((tmp_path / "JAX_COMPILATION_CACHE_DIR").glob("*-cache"))
    assert any(path.name.startswith("jit_step") for path in programs)
    run_program("xla", tmp_path, on_gpu=False)
    assert sorted((tmp_path / "JAX_COMPILATION_CACHE_DIR").glob("*-cache")) == programs, (
        "compiled again"
    )
    with pytest.raises(RuntimeError, match=r"failed: triax\S*ArgumentValueError: .*`implementa"):
        run_program("best", tmp_path, on_gpu=False)


def test_records_on_a_gpu(monkeypatch):
    seconds = {"triton": iter([2.0, 0.5, 0.3, 0.4]), "xla": iter([0.6, 0.2, 0.15, 0.1])}
    folders = []

    def run(implementation, folder, on_gpu):
        folders.append(folder)
        return {"compile_s": next(seconds[implementation]), "import_triax_s": 0.05}

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(first_call, "run_program", run)
    records = measure_first_calls()
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


def test_failure_is_told_and_others_go_on(monkeypatch):
    def run(implementation, *_):
        if implementation == "triton":
            raise RuntimeError("no cubin")
        return {"run_s": 1.0, "import_triax_s": 0.0}

    monkeypatch.setattr(first_call, "run_program", run)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert ["no GPU" in r["note"] for r in measure_first_calls()] == [True, True]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    *plain, uncached, cached = measure_first_calls()
    assert [r["total_s"] for r in plain] == [1.0, 1.0]
    for record in (uncached, cached):
        assert record["error"] == "RuntimeError: no cubin"
        assert record["total_s"] is record["over_xla_s"] is None
