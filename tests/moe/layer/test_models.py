"""What models do around the layer, against their formulas in float64, on every path.

Their layers are cases (`tests/moe/layer/case.py`). Here are a router's weights that multiply the
tokens (Llama 4), experts that return their token (LongCat-Flash), PhiMoE's router, experts that a
table chooses (DeepSeek-V4's first layers), an expert that all tokens share, times a sigmoid of the
token (Qwen2-MoE), and low-rank updates of the experts.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from triax import moe
from triax.errors import ArgumentValueError
from triax.testing import assert_close

TOKENS, HIDDEN, WIDTH, EXPERTS = 22, 16, 12, 8
PATHS = ["interpret", "xla"]
IDS = np.random.default_rng(5).integers(0, 9, TOKENS)
TABLE = np.argsort(np.random.default_rng(6).standard_normal((9, EXPERTS)), axis=1)[:, :3]
RANK, SCALE = 4, 2.0
ROUTER = moe.Router(2, normalize=True)


def draw(tokens=TOKENS, **more):
    """The arrays by name, and those of other shapes."""
    rng = np.random.default_rng(7)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    arrays = {
        "x": normal(tokens, HIDDEN),
        "logits": normal(tokens, EXPERTS),
        "w_gate_up": normal(EXPERTS, HIDDEN, 2 * WIDTH) / 3,
        "w_down": normal(EXPERTS, WIDTH, HIDDEN) / 3,
    }
    arrays |= {n: normal(*shape) for n, shape in more.items()}
    if "bias" in arrays:  # small, so that scores choose too
        arrays["bias"] /= 16
    return arrays


def silu_and_mul(gate, up):
    return gate / (1 + jnp.exp(-gate)) * up


def experts_of(g, routing):
    """All experts for all tokens, masked by one-hots, in the dtype of the arrays."""
    weights, chosen = routing
    by_expert = jnp.einsum(
        "tk,tke->te", weights, jax.nn.one_hot(chosen, EXPERTS, dtype=weights.dtype)
    )
    inner = silu_and_mul(*jnp.split(jnp.einsum("th,ehf->tef", g["x"], g["w_gate_up"]), 2, axis=2))
    return jnp.einsum("te,teh->th", by_expert, jnp.einsum("tef,efh->teh", inner, g["w_down"]))


def our_experts_of(g, routing, *router, **path):
    experts = moe.Experts(g["w_gate_up"], g["w_down"])
    return moe.feed_forward(g["x"], routing, experts, *router, **path).tokens


def llama4(g):
    chosen = jnp.argmax(g["logits"], axis=1)[:, None]
    weights = 1 / (1 + jnp.exp(-jnp.take_along_axis(g["logits"], chosen, 1)))
    return experts_of(g | {"x": g["x"] * weights}, (jnp.ones_like(weights), chosen))


def our_llama4(g, **path):
    weights, chosen = moe.route(g["logits"], moe.Router(1, score="sigmoid"), **path)
    x = (g["x"] * weights).astype(g["x"].dtype)
    return our_experts_of(g | {"x": x}, moe.Routing(jnp.ones_like(weights), chosen), **path)


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
    "Llama 4": (llama4, our_llama4, {}),
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


def gradients(function, arrays, upstream):
    """What the function returns, and the gradients of its sum times `upstream`."""

    def loss(arrays):
        out = function(arrays)
        return jnp.sum(out * upstream), out

    (_, out), found = jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)
    return out, found


@pytest.mark.sampled(0, 3)
@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("name", RECIPES)
def test_the_recipe_is_the_models(name, implementation):
    exact, ours, shapes = RECIPES[name]
    arrays = draw(**shapes)
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


LAYOUTS = {
    "interleaved": {"interleaved": True, "activation": moe.Swiglu(1.702, 0.7, 1.0)},
    "two arrays": {"activation": "geglu_exact"},
}


@pytest.mark.sampled(0, 1)
@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
@pytest.mark.parametrize("name", LAYOUTS)
def test_experts_spread_over_devices(name):
    """Inside `shard_map` the layer is that of one device, its gradients too."""
    biases = {"b_gate_up": (EXPERTS, 2 * WIDTH), "b_down": (EXPERTS, HIDDEN), "bias": (EXPERTS,)}
    arrays = draw(20, **biases)
    upstream = np.random.default_rng(9).standard_normal((20, HIDDEN)).astype(np.float32)
    mesh = Mesh(np.array(jax.devices()[:4]), ("d",))

    def layer(g, **how):
        halves = lambda a: tuple(jnp.split(a, 2, axis=-1)) if name == "two arrays" else a
        experts = moe.Experts(
            halves(g["w_gate_up"]),
            g["w_down"],
            b_gate_up=halves(g["b_gate_up"]),
            b_down=g["b_down"],
            **LAYOUTS[name],
        )
        router = moe.Router(3, score="sigmoid", normalize=True)
        return moe.feed_forward(g["x"], g["logits"], experts, router, bias=g["bias"], **how)

    def spread(arrays):
        specs = {n: P() if n == "bias" else P("d") for n in arrays}
        out_specs = moe.FeedForward(P("d"), P(), P(), P("d"))
        run = functools.partial(layer, axis_name="d")
        return jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=out_specs)(arrays)

    found, wanted = (
        gradients(lambda arrays, f=f: f(arrays).tokens, arrays, upstream) for f in (spread, layer)
    )
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    jax.tree.map(close, found, wanted)
    out, expected = jax.jit(spread)(arrays), layer(arrays)
    np.testing.assert_array_equal(out.group_counts, expected.group_counts)
    np.testing.assert_array_equal(out.routing.experts, expected.routing.experts)


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize(
    "activation",
    [
        lambda gate, up: jnp.sqrt(jnp.abs(gate)) * up,
        lambda gate, up: gate / jnp.linalg.norm(gate, axis=1, keepdims=True) * up,
    ],
    ids=["of each number", "of each row"],
)
def test_functions_that_are_not_finite_at_zero(activation):
    """Pad rows, which are zeros, reach no weights."""
    arrays = draw()
    upstream = np.random.default_rng(9).standard_normal((TOKENS, HIDDEN)).astype(np.float32)

    def run(arrays, align_size):
        weights, experts = moe.route(arrays["logits"], moe.Router(2, normalize=True))
        plan = moe.make_plan(experts, EXPERTS, align_size=align_size)
        rows, row_weights, _ = moe.permute(arrays["x"], plan, weights=weights)
        gate_up = moe.ragged_dot(rows, arrays["w_gate_up"], plan.group_sizes)
        inner = moe.glu(gate_up, row_weights, activation=activation)
        return moe.unpermute(moe.ragged_dot(inner, arrays["w_down"], plan.group_sizes), plan)

    plain, padded = (
        gradients(functools.partial(run, align_size=size), arrays, upstream) for size in (1, 4)
    )
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    jax.tree.map(close, padded, plain)


@pytest.mark.slow("many programs for one rule")
@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
def test_on_explicit_axes():
    """A sequence that is cut, scales that are cut as tokens are, and a function of a tracer."""
    arrays = draw()
    scales = np.linspace(1, 2, EXPERTS).astype(np.float32)
    x, logits = (arrays[n][:16].reshape(4, 4, -1) for n in ("x", "logits"))

    def run(x, logits, scales, alpha):
        activation = lambda gate, up: gate * jax.nn.sigmoid(alpha * gate) * up
        experts = moe.Experts(arrays["w_gate_up"], arrays["w_down"], activation=activation)
        out = moe.feed_forward(x, logits, experts, moe.Router(2), expert_scale=scales)
        flat = logits.reshape(16, -1) if not EXPLICIT else jax.sharding.reshard(logits, P("x"))
        flat = flat.reshape(16, -1)
        given = moe.route(flat, moe.Router(2), experts=jax.lax.top_k(flat, 2)[1])
        return out.tokens, given.weights

    EXPLICIT = False
    expected = jax.jit(run)(x, logits, scales, 1.5)
    EXPLICIT = True
    kinds = 2 * (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=kinds)
    put = lambda a, *spec: jax.device_put(a, jax.sharding.NamedSharding(mesh, P(*spec)))
    with jax.set_mesh(mesh):
        cut = put(x, None, "x"), put(logits, None, "x"), put(scales, "x")
        found = jax.jit(lambda *args: run(*args))(*cut, 1.5)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    jax.tree.map(close, found, expected)


def test_routing_has_the_dimensions_of_tokens():
    arrays = draw()
    x, experts = (
        np.ones((2, 3, HIDDEN), np.float32),
        moe.Experts(arrays["w_gate_up"], arrays["w_down"]),
    )
    routing = lambda *shape: moe.Routing(np.ones(shape), np.ones(shape, np.int8))
    with pytest.raises(ArgumentValueError, match=r"`routing\.weights` must have shape"):
        moe.feed_forward(x, routing(3, 2, 2), experts)
    out = jax.eval_shape(moe.feed_forward, x, routing(2, 3, 2), experts)
    assert out.routing.experts.dtype == np.int32


@pytest.mark.slow("its parts have tests of their own")
def test_more_dimensions_in_front():
    arrays = draw()
    experts = moe.Experts(arrays["w_gate_up"], arrays["w_down"])
    flat = moe.feed_forward(arrays["x"], arrays["logits"], experts, ROUTER)
    arrays |= {n: arrays[n].reshape(2, 11, -1) for n in ("x", "logits")}
    out = moe.feed_forward(arrays["x"], arrays["logits"], experts, ROUTER)
    np.testing.assert_array_equal(out.tokens, flat.tokens.reshape(2, 11, HIDDEN))
    assert {array.shape for array in out.routing} == {(2, 11, 2)}
    again = moe.feed_forward(arrays["x"], out.routing, experts)
    np.testing.assert_array_equal(again.tokens, out.tokens)
