"""Programs by their number: op, options and shapes are drawn from (seed, index)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.forms.forms import FORMS
from tests.fuzz import activations, feed_forward, moves, products, quantizing, routing, scaled
from tests.fuzz.draws import Rng
from tests.fuzz.program import Program

OPS: tuple[Callable[[Rng, str], Program], ...] = (
    *products.OPS,
    *scaled.OPS,
    *moves.OPS,
    *activations.OPS,
    *feed_forward.OPS,
    *routing.OPS,
    *quantizing.OPS,
)


def program(seed: int, index: int, path: str) -> Program:
    """The program with this number. Each op in turn, every second time in a form, each in turn."""
    turn, op = divmod(index, len(OPS))
    found = OPS[op](np.random.default_rng([seed, index]), path)
    found.seed, found.index = seed, index
    if turn % 2:
        forms = _forms(path)
        found.form = forms[turn // 2 % len(forms)]
    return found


def _forms(path: str) -> list[str]:
    """The forms on a path: a program has its gradients itself, and callbacks are not exported."""
    lacking = {"export"} if path == "interpret" else set()
    return [
        n for n, form in FORMS.items() if not form.differentiates and not lacking & {*form.needs}
    ]
