"""Programs by their number: op, options and shapes are drawn from (seed, index)."""

from __future__ import annotations

import numpy as np

from tests.forms.forms import FORMS
from tests.moe.case import Case
from tests.moe.cases import RANDOM


def program(seed: int, index: int, path: str) -> Case:
    """The program with this number. Each op in turn, every second time in a form, each in turn."""
    turn, op = divmod(index, len(RANDOM))
    found = RANDOM[op](np.random.default_rng([seed, index]), path)
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
