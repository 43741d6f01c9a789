"""What models do around the layer, against their formulas in float64, on every path.

Experts that return their token (LongCat-Flash), PhiMoE's router, experts that a table chooses
(DeepSeek-V4's first layers), an expert that all tokens share, times a sigmoid of the token
(Qwen2-MoE), and low-rank updates of the experts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.moe.layer.test_models import (
    EXPERTS,
    HIDDEN,
    PATHS,
    TOKENS,
    WIDTH,
    dense,
    draw,
    gradients,
    silu_and_mul,
)
from triax import moe
from triax.testing import assert_close

IDS = np.random.default_rng(5).integers(0, 9, TOKENS)
TABLE = np.argsort(np.random.default_rng(6).standard_normal((9, EXPERTS)), axis=1)[:, :3]
RANK, SCALE = 4, 2.0


def weights_and(**more):
    rng = np.random.default_rng(7)
    arrays = {n: rng.standard_normal(shape).astype(np.float32) for n, shape in more.items()}
    if "bias" in arrays:  # small, so that scores choose too
        arrays["bias"] /= 16
    return draw({}) | arrays


def experts_of(g, routing):
    return dense(g, lambda _: routing, silu_and_mul, {})


def our_experts_of(g, routing, *router, **path):
    experts = moe.Experts(g["w_gate_up"], g["w_down"])
    return moe.feed_forward(g["x"], routing, experts, *router, **path).tokens


def longcat(g):
    scores = jax.nn.softmax(g["logits"], axis=1)
    chosen = jnp.argsort(-(scores + g["bias"]), axis=1)[:, :3]
    weights = 6 * jnp.take_along_axis(scores, chosen, axis=1)
    kept = jnp.sum(weights * (chosen >= EXPERTS), axis=1, keepdims=True)
    return experts_of(g, (weights, chosen)) + kept * g["x"]


def our_longcat(g, **path):
    routing = moe.route(g["logits"], moe.Router(3, scale=6.0), bias=g["bias"], **path)
    zero = jnp.where(routing.experts >= EXPERTS, routing.weights, 0)
    return our_experts_of(g, routing, **path) + jnp.sum(zero, axis=1, keepdims=True) * g["x"]


def phimoe(g, epsilon=0.2):
    """Without noise: a choice's weight is its share among the logits that are near it."""
    logits = g["logits"]
    shares, taken = [], jnp.zeros(logits.shape, bool)
    for _ in range(2):
        best = jnp.max(jnp.where(taken, -jnp.inf, logits), axis=1, keepdims=True)
        far = best - logits > 2 * epsilon * jnp.maximum(jnp.abs(logits), best)
        kept = jnp.exp(logits - jax.lax.stop_gradient(best)) * ~(taken | far)
        first = (logits == best) & ~taken
        shares.append((jnp.sum(kept * first, axis=1) / jnp.sum(kept, axis=1), first))
        taken |= first
    weights, first = zip(*shares, strict=True)
    chosen = jnp.stack([jnp.argmax(f, axis=1) for f in first], axis=1)
    return experts_of(g, (jnp.stack(weights, axis=1), chosen))


def our_phimoe(g, **path):
    logits = left = g["logits"]
    routing = []
    for _ in range(2):
        best = jax.lax.stop_gradient(jnp.max(left, axis=1, keepdims=True))
        far = (best - logits) / jnp.maximum(jnp.abs(logits), best) > 0.4
        chosen = jnp.argmax(left, axis=1, keepdims=True)
        near = jax.nn.softmax(jnp.where(far, -jnp.inf, left), axis=1)
        routing.append((jnp.take_along_axis(near, chosen, axis=1), chosen))
        left = jnp.where(jnp.arange(EXPERTS) == chosen, -jnp.inf, left)
    both = (jnp.concatenate(arrays, axis=1) for arrays in zip(*routing, strict=True))
    return our_experts_of(g, moe.Routing(*both), **path)


def hashed(g):
    scores = jnp.take_along_axis(jnp.sqrt(jnp.log1p(jnp.exp(g["logits"]))), TABLE[IDS], axis=1)
    return experts_of(g, (1.5 * scores / jnp.sum(scores, axis=1, keepdims=True), TABLE[IDS]))


def our_hashed(g, **path):
    router = moe.Router(3, score="sqrtsoftplus", normalize=True, scale=1.5)
    return our_experts_of(g, moe.route(g["logits"], router, experts=TABLE[IDS], **path), **path)


def top_2(g):
    best = jnp.argsort(-g["logits"], axis=1)[:, :2]
    return jax.nn.softmax(jnp.take_along_axis(g["logits"], best, axis=1), axis=1), best


def gated_shared(g):
    gate, up = jnp.split(g["x"] @ g["w_shared"], 2, axis=1)
    shared = silu_and_mul(gate, up) @ g["w_out"]
    return experts_of(g, top_2(g)) + shared / (1 + jnp.exp(-g["x"] @ g["w_by_token"]))


def our_gated_shared(g, **path):
    routed = our_experts_of(g, g["logits"], moe.Router(2, normalize=True), **path)
    shared = moe.glu(g["x"] @ g["w_shared"], **path) @ g["w_out"]
    return routed + jax.nn.sigmoid(g["x"] @ g["w_by_token"]) * shared


def lora(g):
    merged = {"w_gate_up": g["a_in"] @ g["b_in"], "w_down": g["a_out"] @ g["b_out"]}
    return experts_of(g | {n: g[n] + SCALE * w for n, w in merged.items()}, top_2(g))


def our_lora(g, **path):
    weights, chosen = moe.route(g["logits"], moe.Router(2, normalize=True), **path)
    plan = moe.make_plan(chosen, EXPERTS)

    def matmul(rows, w, a, b):
        low = moe.ragged_dot(rows, a, plan.group_sizes, **path)
        update = moe.ragged_dot(low, b, plan.group_sizes, **path)
        return moe.ragged_dot(rows, w, plan.group_sizes, **path) + SCALE * update

    moved = moe.permute(g["x"], plan, weights=weights, **path)
    inner = matmul(moved.rows, g["w_gate_up"], g["a_in"], g["b_in"])
    rows = matmul(moe.glu(inner, moved.weights, **path), g["w_down"], g["a_out"], g["b_out"])
    return moe.unpermute(rows, plan, **path)


RECIPES = {
    "LongCat-Flash": (
        longcat,
        our_longcat,
        {"logits": (TOKENS, EXPERTS + 2), "bias": (EXPERTS + 2,)},
    ),
    "PhiMoE": (phimoe, our_phimoe, {}),
    "DeepSeek-V4, hashed": (hashed, our_hashed, {}),
    "Qwen2-MoE": (
        gated_shared,
        our_gated_shared,
        {"w_shared": (HIDDEN, 2 * WIDTH), "w_out": (WIDTH, HIDDEN), "w_by_token": (HIDDEN, 1)},
    ),
    "LoRA": (
        lora,
        our_lora,
        {
            "a_in": (EXPERTS, HIDDEN, RANK),
            "b_in": (EXPERTS, RANK, 2 * WIDTH),
            "a_out": (EXPERTS, WIDTH, RANK),
            "b_out": (EXPERTS, RANK, HIDDEN),
        },
    ),
}


@pytest.mark.sampled(0, 3)
@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("name", RECIPES)
def test_the_recipe_is_the_models(name, implementation):
    exact, ours, shapes = RECIPES[name]
    arrays = weights_and(**shapes)
    upstream = np.random.default_rng(9).standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    run = lambda g: ours(g, implementation=implementation)
    tokens, found = gradients(run, arrays, upstream)
    with jax.enable_x64(True):
        wide = {n: np.asarray(a, np.float64) for n, a in arrays.items()}
        expected, wanted = gradients(exact, wide, upstream)
    assert_close(tokens, expected, terms=64)
    for n, array in wanted.items():
        assert np.any(array) != (n == "bias"), n  # a bias is of the choice alone
        assert_close(found[n], array, terms=64, err_msg=n)
