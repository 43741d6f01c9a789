"""Triax's own kernels in checked runs: no races, and no reads of what nobody wrote."""

import jax
import jax.numpy as jnp
import numpy as np

import triax.testing
from triax import moe

RUN = {"implementation": "interpret"}


def test_routing_forward_and_backward():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((96, 32)), jnp.float32)
    weights = jnp.asarray(rng.uniform(size=(96, 2)), jnp.float32)
    experts = jnp.asarray(rng.integers(-1, 6, (96, 2)), jnp.int32)  # some slots are not routed
    mask = jnp.asarray(rng.integers(0, 2, (96, 6)), bool)

    def there_and_back(x, weights, plan):
        rows, row_weights, _ = moe.permute(x, plan, weights=weights, **RUN)
        return moe.unpermute(rows * row_weights[:, None], plan, weights=weights, **RUN).sum()

    with triax.testing.checked():
        for plan in (
            moe.make_plan(experts, 6, **RUN),
            moe.make_plan(experts, 6, capacity=9, align_size=8, **RUN),
            moe.make_plan_from_mask(mask, 2, **RUN),
        ):
            for gradient in jax.grad(there_and_back, (0, 1))(x, weights, plan):
                assert np.isfinite(gradient).all()


def test_sorting_chunks_forward_and_backward():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((100, 32)), jnp.float32)
    sizes, order = jnp.asarray([30, 0, 50, 11], jnp.int32), jnp.asarray([2, 0, 3, 1], jnp.int32)

    def moved(x, probs):
        rows, probs = moe.sort_chunks_by_index(x, sizes, order, probs=probs, **RUN)
        return (rows * probs[:, None]).sum()

    with triax.testing.checked():
        for gradient in jax.grad(moved, (0, 1))(x, x[:, 0]):
            assert np.isfinite(gradient).all()
