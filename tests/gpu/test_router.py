"""The router's kernels on a GPU: against NumPy, with hostile logits, and the same in every run."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.moe import flat
from tests.moe.router import oracle
from triax import moe
from triax.testing import assert_close, assert_same_bits, poison

pytestmark = pytest.mark.gpu

DEEPSEEK = {"score": "sigmoid", "normalize": True, "scale": 2.5}
# Tokens, experts, choices, dtype, whether with a bias, options.
ROUTERS = {
    "DeepSeek-V3": (2048, 256, 8, "float32", True, {**DEEPSEEK, "num_groups": 8, "top_groups": 4}),
    "Kimi K2": (2048, 384, 8, "float32", True, DEEPSEEK),
    "Qwen3": (4096, 128, 8, "float32", False, {"normalize": True}),
    "Mixtral": (4096, 8, 2, "bfloat16", False, {"normalize": True}),
    "Llama 4": (2048, 128, 1, "bfloat16", False, {"score": "sigmoid"}),
    "OLMoE": (2048, 64, 8, "float32", False, {}),
    "softmax with all": (300, 160, 6, "float32", True, {"num_groups": 8, "top_groups": 3}),
    "half precision": (300, 512, 10, "float16", False, {}),
    "all experts": (33, 67, 67, "float32", False, {"normalize": True}),
    "one expert": (5, 1, 1, "float32", False, {}),
    "many experts": (100, 1024, 16, "float32", False, {"score": "sigmoid"}),
}


def full_options(options):
    full = {"score": "softmax", "normalize": False, "scale": 1.0, **options}
    groups = {name: full.pop(name) for name in ("num_groups", "top_groups") if name in full}
    return full, groups


@functools.partial(jax.jit, static_argnums=(3, 4))
def routed_with_gradient(logits, bias, d_weights, top_k, options):
    op = functools.partial(flat.route, top_k=top_k, bias=bias, **dict(options))
    routed, pull = jax.vjp(lambda x: op(x, implementation="triton"), logits)
    none = np.zeros(routed.experts.shape, jax.dtypes.float0)
    return routed, pull(moe.Routing(d_weights, none))[0]


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_of_today(name):
    num_tokens, num_experts, top_k, dtype, biased, options = ROUTERS[name]
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.standard_normal((num_tokens, num_experts)), dtype)
    bias = jnp.asarray(rng.standard_normal(num_experts) * 0.05, jnp.float32) if biased else None
    d_weights = jnp.asarray(rng.standard_normal((num_tokens, top_k)), jnp.float32)
    poison(8 * logits.nbytes)
    call = lambda: routed_with_gradient(logits, bias, d_weights, top_k, tuple(options.items()))
    routed, d_logits = call()

    full, groups = full_options(options)
    expected, by = oracle.choose(logits, top_k, full["score"], bias, **groups)
    experts = np.asarray(routed.experts)
    if biased:  # computed scores may differ in their last bit
        taken, best = (np.take_along_axis(by, e, 1) for e in (experts, expected))
        np.testing.assert_allclose(taken, best, rtol=2e-6)
        assert (experts != expected).any(1).mean() < 1e-2
    else:
        np.testing.assert_array_equal(experts, expected)
    assert_close(routed.weights, oracle.weigh(logits, experts, **full))
    d_expected = oracle.gradient(logits, experts, d_weights, **full)
    if np.abs(d_expected).max() < 1e-9:
        assert jnp.abs(d_logits).max() < 1e-5
    else:
        assert_close(d_logits, d_expected, terms=4 * top_k)
    for _ in range(20):
        jax.tree.map(assert_same_bits, call(), (routed, d_logits))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("num_experts", "top_k"), [(37, 6), (256, 8), (1000, 5)])
def test_ties_and_what_is_no_number(num_experts, top_k, dtype):
    rng = np.random.default_rng(1)
    values = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1, 1 + 2**-23, 1 - 2**-24, 1e-45, 0.1]
    values = np.asarray(jnp.asarray(np.array(values, np.float32), dtype).astype(jnp.float32))
    drawn = values[rng.integers(0, len(values), (500, num_experts))]
    drawn[::5] = values[-1]
    routed = moe.route(jnp.asarray(drawn, dtype), moe.Router(top_k), implementation="triton")
    order = oracle.order_of(drawn)
    expected = [oracle.best(row, top_k) for row in order]
    np.testing.assert_array_equal(routed.experts, expected)


def test_under_vmap_and_with_any_number_of_tokens():
    rng = np.random.default_rng(2)
    logits = jnp.asarray(rng.standard_normal((3, 77, 40)), jnp.float32)
    op = functools.partial(flat.route, top_k=4, normalize=True, implementation="triton")
    batched = jax.jit(jax.vmap(op))(logits)
    for num_tokens in (1, 2, 3, 31, 77):
        for batch in range(3):
            alone = op(logits[batch, :num_tokens])
            assert_same_bits(alone.weights, batched.weights[batch, :num_tokens])
            assert_same_bits(alone.experts, batched.experts[batch, :num_tokens])
