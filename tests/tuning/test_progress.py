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


class Notebook(io.StringIO):
    """As IPython's kernel puts in the place of standard error."""


Notebook.__module__ = "ipykernel.iostream"


@pytest.mark.parametrize("stderr", [Terminal(), Notebook()], ids=["terminal", "notebook"])
def test_a_line_that_is_written_anew_and_removed(monkeypatch, caplog, stderr):
    monkeypatch.setattr(sys, "stderr", stderr)
    shown = progress.Progress("kernel", 5, quiet_s=0.0)
    for _ in range(10):
        shown.step()
    shown.close()
    assert caplog.text == ""
    _, first, *others, last = stderr.getvalue().split("\r")[:-1]
    assert first.startswith("tuning kernel: 1 of 10 steps after ")
    assert len(others) == 9
    assert last == " " * len(others[-1])


def test_nothing_is_said_of_what_is_quick(caplog):
    shown = progress.Progress("kernel", 3)
    shown.step()
    shown.close()
    assert caplog.text == ""
