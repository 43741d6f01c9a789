"""A row's results are the same bits in every run, and however many rows come with it.

docs/trust.md has the table of what holds; each of its cells is a case here.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import triax
from tests.examples.test_moe_layer import EXAMPLES, load
from tests.moe import flat
from triax import moe
from triax.testing import assert_same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:ragged_dot dequantizes its weights"),  # some do, rightly
]

GROUPS, DEPTH, COLUMNS, EXPERTS, TOP_K = 4, 2048, 1024, 16, 4
COUNTS = 1, 5, 9, 20, 33, 64, 100, 300, 3000
TOKENS = 1, 8, 128, 1024, 4096
FAST = "ANY_F8_ANY_F8_F32_FAST_ACCUM"
NARROW = {  # dtype, block, dtype of scales
    "int8": ("int8", (1, None, 1), "float32"),
    "float8_e4m3fn": ("float8_e4m3fn", (1, None, 1), "float32"),
    "float8_e4m3fn in blocks": ("float8_e4m3fn", (1, 128, 128), "float32"),
    "int4 in groups of 32": ("int4", (1, 32, 1), "float32"),
    "int4 in groups of 128": ("int4", (1, 128, 1), "float32"),
    "MXFP4": ("float4_e2m1fn", (1, 32, 1), "float8_e8m0fnu"),
    "NVFP4": ("float4_e2m1fn", (1, 16, 1), "float8_e4m3fn"),
}


class Batch(NamedTuple):
    """The same row or token, with others behind it, or in front of it and in uneven groups."""

    count: int
    last: bool = False

    def of(self, array, groups=1):
        rows = array[: self.count * groups]
        return jnp.roll(rows, -1, axis=0) if self.last else rows

    @property
    def at(self):
        return -1 if self.last else 0

    @property
    def sizes(self):
        n = self.count
        return jnp.array([1, 0, n, 3 * n - 1] if self.last else [n] * GROUPS)


@functools.cache
def normal(seed, *shape, scale=1.0):
    return jax.random.normal(jax.random.key(seed), shape) * scale


def rows_of(batch, dtype="bfloat16", depth=DEPTH):
    return batch.of(normal(2, max(COUNTS) * GROUPS, depth), GROUPS).astype(dtype)


def logits_of(batch):
    return batch.of(normal(4, max(TOKENS), EXPERTS))


def weights(dtype="bfloat16"):
    return normal(0, GROUPS, DEPTH, COLUMNS, scale=DEPTH**-0.5).astype(dtype)


def product(batch, dtype):
    """In float32: where a sum is rounded to less, other orders of it often have the same bits."""
    how = {"preferred_element_type": jnp.float32}
    return moe.ragged_dot(rows_of(batch, dtype), weights(dtype), batch.sizes, **how)[batch.at]


def rows_gradient(batch, dtype):
    run = lambda rows: moe.ragged_dot(rows, weights(dtype), batch.sizes)
    pull = jax.vjp(run, rows_of(batch, dtype))[1]
    return pull(rows_of(batch, dtype, COLUMNS))[0][batch.at]


def with_bias(batch, dtype):
    bias = normal(3, GROUPS, COLUMNS).astype(dtype)
    rows = rows_of(batch, dtype)
    return moe.ragged_dot(rows, weights(dtype), batch.sizes, bias=bias)[batch.at]


def in_8_bits(rows, weights, block):
    of_weights = (1, None, 1) if block is None else (1, block, block)
    rows = moe.quantize(rows, block=(1, block))
    return rows, moe.quantize(weights, block=of_weights, transposed=True)


def narrowed(weights, name, tiled):
    is_nvfp4 = name == "NVFP4"  # which `quantize` does not make
    dtype, block, scale = NARROW["MXFP4" if is_nvfp4 else name]
    given = moe.quantize(weights, dtype, block=block, transposed=True, scale_dtype=scale)
    if is_nvfp4:
        scales = jnp.stack([given.scales.astype("float32") * by for by in (13, 16)], -1)
        scales = scales.reshape(*given.scales.shape[:-1], -1).astype(NARROW[name][2])
        how = {"transposed": True, "packed": given.packed}
        given = moe.ScaledArray(given.values, scales, NARROW[name][1], **how)
    return given.tile() if tiled else given


def eight_bits(batch, block, precision):
    how = {"precision": precision, "preferred_element_type": jnp.float32}
    given = in_8_bits(rows_of(batch), weights(), block)
    return moe.ragged_dot(*given, batch.sizes, **how)[batch.at]


def narrow_weights(batch, name, tiled):
    how = {"preferred_element_type": jnp.float32}
    given = narrowed(weights(), name, tiled)
    return moe.ragged_dot(rows_of(batch), given, batch.sizes, **how)[batch.at]


def ranges(name, tiled):
    """The batches among which bits are the same: each range has instructions of its own.

    Of up to 8 rows a group, tiles are divided along the depth among warps as there is work.
    """
    if tiled:
        return {"9 to 256 rows": COUNTS[2:-2], "more rows": COUNTS[-2:]}
    if NARROW[name][0] in ("int4", "float4_e2m1fn"):
        return {"all": COUNTS}
    return {"up to 16 rows": COUNTS[:3], "17 to 256 rows": COUNTS[3:-2], "more rows": COUNTS[-2:]}


def gate_and_up(batch, dtype, activation="swiglu"):
    rows = rows_of(batch, dtype)
    return moe.glu(rows, jnp.full(len(rows), 0.3), activation=activation)[batch.at]


def quantized(batch, block):
    found = moe.quantize(rows_of(batch), block=(1, block))
    return found.values[batch.at], found.scales[batch.at]


def router(batch, score):
    return [of[batch.at] for of in moe.route(logits_of(batch), moe.Router(TOP_K, score=score))]


def there_and_back(batch, dtype):
    plan = moe.make_plan(moe.route(logits_of(batch), moe.Router(TOP_K)).experts, EXPERTS)
    rows = moe.permute(batch.of(normal(5, max(TOKENS), DEPTH)).astype(dtype), plan)
    weights = batch.of(normal(6, max(TOKENS), TOP_K))
    back = moe.unpermute(rows, plan, weights=weights)[batch.at]
    return rows[plan.row_of[batch.at]], back


def there_and_back_gradient(batch, dtype):
    plan = moe.make_plan(moe.route(logits_of(batch), moe.Router(TOP_K)).experts, EXPERTS)
    weights = batch.of(normal(6, max(TOKENS), TOP_K))

    def loss(x, weights):
        rows = moe.permute(x, plan)
        return jnp.sum(jnp.sin(moe.unpermute(rows, plan, weights=weights)))

    x = batch.of(normal(5, max(TOKENS), DEPTH)).astype(dtype)
    return [gradient[batch.at] for gradient in jax.grad(loss, (0, 1))(x, weights)]


def layer_arguments(batch, dtype):
    hidden, width = 1024, 1024
    x = batch.of(normal(7, max(TOKENS), hidden)).astype(dtype)
    w_gate_up = normal(8, EXPERTS, hidden, 2 * width, scale=0.03).astype(dtype)
    return x, w_gate_up, normal(9, EXPERTS, width, hidden, scale=0.03).astype(dtype)


def layer(batch, dtype="bfloat16", biases=False, **options):
    x, w_gate_up, w_down = layer_arguments(batch, dtype)
    if biases:
        options |= {"b_gate_up": w_gate_up[:, 0] * 9, "b_down": w_down[:, 0] * 9}
    how = {"top_k": TOP_K, "normalize": True} | options
    return flat.layer(x, logits_of(batch), w_gate_up, w_down, **how).tokens[batch.at]


def layer_gradient(batch):
    """Of a token, of the sum of its own results."""
    x, *both = layer_arguments(batch, "bfloat16")

    def loss(x):
        return jnp.sum(flat.layer(x, logits_of(batch), *both, top_k=TOP_K).tokens)

    return jax.grad(loss)(x)[batch.at]


OAI = moe.Swiglu(alpha=1.702, limit=7.0, up_offset=1.0)
SAME = {
    **{f"ragged_dot, {d}": (product, COUNTS, d) for d in ("bfloat16", "float16", "float32")},
    **{f"rows' gradient, {d}": (rows_gradient, COUNTS, d) for d in ("bfloat16", "float32")},
    "ragged_dot with a bias": (with_bias, COUNTS, "bfloat16"),
    **{
        f"weights of {name}{' in tiles' * tiled}, {rows}": (narrow_weights, counts, name, tiled)
        for name in NARROW
        for tiled in (False, True)
        for rows, counts in ranges(name, tiled).items()
    },
    **{f"glu, {d}": (gate_and_up, COUNTS, d) for d in ("bfloat16", "float32")},
    **{f"glu, {a}": (gate_and_up, COUNTS, "bfloat16", a) for a in ("geglu", "gelu_exact", OAI)},
    "quantize, rows": (quantized, COUNTS, None),
    "quantize, blocks": (quantized, COUNTS, 128),
    **{f"route, {s}": (router, TOKENS, s) for s in ("softmax", "sigmoid", "sqrtsoftplus")},
    **{f"permute and unpermute, {d}": (there_and_back, TOKENS, d) for d in ("bfloat16", "float32")},
    "gradients of permute and unpermute": (there_and_back_gradient, TOKENS, "bfloat16"),
    "feed_forward, bfloat16": (layer, TOKENS),
    "feed_forward, float32": (layer, TOKENS, "float32"),
    "feed_forward, biases": (functools.partial(layer, biases=True, activation=OAI), TOKENS),
    "feed_forward, its gradient by tokens": (layer_gradient, TOKENS),
}


# Small tiles of 8-bit floats are multiplied by other instructions, which keep more of their sums;
# and few rows times narrow weights by a kernel that takes the depth in another order.
NEARLY = {
    "8 bits, float32 sums": (eight_bits, COUNTS, None, None),
    "8 bits, fast sums": (eight_bits, COUNTS, None, FAST),
    "8 bits, blocks": (eight_bits, COUNTS, 128, None),
    **{
        f"weights of {name}{' in tiles' * tiled}": (narrow_weights, COUNTS, name, tiled)
        for name in NARROW
        for tiled in (False, True)
    },
    "feed_forward in 8 bits": (functools.partial(layer, recipe="rows"), TOKENS),
}


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("case", SAME)
def test_same_bits_in_every_batch_and_every_run(case, last):
    """Each number of rows has a config of its own: other tiles, the same sums."""
    check(*SAME[case], last=last)


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("case", NEARLY)
def test_same_bits_in_every_batch_if_asked_for(case, last):
    with triax.same_bits():
        check(*NEARLY[case], last=last)


def check(run, counts, *options, last):
    alone = None
    for batch in (Batch(count, last) for count in counts):
        found, again = run(batch, *options), run(batch, *options)
        alone = found if alone is None else alone
        jax.tree.map(assert_same_bits, found, alone)
        jax.tree.map(assert_same_bits, again, found)


@pytest.mark.parametrize("case", NEARLY)
def test_same_bits_in_every_run_alone(case):
    """And in a batch the same within the rounding of the sums of its dtype."""
    run, counts, *options = NEARLY[case]
    alone = np.asarray(run(Batch(counts[0]), *options), np.float32)
    for batch in map(Batch, counts):
        found, again = run(batch, *options), run(batch, *options)
        assert_same_bits(again, found)
        error = np.linalg.norm(np.asarray(found, np.float32) - alone) / np.linalg.norm(alone)
        assert error < 0.02, batch


@pytest.mark.parametrize("experts", ["bfloat16", "8 bits", "MXFP4"])
def test_serving_and_training_have_the_same_bits(monkeypatch, experts):
    """Prompts at once, tokens one at a time, and a training step with whole sequences."""
    monkeypatch.syspath_prepend(str(EXAMPLES))  # it imports those beside it
    with triax.same_bits():
        assert load("same_bits").difference(experts, 8, 320, 8) == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "8 bits"])
@pytest.mark.parametrize("last", [False, True], ids=["even", "uneven"])
def test_gradients_of_weights_and_biases_in_every_run(dtype, last):
    """They are sums over the rows of the batch, in one order."""
    recipe = {"recipe": "rows"} if dtype == "8 bits" else {}
    dtype = "bfloat16" if recipe else dtype
    batch = Batch(TOKENS[-1], last)
    x, *both = layer_arguments(batch, dtype)
    logits = logits_of(batch) + jnp.arange(EXPERTS) * last  # some experts get most
    how = {"top_k": TOP_K, **recipe}

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1, 2, 3))
    def gradients(w_gate_up, w_down, b_gate_up, b_down):
        biases = {"b_gate_up": b_gate_up, "b_down": b_down}
        out = flat.layer(x, logits, w_gate_up, w_down, **biases, **how)
        return jnp.sum(jnp.sin(out.tokens.astype(jnp.float32)))

    first, *more = (gradients(*both, both[0][:, 0], both[1][:, 0]) for _ in range(5))
    for again in more:
        jax.tree.map(assert_same_bits, again, first)
