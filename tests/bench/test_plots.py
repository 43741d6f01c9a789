"""The figures of a record: which are drawn, and what stands in them."""

import matplotlib
import pytest

from tests.bench.record import COMMITTED, record, result
from triax.bench import plots
from triax.bench.plots import draw


def test_the_committed_record_whatever_the_user_s_style(tmp_path):
    first = draw(COMMITTED, tmp_path / "made" / "here")
    names = [
        f"{name}.{kind}" for name in ("fraction_of_stream", "speedup") for kind in ("png", "svg")
    ]
    assert [path.name for path in first] == names
    with matplotlib.rc_context({"font.size": 30, "svg.hashsalt": "mine"}):
        for one, other in zip(first, draw(COMMITTED, tmp_path), strict=True):
            assert one.read_bytes() == other.read_bytes()


def test_only_what_has_data(tmp_path):
    host = result("jnp.take", seconds_method="host-bound")
    failed = result("jnp.take", error="wrong: 3 elements")
    assert len(draw(record(result(), host, failed), tmp_path)) == 2
    assert draw(record(result(fraction_of_stream=None), host), tmp_path / "none") == []
    assert not (tmp_path / "none").exists()
    assert len(draw(record(result(fraction_of_stream=None), result("jnp.take")), tmp_path)) == 2


def test_bars_are_ratios_of_one_setting():
    own = [result(median_us=100.0), result(median_us=1.0, tokens=5)]
    others = [result(name, median_us=us) for name, us in (("jnp.take", 120.0), ("torch", 90.0))]
    figure = plots.speedup([*own, *others, result("jnp.take", tokens=5)], "origin")
    (axes,) = figure.axes
    assert [patch.get_height() for patch in axes.patches] == pytest.approx([1.2, 0.9])
    assert f"{own[0]['tokens']:,} tokens" in figure.get_suptitle()
