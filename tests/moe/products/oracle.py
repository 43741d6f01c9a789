"""ragged_dot by its definition, group by group in float64, and inputs that are hard on it."""

from __future__ import annotations

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np

DTYPES = ["float32", "bfloat16", "float16"]

SIZES = {
    "even": [30] * 4,
    "uneven": [0, 1, 64, 40],  # 64 are whole tiles
    "one": [0, 0, 120, 0],
    "none": [0, 0, 0, 0],
    "too many": [100, 50, 2**31 - 1, 2**31 - 1],
    "negative": [-7, 60, -(2**31), 33],
}
NUM_ROWS = 125


def spans(sizes, num_rows):
    """The rows of each group: negative sizes are empty, and groups end at the last row."""
    start = 0
    for size in sizes:
        end = min(start + max(int(size), 0), num_rows)
        yield slice(start, end)
        start = end


def draw(seed, depth, columns, dtype, num_rows=NUM_ROWS, num_groups=4):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype))
    return SimpleNamespace(
        rows=normal(num_rows, depth),
        weights=normal(num_groups, depth, columns),
        gradient=normal(num_rows, columns),
    )


def ragged_dot(rows, weights, sizes):
    x, w = np.asarray(rows, np.float64), np.asarray(weights, np.float64)
    out = np.zeros((x.shape[0], w.shape[2]))
    for group, span in enumerate(spans(sizes, len(x))):
        out[span] = x[span] @ w[group]
    return out


def group_outer(left, right, sizes):
    x, y = np.asarray(left, np.float64), np.asarray(right, np.float64)
    return np.stack([x[span].T @ y[span] for span in spans(sizes, len(x))])


def all_three(case, sizes):
    """The product and both gradients."""
    transposed = np.swapaxes(np.asarray(case.weights, np.float64), 1, 2)
    return (
        ragged_dot(case.rows, case.weights, sizes),
        ragged_dot(case.gradient, transposed, sizes),
        group_outer(case.rows, case.gradient, sizes),
    )
