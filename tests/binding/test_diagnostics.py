"""What an error of the compiler may be about."""

from __future__ import annotations

import types

import pytest

from triax.binding.diagnostics import hint
from triax.binding.launch import Scalar
from triax.binding.values import Static

NONE, TWO = Scalar(Static(None)), Scalar(Static(2))


@pytest.mark.parametrize(
    ("leaf", "error", "expected"),
    [
        (NONE, TypeError("'NoneType' object"), " The kernel gets None for `x`."),
        (NONE, TypeError("bad operand"), ""),
        (TWO, TypeError("'NoneType' object"), ""),
        (TWO, None, ""),
    ],
)
def test_hint(leaf, error, expected):
    launch = types.SimpleNamespace(
        named_leaves=[("x", leaf)], arguments=[("x", leaf)], constants={}
    )
    assert hint(launch, error) == expected


def test_a_folder_that_cannot_be_written():
    assert "set TRITON_CACHE_DIR" in hint(None, PermissionError("read-only"))
