"""Progress: plain lines in a log, a bar on a terminal."""

import io
import sys

from triax.bench.progress import steps


def test_lines_where_nobody_watches(capsys):
    assert list(steps(iter("ab"), 2, str.upper)) == ["a", "b"]
    assert capsys.readouterr().err == "case 1/2: A\ncase 2/2: B\n"


def test_a_label_stands_before_its_step(capsys):
    for _ in steps(["a"], 1, str.upper):
        assert capsys.readouterr().err == "case 1/1: A\n"


def use_terminal(monkeypatch):
    """Puts a terminal in place of standard error; returns what tells what it was sent."""
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", screen)
    return screen.getvalue


def test_a_bar_on_a_terminal(monkeypatch):
    shown = use_terminal(monkeypatch)
    assert list(steps(iter("ab"), 2, str.upper)) == ["a", "b"]
    assert "case 1/2" not in shown()
    assert "2/2" in shown()


def test_lines_without_tqdm(monkeypatch):
    shown = use_terminal(monkeypatch)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert list(steps(iter("a"), 1, str.upper)) == ["a"]
    assert shown() == "case 1/1: A\n"
