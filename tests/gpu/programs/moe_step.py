"""Compiles plan, permute and unpermute, forward and backward; run with XLA's dumps on."""

import jax
import jax.numpy as jnp
import numpy as np

from triax import moe


def routed(x, selected, weights, scale):
    plan = moe.make_plan(selected, 16, align_size=8)
    out = moe.permute(x, plan, weights=weights)
    # Real work between the two, or XLA would remove both.
    rows = jnp.tanh(out.rows * scale) + out.weights[:, None]
    return moe.unpermute(rows, plan, weights)


def routed_grad(x, selected, weights, scale, g):
    _, pull = jax.vjp(lambda x, w, s: routed(x, selected, w, s), x, weights, scale)
    return pull(g)


rng = np.random.default_rng(0)
x = jnp.asarray(rng.standard_normal((601, 96)).astype(np.float32))
selected = jnp.asarray(rng.integers(0, 16, (601, 4)).astype(np.int32))
weights = jnp.asarray(rng.random((601, 4)).astype(np.float32))
scale = jnp.float32(0.5)
# Donated, so that XLA may reuse the inputs' buffers wherever it thinks that it can.
jax.block_until_ready(jax.jit(routed, donate_argnums=(0, 2))(x + 0, selected, weights + 0, scale))
jax.block_until_ready(
    jax.jit(routed_grad, donate_argnums=(0, 2, 4))(x + 0, selected, weights + 0, scale, x + 1)
)
