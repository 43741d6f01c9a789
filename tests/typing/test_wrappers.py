"""A user's code is checked against Triax's types, as `mypy --strict` does where it is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

WRAPPERS = Path(__file__).with_name("wrappers.py")
SOURCE = WRAPPERS.parent.parent.parent / "src"


def test_mypy_accepts_wrappers(monkeypatch, tmp_path):
    api = pytest.importorskip("mypy.api")
    monkeypatch.setenv("MYPYPATH", str(SOURCE))
    # Without Triax's configuration, and silent about Triax itself: users have neither.
    report, problems, status = api.run(
        [
            "--strict",
            "--untyped-calls-exclude=jax",
            "--config-file=",
            "--follow-imports=silent",
            f"--cache-dir={tmp_path}",
            str(WRAPPERS),
        ]
    )
    assert status == 0, report + problems
