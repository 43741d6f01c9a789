"""The router in plain JAX, where `route` does not reach it."""

from __future__ import annotations

import jax
import numpy as np

from triax.moe.router import reference


def test_each_row_has_a_norm_of_its_own():
    """Rows whose powers are no floats, beside others, and rows of zeros."""
    weights = np.float32([[3, 4], [3e-30, 4e-30], [3e30, 4e30], [0, 0]])
    found = jax.jit(lambda weights: reference.of_norm_one(weights, 2.0))(weights)
    np.testing.assert_allclose(found, [[0.6, 0.8]] * 3 + [[0, 0]], rtol=1e-6)
