"""Compiles the chunk sort, forward and backward, with probs; run with XLA's dumps on."""

import jax
import jax.numpy as jnp
import numpy as np

from triax import moe


def forward(x, sizes, indices, probs):
    return moe.sort_chunks_by_index(x, sizes, indices, probs)


def backward(x, sizes, indices, probs, g, g_probs):
    _, pull = jax.vjp(lambda x, probs: forward(x, sizes, indices, probs), x, probs)
    return pull(moe.Sorted(g, g_probs))


rng = np.random.default_rng(0)
x = jnp.asarray(rng.standard_normal((1001, 96)).astype(np.float32))
probs = jnp.asarray(rng.standard_normal(1001).astype(np.float32))
sizes = jnp.asarray(np.array([300, 0, 200, 401, 100], np.int32))
indices = jnp.asarray(np.array([3, 1, 4, 0, 2], np.int32))
# Donated, so that XLA may reuse the inputs' buffers wherever it thinks that it can.
jax.block_until_ready(jax.jit(forward, donate_argnums=(0, 3))(x + 0, sizes, indices, probs + 0))
jax.block_until_ready(
    jax.jit(backward, donate_argnums=(0, 3, 4, 5))(
        x + 0, sizes, indices, probs + 0, x + 1, probs + 1
    )
)
