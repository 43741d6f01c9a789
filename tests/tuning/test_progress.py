"""How far a tuning is."""

import io
import sys

import pytest

from triax.tuning import progress


class OnlyWrites:
    """As programs put in the place of standard error to log it."""

    def write(self, text):
        pass


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    "stderr", [None, OnlyWrites(), io.StringIO()], ids=["none", "only-writes", "closed"]
)
def test_anything_can_stand_for_standard_error(monkeypatch, caplog, stderr):
    if isinstance(stderr, io.StringIO):
        stderr.close()
    monkeypatch.setattr(sys, "stderr", stderr)
    shown = progress.Progress("kernel", 3, quiet_s=0.0)
    shown.step()
    shown.close()
    assert "tuning kernel: 1 of 6 steps" in caplog.text


def test_a_bar_on_a_terminal(monkeypatch, caplog):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    shown = progress.Progress("kernel", 3, quiet_s=0.0)
    for _ in range(6):
        shown.step()
    shown.close()
    assert "tuning kernel" in terminal.getvalue()
    assert caplog.text == ""


def test_nothing_is_said_of_what_is_quick(caplog):
    shown = progress.Progress("kernel", 3)
    shown.step()
    shown.close()
    assert caplog.text == ""
