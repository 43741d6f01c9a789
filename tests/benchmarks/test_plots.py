"""The figures of a record: which are drawn, and what stands in them."""

import matplotlib
import pytest

from benchmarks.ops import plots
from benchmarks.ops.plots import draw
from tests.benchmarks.shared import COMMITTED, record, result

BOTH = [f"{name}.{kind}" for name in ("fraction_of_stream", "speedup") for kind in ("png", "svg")]


@pytest.mark.slow("the benchmark is of one Python")
def test_the_committed_record(tmp_path):
    assert [path.name for path in draw(COMMITTED, tmp_path / "made" / "here")] == BOTH


@pytest.mark.slow("the benchmark is of one Python")
def test_the_same_bytes_with_any_style_of_the_user(tmp_path):
    small = record(result(), result("jnp.take"))
    first = draw(small, tmp_path / "first")
    with matplotlib.rc_context({"font.size": 30, "svg.hashsalt": "mine"}):
        for one, other in zip(first, draw(small, tmp_path), strict=True):
            assert one.read_bytes() == other.read_bytes()


def test_only_what_has_data(tmp_path):
    host = result("jnp.take", seconds_method="host-bound")
    failed = result("jnp.take", error="wrong: 3 elements")
    assert [path.name for path in draw(record(result(), host, failed), tmp_path)] == BOTH[:2]
    assert draw(record(result(fraction_of_stream=None), host), tmp_path / "none") == []
    assert not (tmp_path / "none").exists()


def test_dots_are_ratios_of_one_setting():
    own = [result(median_us=100.0), result(median_us=1.0, tokens=5)]
    others = [result(name, median_us=us) for name, us in (("jnp.take", 120.0), ("torch", 90.0))]
    figure = plots.speedup([*own, *others, result("jnp.take", tokens=5)], "origin")
    (axes,) = figure.axes
    dots = [x for dots in axes.collections for x, _ in dots.get_offsets()]
    assert dots == pytest.approx([1.2, 0.9])
    assert f"{own[0]['tokens']:,} tokens" in figure.get_suptitle()


def test_bars_of_layers_begin_at_zero():
    shape = {"op": "layer", "preset": "mixtral-8x7b"}
    rates = {"triax": 600.0, "dense": 700.0, "a competitor": 300.0}
    found = [result(name, teraflops_per_second=rate, **shape) for name, rate in rates.items()]
    figure = plots.layers([*found, result()], "origin")
    (axes,) = figure.axes
    shown = {
        text.get_text(): bar.get_width()
        for text, bar in zip(figure.legends[0].get_texts(), axes.patches, strict=True)
    }
    assert shown == {
        "Triax": 600.0,
        "a competitor": 300.0,
        "its products alone, as dense matmuls: a limit": 700.0,
    }
    assert {bar.get_x() for bar in axes.patches} == {0}
    assert axes.get_xlim()[0] == 0
    assert plots.layers([result()], "origin") is None


def test_a_wrong_layer_has_no_bar(tmp_path, monkeypatch):
    shape = {"op": "layer", "preset": "mixtral-8x7b", "teraflops_per_second": 600.0}
    wrong = result("wrong", error="wrong: 3 elements", **shape)
    drawn = []
    monkeypatch.setattr(plots, "layers", lambda results, _: drawn.extend(results))
    draw(record(right := result("right", **shape), wrong), tmp_path)
    assert drawn == [right]
