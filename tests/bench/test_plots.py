"""The figures of a record: which are drawn, and what stands in them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib
import pytest

from tests.bench.record import FRACTIONS, full_record, record, result
from triax.bench import plots
from triax.bench.plots import draw
from triax.bridge.errors import MissingDependencyError

COMMITTED = Path(__file__).parents[2] / "benchmarks" / "h200.json"


def heights(axes):
    return [patch.get_height() for patch in axes.patches]


def names(of_record, folder):
    return [path.stem for path in draw(of_record, folder) if path.suffix == ".png"]


def test_draws_the_committed_record(tmp_path):
    written = draw(json.loads(COMMITTED.read_text()), tmp_path / "made" / "here")
    assert sorted((tmp_path / "made" / "here").iterdir()) == sorted(written)
    assert [path.name for path in written[::2]] == ["fraction_of_stream.png", "speedup.png"]
    for path in written:
        head = path.read_bytes()[:200]
        assert head.startswith(b"\x89PNG") if path.suffix == ".png" else b"<?xml" in head


def test_same_record_same_bytes_whatever_the_user_s_style(tmp_path):
    first = draw(full_record(), tmp_path / "first")
    with matplotlib.rc_context({"font.size": 30, "axes.grid": True, "svg.hashsalt": "mine"}):
        before = dict(matplotlib.rcParams)
        second = draw(full_record(), tmp_path / "second")
        assert dict(matplotlib.rcParams) == before
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes(), one.name


def test_only_what_has_data(tmp_path):
    assert names(record([result("permute", "deepseek-v3", 128, fraction=0.9)]), tmp_path) == [
        "fraction_of_stream"
    ]
    compared = [result("route", "deepseek-v3", 128), result("route", "deepseek-v3", 128, "other")]
    assert names(record(compared), tmp_path) == ["speedup"]
    failed = result("permute", "deepseek-v3", 128, median_us=None, error="wrong: 3 elements")
    assert draw(record([failed, compared[1]]), tmp_path / "none") == []
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("method", ["host clock", "host-bound"])
def test_times_of_the_host_are_not_drawn(method, tmp_path):
    made = full_record()
    for one in made["results"]:
        one["seconds_method"] = method
    assert draw(made, tmp_path) == []


def test_bars_are_fractions_and_ratios_of_one_setting():
    (axes,) = plots.fraction_of_stream(full_record()["results"], "origin").axes
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == [*FRACTIONS, "sort_chunks", "sort_chunks_grad"]
    expected = [f - 10 / 16384 for f in FRACTIONS.values() for _ in range(2)] + [0.98, 0.98]
    assert sorted(heights(axes)) == pytest.approx(sorted(expected))
    figure = plots.speedup(full_record()["results"], "origin")
    panels = {axes.get_title(loc="left"): heights(axes) for axes in figure.axes}
    assert panels["permute"] == pytest.approx([1.2, 1.2, 0.9, 0.9])
    assert panels["sort_chunks"] == pytest.approx([5300 / 4080])
    assert "8,192 tokens" in figure.get_suptitle()


def test_matplotlib_is_missing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'triax\[bench\]'"):
        draw(full_record(), tmp_path)
