"""Figures in README and docs are those of the committed records."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_spec = importlib.util.spec_from_file_location("figures", ROOT / "tools" / "figures.py")
figures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(figures)


@pytest.mark.parametrize("page", figures.PAGES)
def test_tables_are_those_of_the_records(page):
    text = (ROOT / page).read_text()
    assert figures.BLOCK.search(text), "no table of figures"
    assert figures.filled(text) == text, "run python tools/figures.py"


def test_a_changed_figure_is_found():
    text = (ROOT / "docs" / "how-fast.md").read_text()
    changed = re.sub(r"\d+\.\d%", "12.3%", text, count=1)
    assert changed != text
    assert figures.filled(changed) == text


def test_gallery_of_a_record(monkeypatch):
    found = {"example": "softmax", "name": "its gradient", "difference": 1e-7}
    run = {
        "written": "2026-11-21T10:00:00",
        "device": "NVIDIA H200",
        "versions": {"jax": "0.11.2", "triton": "3.6.0"},
        "results": [{**found, "ours_us": 98.76, "plain_us": 1234.5}],
    }
    monkeypatch.setattr(figures, "record", lambda name: {"gallery": run}[name])
    row = figures.gallery().splitlines()[2]
    assert row == "| `softmax.py`: its gradient | 98.8 µs | 1,234 µs |"
    assert figures.where("gallery").startswith("One NVIDIA H200, jax 0.11.2, triton 3.6.0, 2026")


def test_rivals_of_the_layer_have_a_dash_where_they_have_no_result(monkeypatch):
    of = lambda preset, name, ratio, method="bursts": {
        "preset": preset,
        "implementation": name,
        "over_triax": ratio,
        "peak_bytes": 2.345e9,
        "seconds_method": method,
    }
    results = [
        of("qwen3-30b", "triax", 1.0),
        of("qwen3-30b", "dense", 0.75),
        of("qwen3-30b", "tokamax", 1.5),
        of("mixtral-8x7b", "triax", 1.0),
        of("mixtral-8x7b", "ScatterMoE", 1.444, "host-bound"),
    ]
    monkeypatch.setattr(figures, "record", lambda name: {"results": results})
    head, _, *rows = figures.TABLES["layers/others"]().splitlines()
    assert head == "| shape of | triax | tokamax | ScatterMoE | dense |"
    assert rows == [
        "| Qwen3-30B | 1.00 | 1.50 | – | 0.75 |",
        "| Mixtral 8x7B | 1.00 | – | ≤ 1.44 | – |",
    ]
    assert "| 2.35 GB | – |" in figures.TABLES["layers/memory"]()


def test_matrix_of_a_record(monkeypatch):
    """A GPU is named where there are measurements with the same JAX and the same Triton."""
    run = {"python": "3.12", "passed": 3570, "skipped": 3, "failed": 1, "written": "2026-11-25"}
    runs = [{"jax": jax, "triton": "3.6.0", **run} for jax in ("0.9.2", "0.11.2")]
    monkeypatch.setattr(figures, "record", lambda name: {"matrix": runs}[name])
    monkeypatch.setattr(figures, "ran_on_gpus", lambda: {("0.11.2", "3.6.0"): "NVIDIA H200"})
    _, _, first, second = figures.matrix().splitlines()
    assert first == "| 0.9.2 | 3.6.0 | 3.12 | 3,570 | 1 | 3 | no |"
    assert second == "| 0.11.2 | 3.6.0 | 3.12 | 3,570 | 1 | 3 | NVIDIA H200 |"
    assert figures.where_matrix() == "2 environments: 7,140 tests passed, 2 failed. 2026-11-25.\n"


def test_the_same_bits_of_a_record(monkeypatch):
    """Times with it over those without; numbers of rows without a gap in ranges."""
    price = {"median_us": {"without": 10.0, "with": 13.1}, "ratio": 1.31}
    cases = {
        "example": {"8 bits": {"without": 0.0431, "with": 0.0}},
        "ragged_dot, bfloat16": {
            "same_bits": {"without": [[1, 5]], "with": [[1, 5]]},
            "prices": {},
        },
        "8 bits, blocks": {
            "same_bits": {"without": [[1, 5], [9], [20, 3000]], "with": [[1, 5, 9, 20, 3000]]},
            "prices": {"1": price, "4096": price | {"ratio": 0.994}},
        },
    }
    monkeypatch.setattr(figures, "record", lambda name: {"same_bits": {"results": cases}}[name])
    head, _, *rows = figures.same_bits().splitlines()
    assert head == "|  | without it | with it | 1 token | 4,096 tokens |"
    assert rows == [
        "| ragged_dot, bfloat16 | all | all | – | – |",
        "| 8 bits, blocks | 1 to 5; 9; 20 to 3,000 | all | 1.31 | 0.99 |",
    ]
    assert figures.of_rows("same_bits/example").splitlines()[2] == "| 8 bits | 0.043 | 0 |"


def test_measurements_were_made_on_gpus():
    found = figures.ran_on_gpus()
    assert found["0.11.2", "3.6.0"] == "NVIDIA H100 80GB HBM3, NVIDIA H200"
    assert found["0.12.0.1", "3.9.0"] == "NVIDIA H100 80GB HBM3"
    assert ("0.10.2", "3.9.0") not in found  # of those on a CPU


def test_every_table_is_on_a_page():
    shown = {
        match[2]
        for page in figures.PAGES
        for match in figures.BLOCK.finditer((ROOT / page).read_text())
    }
    assert shown == set(figures.TABLES)
