"""Inputs of bugs that other libraries had, as fixed cases that run before the random ones."""

from __future__ import annotations

from collections.abc import Iterator


def run_all(path: str) -> Iterator[tuple[str, str]]:
    """Each one's name, and "right", or "wrong" or "skipped" with a reason."""
    yield from ()
