"""A row's results are the same bits in every run, and however many rows come with it.

docs/trust.md has the table of what holds; each of its cells is a case here.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from triax import moe
from triax.testing import assert_same_bits

pytestmark = pytest.mark.gpu

GROUPS, DEPTH, COLUMNS, EXPERTS, TOP_K = 4, 2048, 1024, 16, 4
COUNTS = 1, 5, 9, 20, 33, 64, 100, 300, 3000
TOKENS = 1, 8, 128, 1024, 4096
FAST = "ANY_F8_ANY_F8_F32_FAST_ACCUM"


@functools.cache
def normal(seed, *shape, scale=1.0):
    return jax.random.normal(jax.random.key(seed), shape) * scale


def rows_of(count, dtype="bfloat16", depth=DEPTH):
    """The same first row, whatever follows."""
    return normal(2, max(COUNTS) * GROUPS, depth)[: count * GROUPS].astype(dtype)


def weights(dtype="bfloat16"):
    return normal(0, GROUPS, DEPTH, COLUMNS, scale=DEPTH**-0.5).astype(dtype)


def product(count, dtype):
    sizes = jnp.full(GROUPS, count)
    return moe.ragged_dot(rows_of(count, dtype), weights(dtype), sizes)[0]


def rows_gradient(count, dtype):
    sizes = jnp.full(GROUPS, count)
    run = lambda rows: moe.ragged_dot(rows, weights(dtype), sizes)
    pull = jax.vjp(run, rows_of(count, dtype))[1]
    return pull(rows_of(count, dtype, COLUMNS))[0][0]


def with_bias(count, dtype):
    bias = normal(3, GROUPS, COLUMNS).astype(dtype)
    sizes = jnp.full(GROUPS, count)
    return moe.ragged_dot(rows_of(count, dtype), weights(dtype), sizes, bias=bias)[0]


def eight_bits(count, block, precision):
    of_weights = (1, None, 1) if block is None else (1, block, block)
    rows = moe.quantize(rows_of(count), block=(1, block))
    given = moe.quantize(weights(), block=of_weights, transposed=True)
    sizes = jnp.full(GROUPS, count)
    return moe.ragged_dot(
        rows, given, sizes, precision=precision, preferred_element_type=jnp.bfloat16
    )[0]


def narrow_weights(count, dtype, block):
    given = moe.quantize(weights(), dtype, block=block, transposed=True)
    return moe.ragged_dot(rows_of(count), given, jnp.full(GROUPS, count))[0]


def gate_and_up(count, dtype):
    return moe.glu(rows_of(count, dtype), jnp.full(count * GROUPS, 0.3))[0]


def quantized(count, block):
    found = moe.quantize(rows_of(count), block=(1, block))
    return found.values[0], found.scales[0]


def router(count, score):
    routed = moe.route(normal(4, max(TOKENS), EXPERTS)[:count], TOP_K, score=score)
    return routed.weights[0], routed.experts[0]


def there_and_back(count, dtype):
    experts = moe.route(normal(4, max(TOKENS), EXPERTS)[:count], TOP_K).experts
    plan = moe.make_plan(experts, EXPERTS)
    x = normal(5, max(TOKENS), DEPTH)[:count].astype(dtype)
    rows = moe.permute(x, plan)
    return moe.unpermute(rows, plan, weights=normal(6, max(TOKENS), TOP_K)[:count])[0]


def layer(count, dtype="bfloat16", **options):
    hidden, width = 1024, 1024
    x = normal(7, max(TOKENS), hidden)[:count].astype(dtype)
    w_gate_up = normal(8, EXPERTS, hidden, 2 * width, scale=0.03).astype(dtype)
    w_down = normal(9, EXPERTS, width, hidden, scale=0.03).astype(dtype)
    logits = normal(4, max(TOKENS), EXPERTS)[:count]
    how = {"top_k": TOP_K, "normalize": True} | options
    return moe.feed_forward(x, logits, w_gate_up, w_down, **how).tokens[0]


def layer_gradient(count):
    """Of a token, of the sum of its own results."""
    hidden, width = 1024, 1024
    w_gate_up = normal(8, EXPERTS, hidden, 2 * width, scale=0.03).astype("bfloat16")
    w_down = normal(9, EXPERTS, width, hidden, scale=0.03).astype("bfloat16")
    logits = normal(4, max(TOKENS), EXPERTS)[:count]

    def loss(x):
        return jnp.sum(moe.feed_forward(x, logits, w_gate_up, w_down, top_k=TOP_K).tokens)

    return jax.grad(loss)(normal(7, max(TOKENS), hidden)[:count].astype("bfloat16"))[0]


SAME = {
    **{f"ragged_dot, {d}": (product, COUNTS, d) for d in ("bfloat16", "float16", "float32")},
    **{f"rows' gradient, {d}": (rows_gradient, COUNTS, d) for d in ("bfloat16", "float32")},
    "ragged_dot with a bias": (with_bias, COUNTS, "bfloat16"),
    "weights of int8": (narrow_weights, COUNTS, "int8", (1, None, 1)),
    **{f"glu, {d}": (gate_and_up, COUNTS, d) for d in ("bfloat16", "float32")},
    "quantize, rows": (quantized, COUNTS, None),
    "quantize, blocks": (quantized, COUNTS, 128),
    **{f"route, {s}": (router, TOKENS, s) for s in ("softmax", "sigmoid", "sqrtsoftplus")},
    **{f"permute and unpermute, {d}": (there_and_back, TOKENS, d) for d in ("bfloat16", "float32")},
    "feed_forward, bfloat16": (layer, TOKENS),
    "feed_forward, float32": (layer, TOKENS, "float32"),
    "feed_forward, its gradient by tokens": (layer_gradient, TOKENS),
}


# Small tiles of 8-bit floats are multiplied by other instructions, which keep more of their sums;
# and few rows times narrow weights by a kernel that takes the depth in another order.
NEARLY = {
    "8 bits, float32 sums": (eight_bits, COUNTS, None, None),
    "8 bits, fast sums": (eight_bits, COUNTS, None, FAST),
    "8 bits, blocks": (eight_bits, COUNTS, 128, None),
    "weights of float8_e4m3fn": (narrow_weights, COUNTS, "float8_e4m3fn", (1, None, 1)),
    "weights of int4": (narrow_weights, COUNTS, "int4", (1, 128, 1)),
    "feed_forward in 8 bits": (functools.partial(layer, recipe="rows"), TOKENS),
}


@pytest.mark.parametrize("case", SAME)
def test_same_bits_in_every_batch_and_every_run(case):
    """Each number of rows has a config of its own: other tiles, the same sums."""
    run, counts, *options = SAME[case]
    alone = None
    for count in counts:
        found, again = run(count, *options), run(count, *options)
        alone = found if alone is None else alone
        jax.tree.map(assert_same_bits, found, alone)
        jax.tree.map(assert_same_bits, again, found)


@pytest.mark.parametrize("case", NEARLY)
def test_same_bits_in_every_run_alone(case):
    """And in a batch the same within the rounding of the sums of its dtype."""
    run, counts, *options = NEARLY[case]
    alone = np.asarray(run(counts[0], *options), np.float32)
    for count in counts:
        found, again = run(count, *options), run(count, *options)
        assert_same_bits(again, found)
        error = np.linalg.norm(np.asarray(found, np.float32) - alone) / np.linalg.norm(alone)
        assert error < 0.02, count
