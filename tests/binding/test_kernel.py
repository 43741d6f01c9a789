"""The view of what Triton calls a kernel."""

from __future__ import annotations

import pytest
import triton

from tests.kernels import add_kernel
from triax.binding import kernel
from triax.binding.kernel import Kernel
from triax.errors import ArgumentTypeError


def test_a_view_is_made_once():
    assert Kernel.of(add_kernel) is Kernel.of(add_kernel)


def test_heuristics_do_not_tune():
    tuned = triton.heuristics({"BLOCK": lambda _: 16})(add_kernel)
    tuned = triton.heuristics({"num_warps": lambda _: 4})(tuned)
    view = Kernel.of(tuned)
    assert len(view.stages) == 2
    assert view.autotuner is None


def test_views_are_not_kept_without_end(monkeypatch):
    views = {}
    monkeypatch.setattr(kernel, "_views", views)
    monkeypatch.setattr(kernel, "_MOST_VIEWS", 2)
    for _ in range(3):
        Kernel.of(triton.heuristics({})(add_kernel))
        assert len(views) <= 2


def test_an_interpreted_function():
    made = type("InterpretedFunction", (), {})()
    with pytest.raises(ArgumentTypeError, match="Unset TRITON_INTERPRET"):
        Kernel.of(made)
