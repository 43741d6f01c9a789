"""A row's results are the same bits, however many rows there are: other tiles, the same sums."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from triax import moe
from triax.testing import assert_same_bits

pytestmark = pytest.mark.gpu

GROUPS, DEPTH, COLUMNS = 4, 2048, 1024


def normal(seed, *shape, scale=1.0):
    return jax.random.normal(jax.random.key(seed), shape) * scale


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_of_a_product(dtype):
    """Each number of rows has a config of its own."""
    weights = normal(0, GROUPS, DEPTH, COLUMNS, scale=DEPTH**-0.5).astype(dtype)
    first = normal(1, 1, DEPTH).astype(dtype)
    alone = None
    for rows in (1, 5, 9, 20, 33, 64, 100, 300, 3000):
        x = jnp.concatenate([first, normal(2, rows * GROUPS - 1, DEPTH).astype(dtype)])
        sizes = jnp.full(GROUPS, rows)
        found = jax.jit(moe.ragged_dot)(x, weights, sizes)[0]
        alone = found if alone is None else alone
        assert_same_bits(found, alone)


def test_tokens_of_a_layer():
    """The first token of a prompt as if it were decoded alone."""
    experts, hidden, width, top_k = 16, 1024, 1024, 4
    x, logits = normal(0, 4096, hidden).astype("bfloat16"), normal(1, 4096, experts)
    w_gate_up = normal(2, experts, hidden, 2 * width, scale=0.03).astype("bfloat16")
    w_down = normal(3, experts, width, hidden, scale=0.03).astype("bfloat16")

    @jax.jit
    def layer(x, logits):
        out = moe.feed_forward(x, logits, w_gate_up, w_down, top_k=top_k, normalize=True)
        return out.tokens

    alone = layer(x[:1], logits[:1])[0]
    for tokens in (8, 128, 1024, 4096):
        assert_same_bits(layer(x[:tokens], logits[:tokens])[0], alone)
