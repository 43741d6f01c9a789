"""Compiles programs with Triton calls in them; run with XLA_FLAGS that dump thunks."""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from tests.cases import vector_add

kind = sys.argv[1]


def five(x, y):
    # Reductions between the calls keep XLA from fusing everything into one command.
    z = vector_add(x, y)
    a = jnp.cumsum(z)
    b = vector_add(z, a)
    c = jnp.flip(jnp.cumsum(b))
    return vector_add(b, c)


x = jnp.arange(5000, dtype=jnp.float32) / 64
function = {"five": five, "single": vector_add}[kind]
out = jax.jit(function)(x, x)
if kind == "single":
    np.testing.assert_array_equal(np.asarray(out), 2 * np.asarray(x))
jax.block_until_ready(out)
