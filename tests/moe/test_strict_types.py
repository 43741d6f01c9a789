"""JAX in its strictest: with 64-bit types, and without promotion of types and ranks.

Then int32 and int64 do not go together, nor do float32 and float64. Types alone decide that, so ops
and their gradients are traced, and nothing is run.
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
from tests.moe.placements.case import Uncut, with_gradients
from tests.moe.placements.ops import OPS, SIZES
from triax import moe
from triax.moe.shared import implementation as implementations

TOKENS, HIDDEN, WIDTH, EXPERTS, TOP_K = 16, 32, 8, 8, 2


@pytest.fixture(autouse=True)
def _strict():
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
    ):
        yield


@pytest.fixture(params=["plain JAX", "kernels"])
def path(request, monkeypatch):
    """What an op runs if `implementation` is not given."""

    fit = implementations.fit
    by_default = "interpret" if request.param == "kernels" else "xla"
    known = lambda *args, **how: fit(*args, **how) or by_default
    monkeypatch.setattr(implementations, "fit", known)
    return request.param


@pytest.mark.sampled(2, 8)
@pytest.mark.parametrize("name", OPS)
def test_every_op(path, name):
    for dtype in ("bfloat16", "float64"):
        one = Uncut(name, SIZES[0]._replace(dtype=dtype))
        arrays = one.draw(np.random.default_rng(0))
        if dtype == "float64":
            arrays = {name: widest(array) for name, array in arrays.items()}
        given = jax.tree.map(jnp.ones_like, one.results(arrays))
        both = functools.partial(with_gradients, one.function, one.case.gradients)
        jax.eval_shape(both, arrays, given)


def widest(array):
    """The array in 64 bits, or as it is if it has other numbers than 32 bits hold."""
    wide = {"f": np.float64, "i": np.int64}.get(array.dtype.kind)
    return array if wide is None or array.dtype.itemsize < 4 else array.astype(wide)


def swiglu(gate, up):
    return jax.nn.silu(gate) * up


# The layer's options, and its arrays beside those that it must have.
BIASES = "b_gate_up b_down "
LAYERS = {
    "interleaved": (
        BIASES + "expert_scale",
        {"interleaved": True, "activation": moe.Swiglu(limit=7.0)},
    ),
    "function": (
        BIASES,
        {"activation": swiglu, "transposed": True},
    ),
    "no gate": (
        "bias",
        {
            "activation": "relu2",
            "score": "sigmoid",
            "num_groups": 2,
            "top_groups": 1,
            "normalize": True,
            "scale": 2.5,
            "capacity": 3,
            "keep": ("triax_permuted_rows", "triax_glu"),
        },
    ),
    "routing": (BIASES, {"routing": True, "activation": "geglu_exact"}),
    "rows": (BIASES + "expert_scale", {"recipe": "rows", "once": True}),
    "blocks": ("", {"recipe": "blocks", "transposed": True, "activation": swiglu}),
    "weights' gradient": (
        BIASES,
        {"recipe": moe.Recipe("rows", "rows", fast_sums=False, weight_gradient="rows")},
    ),
    "scaled weights": ("", {"quantized": True}),
    "devices": (BIASES + "expert_scale", {"axis_name": "x"}),
}


@pytest.mark.sampled(3, 6)
@pytest.mark.parametrize("name", LAYERS)
def test_the_layer(path, name):
    more, options = LAYERS[name]
    is_wide = path == "plain JAX" and not {"recipe", "quantized"} & options.keys()
    columns = WIDTH if name == "no gate" else 2 * WIDTH
    shapes = {
        "x": (TOKENS, HIDDEN),
        "logits": (TOKENS, EXPERTS),
        "w_gate_up": (EXPERTS, HIDDEN, columns),
        "w_down": (EXPERTS, WIDTH, HIDDEN),
        "b_gate_up": (EXPERTS, columns),
        "b_down": (EXPERTS, HIDDEN),
        "bias": (EXPERTS,),
        "expert_scale": (EXPERTS,),
    }
    float32 = "logits", "bias", "expert_scale"
    arrays = {
        name: jax.ShapeDtypeStruct(
            shapes[name], "float32" if name in float32 else "float64" if is_wide else "bfloat16"
        )
        for name in ("x logits w_gate_up w_down " + more).split()
    }

    def loss(arrays):
        run = functools.partial(layer, **options)
        if "axis_name" in options:
            mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
            specs = {name: P() if name == "expert_scale" else P("x") for name in arrays}
            run = jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=P("x"))
        return jnp.sum(run(arrays).astype(jnp.float32))

    jax.eval_shape(jax.value_and_grad(loss), arrays)


def layer(arrays, *, routing=False, quantized=False, once=False, **options):
    names = "x", "logits", "w_gate_up", "w_down"
    x, logits, *weights = (arrays[name] for name in names)
    options |= {name: arrays[name] for name in arrays.keys() - names}
    if options.get("transposed"):
        weights = [jnp.swapaxes(w, 1, 2) for w in weights]
    if quantized:
        how = {"block": (1, None, 1), "transposed": True}
        weights = [moe.quantize(jax.lax.stop_gradient(w), **how) for w in weights]
    experts, router = flat.made(moe.Experts, options, *weights), None
    if once:
        experts = experts.quantized(options["recipe"])
    if routing:
        found = moe.route(logits, moe.Router(TOP_K))
        logits = moe.Routing(found.weights, found.experts.astype(jnp.int64))
    else:
        router = flat.made(moe.Router, options, TOP_K)
    return moe.feed_forward(x, logits, experts, router, **options).tokens
