"""Programs by their number: op, options and shapes are drawn from (seed, index)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

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
    """The program with this number. Each op in turn."""
    found = OPS[index % len(OPS)](np.random.default_rng([seed, index]), path)
    found.seed, found.index = seed, index
    return found
