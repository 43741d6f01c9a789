"""Triax's own kernels in checked runs: no races, and no reads of what nobody wrote."""

import jax
import numpy as np

import triax.testing
from triax import moe

RUN = {"implementation": "interpret"}


def test_routing_forward_and_backward():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((96, 32)).astype(np.float32)
    weights = rng.uniform(size=(96, 2)).astype(np.float32)
    experts = rng.integers(-1, 6, (96, 2)).astype(np.int32)  # some slots are not routed
    mask = rng.integers(0, 2, (96, 6)).astype(bool)

    def there_and_back(x, weights, plan):
        rows, row_weights, _ = moe.permute(x, plan, weights=weights, **RUN)
        return moe.unpermute(rows * row_weights[:, None], plan, weights=weights, **RUN).sum()

    @jax.jit
    def gradients(x, weights, experts, mask):
        plans = (
            moe.make_plan(experts, 6, **RUN),
            moe.make_plan(experts, 6, capacity=9, align_size=8, **RUN),
            moe.make_plan_from_mask(mask, 2, **RUN),
        )
        return [jax.grad(there_and_back, (0, 1))(x, weights, plan) for plan in plans]

    with triax.testing.checked():
        for gradient in jax.tree.leaves(gradients(x, weights, experts, mask)):
            assert np.isfinite(gradient).all()


def test_sorting_chunks_forward_and_backward():
    x = np.random.default_rng(0).standard_normal((100, 32)).astype(np.float32)
    sizes, order = np.array([30, 0, 50, 11], np.int32), np.array([2, 0, 3, 1], np.int32)

    def moved(x, probs, sizes, order):
        rows, probs = moe.sort_chunks_by_index(x, sizes, order, probs=probs, **RUN)
        return (rows * probs[:, None]).sum()

    with triax.testing.checked():
        for gradient in jax.jit(jax.grad(moved, (0, 1)))(x, x[:, 0], sizes, order):
            assert np.isfinite(gradient).all()
