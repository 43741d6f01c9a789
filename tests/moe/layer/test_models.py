"""The layers of models that people run, against their formulas in float64.

Each model's block is written out from its paper or its published code, for all experts and all
tokens, masked by one-hots. Values and all gradients are compared, on every path.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.moe import flat
from triax import moe
from triax.errors import ArgumentValueError
from triax.testing import assert_close, checked

TOKENS, HIDDEN, WIDTH, EXPERTS = 22, 16, 12, 8
PATHS = ["interpret", "xla"]
NIGHTLY = pytest.mark.nightly("the model runs on the other path")


def silu_and_mul(gate, up):
    return gate / (1 + jnp.exp(-gate)) * up


def gpt_oss(gate, up):
    gate, up = jnp.minimum(gate, 0.7), jnp.clip(up, -0.7, 0.7)
    return (up + 1) * gate / (1 + jnp.exp(-1.702 * gate))


def deepseek_v4(gate, up):
    return silu_and_mul(jnp.minimum(gate, 1.0), jnp.clip(up, -1.0, 1.0))


def gelu_and_mul(gate, up):
    inner = (2 / jnp.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    return gate / 2 * (1 + jnp.tanh(inner)) * up


def exact_gelu_and_mul(gate, up):
    return gate / 2 * (1 + jax.scipy.special.erf(gate / 2**0.5)) * up


def relu_squared(x):
    return jnp.maximum(x, 0) ** 2


def softmax_top_k(logits, k):
    chosen = jnp.argsort(-logits, axis=1)[:, :k]
    return jnp.take_along_axis(jax.nn.softmax(logits, axis=1), chosen, 1), chosen


def softmax_of_top_k(logits, k):
    chosen = jnp.argsort(-logits, axis=1)[:, :k]
    return jax.nn.softmax(jnp.take_along_axis(logits, chosen, 1), axis=1), chosen


def of_norm_one(weights, chosen, order):
    return weights / jnp.sum(weights**order, axis=1, keepdims=True) ** (1 / order), chosen


def sigmoid_top_1(logits):
    chosen = jnp.argsort(-logits, axis=1)[:, :1]
    return 1 / (1 + jnp.exp(-jnp.take_along_axis(logits, chosen, 1))), chosen


def chosen_by(scores, bias, k, factor):
    chosen = jnp.argsort(-(scores + bias), axis=1)[:, :k]
    weights = jnp.take_along_axis(scores, chosen, 1)
    return factor * weights / jnp.sum(weights, axis=1, keepdims=True), chosen


def deepseek_v2(logits, k):
    """The groups of the greatest scores."""
    scores = jax.nn.softmax(logits, axis=1)
    best = jnp.max(scores.reshape(len(scores), 4, 2), axis=2)
    kept = best >= jnp.sort(best, axis=1)[:, -2:-1]
    chosen = jnp.argsort(-jnp.where(jnp.repeat(kept, 2, axis=1), scores, 0), axis=1)[:, :k]
    return 16 * jnp.take_along_axis(scores, chosen, 1), chosen


# Of each: its router, activation, and the fields of values and the arguments that say the same.
MODELS = {
    "Mixtral": (
        lambda g: softmax_of_top_k(g["logits"], 2),
        silu_and_mul,
        {"top_k": 2, "normalize": True},
    ),
    "DBRX": (
        lambda g: of_norm_one(*softmax_top_k(g["logits"], 3), 2),
        silu_and_mul,
        {"top_k": 3, "normalize": 2},
    ),
    "OLMoE": (lambda g: softmax_top_k(g["logits"], 3), silu_and_mul, {"top_k": 3}),
    "DeepSeek-V2": (
        lambda g: deepseek_v2(g["logits"], 2),
        silu_and_mul,
        {"top_k": 2, "num_groups": 4, "top_groups": 2, "group_score": "max", "scale": 16},
    ),
    "DeepSeek-V3": (
        lambda g: chosen_by(1 / (1 + jnp.exp(-g["logits"])), g["bias"], 3, 2.5),
        silu_and_mul,
        {"top_k": 3, "score": "sigmoid", "normalize": True, "scale": 2.5, "bias": ...},
    ),
    "DeepSeek-V4": (
        lambda g: chosen_by(jnp.sqrt(jnp.log1p(jnp.exp(g["logits"]))), g["bias"], 3, 1.5),
        deepseek_v4,
        {
            "top_k": 3,
            "score": "sqrtsoftplus",
            "normalize": True,
            "scale": 1.5,
            "bias": ...,
            "activation": moe.Swiglu(limit=1.0),
        },
    ),
    "gpt-oss": (
        lambda g: softmax_of_top_k(g["logits"], 2),
        gpt_oss,
        {
            "top_k": 2,
            "normalize": True,
            "activation": moe.Swiglu(alpha=1.702, limit=0.7, up_offset=1.0),
            "interleaved": True,
            "b_gate_up": ...,
            "b_down": ...,
        },
    ),
    "Llama 4": (
        lambda g: sigmoid_top_1(g["logits"]),
        silu_and_mul,
        {"top_k": 1, "score": "sigmoid", "of_tokens": True},
    ),
    "MiniMax-M3": (
        lambda g: chosen_by(1 / (1 + jnp.exp(-g["logits"])), g["bias"], 3, 2.0),
        gpt_oss,
        {
            "top_k": 3,
            "score": "sigmoid",
            "normalize": True,
            "scale": 2.0,
            "bias": ...,
            "activation": moe.Swiglu(alpha=1.702, limit=0.7, up_offset=1.0),
        },
    ),
    "Nemotron 3": (
        lambda g: chosen_by(1 / (1 + jnp.exp(-g["logits"])), g["bias"], 3, 2.5),
        relu_squared,
        {
            "top_k": 3,
            "score": "sigmoid",
            "normalize": True,
            "scale": 2.5,
            "bias": ...,
            "activation": "relu2",
        },
    ),
    "Gemma 4": (
        lambda g: (lambda weights, chosen: (weights * g["expert_scale"][chosen], chosen))(
            *softmax_of_top_k(g["logits"], 3)
        ),
        gelu_and_mul,
        {"top_k": 3, "normalize": True, "activation": "geglu", "expert_scale": ...},
    ),
    "a function, torch's layout": (
        lambda g: softmax_of_top_k(g["logits"], 2),
        exact_gelu_and_mul,
        {
            "top_k": 2,
            "normalize": True,
            "activation": lambda gate, up: jax.nn.gelu(gate, approximate=False) * up,
            "transposed": True,
            "b_gate_up": ...,
        },
    ),
    "two arrays": (
        lambda g: softmax_top_k(g["logits"], 2),
        exact_gelu_and_mul,
        {"top_k": 2, "activation": "geglu_exact", "two": True, "b_gate_up": ..., "b_down": ...},
    ),
    "scores that are given": (
        lambda g: softmax_top_k(g["logits"], 2),
        silu_and_mul,
        {"top_k": 2, "given": True, "b_down": ...},
    ),
}


def draw(options, seed=0):
    """The arrays by name; those of `...` among the options too."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    columns = WIDTH if options.get("activation") == "relu2" else 2 * WIDTH
    arrays = {
        "x": normal(TOKENS, HIDDEN),
        "logits": normal(TOKENS, EXPERTS),
        "w_gate_up": normal(EXPERTS, HIDDEN, columns) / 3,
        "w_down": normal(EXPERTS, WIDTH, HIDDEN) / 3,
        "bias": normal(EXPERTS) / 8,
        "expert_scale": normal(EXPERTS) + 2,
        "b_gate_up": normal(EXPERTS, columns),
        "b_down": normal(EXPERTS, HIDDEN),
    }
    always = ("x", "logits", "w_gate_up", "w_down")
    return {n: a for n, a in arrays.items() if n in always or options.get(n) is ...}


def dense(arrays, router, activation, options):
    """The block in the dtype of the arrays."""
    weights, chosen = router(arrays)
    taken = jax.nn.one_hot(chosen, EXPERTS, dtype=arrays["x"].dtype)
    by_expert = jnp.einsum("tk,tke->te", weights, taken)
    there = jnp.einsum("tke->te", taken)
    x = arrays["x"][:, None, :] * there[:, :, None]
    if "of_tokens" in options:
        x, by_expert = x * by_expert[:, :, None], there
    hidden = jnp.einsum("teh,ehf->tef", x, arrays["w_gate_up"])
    hidden += arrays.get("b_gate_up", jnp.zeros(()))
    if options.get("activation") == "relu2":
        inner = activation(hidden)
    elif options.get("interleaved"):
        inner = activation(hidden[..., ::2], hidden[..., 1::2])
    else:
        inner = activation(*jnp.split(hidden, 2, axis=2))
    out = jnp.einsum("tef,efh->teh", inner, arrays["w_down"])
    out += arrays.get("b_down", jnp.zeros(()))
    return jnp.einsum("te,teh->th", by_expert, out)


def layer(arrays, router, options, **more):
    arrays, options = dict(arrays), {n: o for n, o in options.items() if o is not ...} | more
    weights = {n: arrays.pop(n) for n in ("w_gate_up", "w_down")}
    if options.pop("two", False):
        weights["w_gate_up"] = tuple(jnp.split(weights["w_gate_up"], 2, axis=2))
        arrays["b_gate_up"] = tuple(jnp.split(arrays["b_gate_up"], 2, axis=1))
    if options.get("transposed"):
        weights = {n: w.swapaxes(1, 2) for n, w in weights.items()}
    x, logits = arrays["x"], arrays["logits"]
    if options.pop("given", False):
        logits, options["top_k"] = moe.Routing(*router(arrays)), None
    if options.pop("of_tokens", False):  # the router's weights multiply the tokens
        named = {n: options.pop(n) for n in ("top_k", "score")}
        weights_of_tokens, chosen = moe.route(logits, moe.Router(**named))
        x = (x * weights_of_tokens).astype(x.dtype)
        logits = moe.Routing(jnp.ones_like(weights_of_tokens), chosen)
    more = {n: a for n, a in arrays.items() if n not in ("x", "logits")}
    return flat.layer(x, logits, *weights.values(), **more, **options)


def gradients(function, arrays, upstream):
    """What the function returns, and the gradients of its sum times `upstream`."""

    def loss(arrays):
        out = function(arrays)
        return jnp.sum(out * upstream), out

    (_, out), found = jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)
    return out, found


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        pytest.param(name, path, marks=NIGHTLY if (at + i) % 2 else ())
        for at, name in enumerate(MODELS)
        for i, path in enumerate(PATHS)
    ],
)
def test_the_layer_is_the_models(name, implementation):
    router, activation, options = MODELS[name]
    arrays = draw(options)
    upstream = np.random.default_rng(9).standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    run = lambda arrays: layer(arrays, router, options, implementation=implementation).tokens
    with checked():
        tokens, found = gradients(run, arrays, upstream)
    with jax.enable_x64(True):
        wide = {n: np.asarray(a, np.float64) for n, a in arrays.items()}
        exact = functools.partial(dense, router=router, activation=activation, options=options)
        expected, wanted = gradients(exact, wide, upstream)
    assert_close(tokens, expected, terms=64)
    for n, array in wanted.items():
        if n == "bias":  # of the choice alone
            assert not np.any(np.asarray(found[n]))
        else:
            assert np.any(array), n
            assert_close(found[n], array, terms=64, err_msg=n)


@pytest.mark.sampled(0, 1)
@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
@pytest.mark.parametrize("name", ["gpt-oss", "DeepSeek-V3", "Llama 4", "two arrays"])
def test_experts_spread_over_devices(name):
    """Inside `shard_map` the layer is that of one device, its gradients too."""
    router, _, options = MODELS[name]
    arrays = draw(options)
    tokens = 20
    arrays |= {n: arrays[n][:tokens] for n in ("x", "logits")}
    upstream = np.random.default_rng(9).standard_normal((tokens, HIDDEN)).astype(np.float32)
    mesh = Mesh(np.array(jax.devices()[:4]), ("d",))
    whole = {"bias": P(), "expert_scale": P()}
    specs = {n: whole.get(n, P("d")) for n in arrays}

    def spread(arrays):
        run = lambda arrays: layer(arrays, router, options, axis_name="d")
        out_specs = moe.FeedForward(P("d"), P(), P(), P("d"))
        return jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=out_specs)(arrays)

    alone = lambda arrays: layer(arrays, router, options)
    found, wanted = (
        gradients(lambda arrays, f=f: f(arrays).tokens, arrays, upstream) for f in (spread, alone)
    )
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    jax.tree.map(close, found, wanted)
    out, expected = jax.jit(spread)(arrays), alone(arrays)
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
    arrays = draw({})
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
    _, _, options = MODELS["Mixtral"]
    arrays = draw(options)
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
    arrays = draw({})
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
    _, _, options = MODELS["Mixtral"]
    arrays = draw(options)
    flat = layer(arrays, None, options)
    arrays |= {n: arrays[n].reshape(2, 11, -1) for n in ("x", "logits")}
    out = layer(arrays, None, options)
    np.testing.assert_array_equal(out.tokens, flat.tokens.reshape(2, 11, HIDDEN))
    assert {array.shape for array in out.routing} == {(2, 11, 2)}
    experts = moe.Experts(arrays["w_gate_up"], arrays["w_down"])
    again = moe.feed_forward(arrays["x"], out.routing, experts)
    np.testing.assert_array_equal(again.tokens, out.tokens)
