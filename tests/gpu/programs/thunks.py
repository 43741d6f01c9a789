"""Compiles programs with Triton calls in them; run with XLA_FLAGS that dump thunks."""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from tests import descriptors
from tests.cases import vector_add

kind = sys.argv[1]


def five(x, y):
    # Reductions between the calls keep XLA from fusing everything into one command.
    z = vector_add(x, y)
    a = jnp.cumsum(z)
    b = vector_add(z, a)
    c = jnp.flip(jnp.cumsum(b))
    return vector_add(b, c)


def eight(x, y):
    """Kernels that need scratch memory, which nobody may allocate while a graph is captured."""
    tile = x.reshape(50, 100)
    for _ in range(8):
        tile = descriptors.call("device", tile)
    return tile.reshape(-1) - 255 * y


x = jnp.arange(5000, dtype=jnp.float32) / 64
function = {"five": five, "single": vector_add, "eight": eight}[kind]
compiled = jax.jit(function)
for _ in range(5):  # a graph is captured at one run, replayed at another
    out = compiled(x, x)
if kind != "five":
    expected = {"single": 2, "eight": 1}[kind] * np.asarray(x)
    np.testing.assert_array_equal(np.asarray(out), expected)
jax.block_until_ready(out)
