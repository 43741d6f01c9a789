"""The layer on a GPU: its activation in the first product's kernel, and its memory."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.moe import flat
from tests.moe.products.chosen import without
from triax import moe
from triax.testing import assert_same_bits

pytestmark = pytest.mark.gpu


GPT_OSS = moe.Swiglu(1.702, 1.0, 1.0)


@pytest.mark.parametrize(
    ("dtype", "activation", "interleaved", "transposed", "biases"),
    [
        ("bfloat16", "swiglu", False, False, None),
        ("float16", GPT_OSS, False, True, None),
        ("bfloat16", "geglu_exact", False, False, "bfloat16"),
        ("bfloat16", "geglu", True, True, None),
        ("bfloat16", GPT_OSS, True, False, "bfloat16"),
        ("bfloat16", "swiglu", True, False, None),
        ("float16", "swiglu", False, True, "float32"),
        ("bfloat16", "relu2", False, False, None),
        ("bfloat16", "gelu", False, True, "float16"),
    ],
)
def test_activation_in_the_first_products_kernel(
    dtype, activation, interleaved, transposed, biases
):
    """Uneven groups, widths and a depth that are no multiples of a block."""
    tokens, hidden, width, experts = 1500, 200, 328, 6
    first = width if activation in ("relu2", "gelu") else 2 * width
    normal = lambda seed, *sizes: jax.random.normal(jax.random.key(seed), sizes)
    x = normal(0, tokens, hidden).astype(dtype)
    logits = normal(1, tokens, experts) + jnp.array([0, 2, -1, 0, -90, 0.5])
    weights = normal(2, experts, hidden, first) / 8, normal(3, experts, width, hidden) / 8
    weights = [(w.mT if transposed else w).astype(dtype) for w in weights]
    if biases:
        weights += [normal(4, experts, of).astype(biases) for of in (first, hidden)]

    def run(x, logits, w_gate_up, w_down, b_gate_up=None, b_down=None):
        made = moe.Experts(
            w_gate_up,
            w_down,
            b_gate_up=b_gate_up,
            b_down=b_down,
            activation=activation,
            interleaved=interleaved,
            transposed=transposed,
        )
        layer = lambda *args: moe.feed_forward(*args, moe.Router(3)).tokens
        out, pull = jax.vjp(layer, x, logits, made)
        alone = layer(x, logits, made)  # in a kernel that keeps no gate and up
        return out, pull(jnp.cos(out)), alone

    found = jax.jit(run)(x, logits, *weights)
    assert_same_bits(found[0], found[2])
    with without("sm90_16_bits"):
        wanted = jax.jit(lambda *args: run(*args))(x, logits, *weights)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.any(np.asarray(b))
        assert_same_bits(a, b)


@pytest.mark.parametrize(
    ("tokens", "hidden", "width", "experts", "top_k"),
    [
        (16384, 2560, 1280, 64, 4),
        (16384, 2048, 768, 128, 8),
        (16384, 4096, 14336, 8, 2),
        (16384, 2880, 2880, 16, 4),
        (2048, 1024, 512, 16, 4),
    ],
)
def test_memory(tokens, hidden, width, experts, top_k):
    """Little more than the results, one array of rows, and one as the first matmul makes it.

    So it is too where the gradient does not depend on the result, and where `jax.checkpoint`
    recomputes the layer. The forward pass alone has only the activation's result beside the rows.
    """
    shapes = (tokens, hidden), (tokens, experts), (experts, hidden, 2 * width)
    shapes = *shapes, (experts, width, hidden)
    dtypes = "bfloat16", "float32", "bfloat16", "bfloat16"
    args = [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, dtypes, strict=True)]

    def num_bytes(run):
        found = jax.jit(run).lower(args[0], *args).compile().memory_analysis()
        return found.temp_size_in_bytes + found.output_size_in_bytes

    def both(gradient, *args, again=False, **options):
        layer = lambda *args: flat.layer(*args, top_k=top_k, **options).tokens
        out, pull = jax.vjp(jax.checkpoint(layer) if again else layer, *args)
        return pull(gradient) if again else (out, pull(gradient))

    results = 2 * sum(a.size for a in (args[0], args[2], args[3])) + 4 * args[1].size
    tokens_bytes = 2 * args[0].size
    least = results + 2 * tokens * top_k * (hidden + 2 * width)
    assert least < num_bytes(functools.partial(both, again=True)) < 1.02 * least
    least += tokens_bytes
    assert least < num_bytes(both) < 1.02 * least
    keep = ["triax_permuted_rows", "triax_glu"]
    assert num_bytes(functools.partial(both, keep=keep)) > 1.02 * least
    alone = tokens_bytes + 2 * tokens * top_k * (hidden + width)
    forward = lambda gradient, *args: flat.layer(*args, top_k=top_k).tokens
    assert alone < num_bytes(forward) < 1.02 * alone
