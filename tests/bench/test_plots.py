"""The figures of a record: which are drawn, what stands in them, and that nothing overlaps."""

from __future__ import annotations

import sys

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from tests.bench.record import FRACTIONS, full_record, record, result
from triax.bench import plots
from triax.bench.plot_parts import style
from triax.bench.plots import draw
from triax.bench.presets import PRESETS
from triax.bridge.errors import ArgumentValueError, MissingDependencyError

FIGURES = ("fraction_of_stream", "speedup", "tokens")
MANY = full_record(presets=tuple(PRESETS), tokens=(128, 512, 8192, 16384, 32768, 524288))


def figures(of_record):
    """The figures themselves, by name, None for one that is not drawn."""
    results = plots._comparable(of_record)
    with style():
        made = [plots._fractions, plots._speedups, plots._tokens]
        return dict(zip(FIGURES, [make(results, "origin") for make in made], strict=True))


def texts(figure):
    """All texts of a figure that are drawn, in pixels: (text, box)."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    found = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    # Ticks past the ends of an axis are kept, and not drawn.
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in found]
    return [(text, box) for text, box in boxes if box.width and box.height]


def heights(axes):
    return [patch.get_height() for patch in axes.patches]


def test_writes_all_figures_twice(tmp_path):
    folder = tmp_path / "made" / "here"
    written = draw(full_record(), folder)
    assert {path.name for path in written} == {f"{n}{s}" for n in FIGURES for s in (".png", ".svg")}
    for path in written:
        head = path.read_bytes()[:200]
        assert head.startswith(b"\x89PNG") if path.suffix == ".png" else b"<?xml" in head
    assert sorted(folder.iterdir()) == sorted(written)


def test_same_record_same_bytes(tmp_path):
    first = draw(full_record(), tmp_path / "first")
    second = draw(full_record(), tmp_path / "second")
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes(), one.name


def test_user_s_style_has_no_say_and_is_kept(tmp_path):
    plain = draw(full_record(), tmp_path / "plain")
    with matplotlib.rc_context({"font.size": 30, "axes.grid": True, "svg.hashsalt": "mine"}):
        before = dict(matplotlib.rcParams)
        styled = draw(full_record(), tmp_path / "styled")
        assert dict(matplotlib.rcParams) == before
    for one, other in zip(plain, styled, strict=True):
        assert one.read_bytes() == other.read_bytes(), one.name


def test_nothing_to_draw(tmp_path):
    failed = result("permute", "deepseek-v3", 128, median_us=None, error="wrong: 3 elements")
    assert draw(record([failed]), tmp_path / "none") == []
    assert not (tmp_path / "none").exists()


def test_only_what_has_data():
    alone = [result("permute", "deepseek-v3", 128, fraction=0.9)]
    assert [name for name, made in figures(record(alone)).items() if made] == ["fraction_of_stream"]
    compared = [
        result("route", "deepseek-v3", 128),
        result("route", "deepseek-v3", 128, "argsort+take", median_us=300.0),
    ]
    assert [name for name, made in figures(record(compared)).items() if made] == ["speedup"]
    plans = [result("plan", "deepseek-v3", tokens, median_us=tokens / 9) for tokens in (128, 512)]
    assert [name for name, made in figures(record(plans)).items() if made] == ["tokens"]


@pytest.mark.parametrize("method", ["host clock", "host-bound"])
@pytest.mark.parametrize("side", [0, 1])
def test_times_of_the_host_are_no_speedup(method, side, tmp_path):
    results = [
        result("route", "deepseek-v3", 128),
        result("route", "deepseek-v3", 128, "argsort+take", median_us=300.0),
    ]
    results[side]["seconds_method"] = method
    assert draw(record(results), tmp_path / "none") == []
    plans = [
        result("plan", "deepseek-v3", tokens, seconds_method=method) for tokens in (128, 512, 2048)
    ]
    assert draw(record(plans), tmp_path / "none") == []


def test_a_target_is_checked_before_there_is_a_record(tmp_path, monkeypatch):
    plots.check_target(tmp_path / "made" / "here")
    assert list((tmp_path / "made" / "here").iterdir()) == []
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "folder"):
        with pytest.raises(ArgumentValueError, match=r"`--plots` needs a folder .*; got .*file"):
            plots.check_target(path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'triax\[bench\]'"):
        plots.check_target(tmp_path)


def test_fractions_are_of_the_setting_with_most_results():
    figure = figures(full_record())["fraction_of_stream"]
    (axes,) = figure.axes
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == [*FRACTIONS, "sort_chunks", "sort_chunks_grad"]
    # 8192 tokens, where competitors were measured too, and two models for each op.
    expected = [f - 10 / 8192 for f in FRACTIONS.values() for _ in range(2)] + [0.98, 0.98]
    assert heights(axes) == pytest.approx(expected)
    shown = [text for text, _ in texts(figure)]
    assert "8,192 tokens  ·  bfloat16  ·  uniform routing" in shown


def test_speedup_is_the_competitor_s_time_over_triax_s():
    figure = figures(full_record())["speedup"]
    panels = {axes.get_title(loc="left"): heights(axes) for axes in figure.axes}
    assert panels["permute"] == pytest.approx(2 * [1.2, 0.9])
    assert panels["unpermute"] == pytest.approx(2 * [2.3, 1.4])
    assert panels["route+grad"] == pytest.approx(2 * [7.1, 2.6, 1.7])
    assert panels["sort_chunks"] == pytest.approx([5300 / 4080])
    assert {"0.90×", "2.3×", "7.1×"} <= {text for text, _ in texts(figure)}


def test_a_single_series_has_a_name_too():
    results = [
        result("permute", "kimi-k2", tokens, fraction=0.9, median_us=float(tokens))
        for tokens in (128, 512)
    ]
    results.append(result("permute", "kimi-k2", 128, "jnp.take"))
    made = figures(record(results))
    assert "kimi-k2" in [text for text, _ in texts(made["fraction_of_stream"])]
    assert "as jnp.take" in [text for text, _ in texts(made["speedup"])]
    assert "permute" in [text for text, _ in texts(made["tokens"])]


def test_competitor_without_triax_s_time_is_left_out():
    results = [
        result("route", "deepseek-v3", 128, median_us=None, error="wrong"),
        result("route", "deepseek-v3", 128, "argsort+take"),
    ]
    assert figures(record(results))["speedup"] is None


def test_tokens_of_the_model_with_most_of_them():
    more = [
        result(op, "kimi-k2", tokens, median_us=float(tokens), fraction=fraction)
        for op, fraction in (("plan", None), ("permute", 0.5))
        for tokens in (2**n for n in range(7, 13))
    ]
    made = full_record()
    made["results"] += more
    upper, lower = figures(made)["tokens"].axes
    (line, one) = upper.lines
    assert list(line.get_xdata()) == [128, 256, 512, 1024, 2048, 4096]
    assert list(line.get_ydata()) == [0.5] * 6
    assert list(one.get_ydata()) == [1.0, 1.0]
    assert list(lower.lines[0].get_ydata()) == [128, 256, 512, 1024, 2048, 4096]
    assert lower.get_ylabel() == "µs, started alone"
    assert upper.get_xscale() == "log"


def test_machine_versions_and_day_are_told(tmp_path):
    origin = plots._origin(full_record())
    assert origin == "NVIDIA H200  ·  Triax 0.1  ·  JAX 0.11  ·  Triton 3  ·  2026-11-21"
    made = full_record()
    del made["versions"]["triton"]
    assert "Triton" not in plots._origin(made)


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("data", [full_record(), MANY], ids=["few", "many"])
def test_no_text_is_cut_off_or_hidden(data, name):
    figure = figures(data)[name]
    found = texts(figure)
    width, height = figure.canvas.get_width_height()
    for number, (text, box) in enumerate(found):
        assert box.x0 >= 0, text
        assert box.x1 <= width, text
        assert box.y0 >= 0, text
        assert box.y1 <= height, text
        for other_text, other in found[number + 1 :]:
            # A pixel of both, for boxes are a little larger than what is in them.
            overlap_x = min(box.x1, other.x1) - max(box.x0, other.x0)
            overlap_y = min(box.y1, other.y1) - max(box.y0, other.y0)
            assert overlap_x <= 1 or overlap_y <= 1, f"{text!r} and {other_text!r}"


def test_matplotlib_is_missing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'triax\[bench\]'"):
        draw(full_record(), tmp_path)
