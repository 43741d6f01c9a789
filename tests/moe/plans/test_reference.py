"""The plan in plain JAX: what XLA is given."""

from __future__ import annotations

import jax
import numpy as np
from jax.experimental import checkify

from triax.moe.plans.reference import select_experts_reference


def test_masks_write_in_bounds():
    """XLA's deterministic scatter takes an index past the last slot for one of the next token."""
    mask = np.random.default_rng(0).random((50, 7)) < 0.6
    select = checkify.checkify(select_experts_reference, errors=checkify.index_checks)
    error, selected = jax.jit(select, static_argnums=1)(mask, 3)
    error.throw()
    for experts, chosen in zip(np.asarray(selected), mask, strict=True):
        expected = [*np.flatnonzero(chosen), -1, -1, -1][:3]
        np.testing.assert_array_equal(experts, expected)
