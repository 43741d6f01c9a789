"""JAX in its strictest: without promotion of types and ranks, with 64-bit types and without.

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

from tests.moe.layer import case as layer
from tests.moe.placements.case import Uncut, with_gradients
from tests.moe.placements.ops import OPS, SIZES
from triax import moe
from triax.moe.shared import implementation as implementations


@pytest.fixture(autouse=True, params=[64, 32], ids=["64 bits", "32 bits"])
def bits(request):
    """The widest types."""
    with (
        jax.enable_x64(request.param == 64),
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
    ):
        yield request.param


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
def test_every_op(bits, path, name):
    refuses = name.split(",")[0] == "quantize"  # what is wider than float32
    widest_of_all = "float64" if bits == 64 and not refuses else "float32"
    for dtype in ("bfloat16", widest_of_all):
        one = Uncut(name, SIZES[0]._replace(dtype=dtype))
        arrays = one.draw(np.random.default_rng(0))
        if dtype == "float64":
            arrays = {n: a if n.endswith("scales") else widest(a) for n, a in arrays.items()}
        given = jax.tree.map(jnp.ones_like, one.results(arrays))
        both = functools.partial(with_gradients, one.function, one.case.gradients)
        jax.eval_shape(both, arrays, given)


def widest(array):
    """The array in 64 bits, or as it is if it has other numbers than 32 bits hold."""
    wide = {"f": np.float64, "i": np.int64}.get(array.dtype.kind)
    return array if wide is None or array.dtype.itemsize < 4 else array.astype(wide)


@pytest.mark.sampled(3, 6)
@pytest.mark.parametrize("name", layer.NAMED)
def test_the_layer(bits, path, name):
    """Of 64 bits, or with the dtypes that results have without them."""
    case = layer.NAMED[name](None)
    arrays = case.inputs(0)
    if bits == 64 and path == "plain JAX" and not name.startswith("recipe"):
        given = [n for n in arrays if not n.startswith("g_")]
        arrays |= {n: widest(arrays[n]) for n in given if n not in ("logits", "bias")}
        arrays["g_tokens"] = arrays["g_tokens"].astype(arrays["x"].dtype)
        jax.eval_shape(case.everything, arrays)
        return
    found = jax.eval_shape(case.everything, arrays)
    with jax.enable_x64(False):
        wanted = jax.eval_shape(case.everything, arrays)
    assert jax.tree.map(jnp.dtype, found) == jax.tree.map(jnp.dtype, wanted)


OTHERS = {
    "rows": {"recipe": "rows"},
    "blocks": {"recipe": "blocks"},
    "scaled weights": {},
    "devices": {"axis_name": "x"},
}


@pytest.mark.sampled(2, 4)
@pytest.mark.parametrize("name", OTHERS)
def test_layers_of_other_weights(path, name):
    """Quantized ones, copies in 8 bits made once, and those of each device."""
    shape = functools.partial(jax.ShapeDtypeStruct, dtype="bfloat16")
    x, logits = shape((16, 32)), jax.ShapeDtypeStruct((16, 8), "float32")
    weights = {"w_gate_up": shape((8, 32, 16)), "w_down": shape((8, 8, 32))}
    weights |= {"b_gate_up": shape((8, 16)), "b_down": shape((8, 32))}

    def run(x, logits, weights):
        if name == "scaled weights":
            quantize = functools.partial(moe.quantize, block=(1, None, 1), transposed=True)
            scaled = {
                n: quantize(jax.lax.stop_gradient(weights[n])) for n in ("w_gate_up", "w_down")
            }
            weights = weights | scaled
        experts = moe.Experts(**weights)
        if "recipe" in OTHERS[name]:
            experts = experts.quantized(OTHERS[name]["recipe"])
        return moe.feed_forward(x, logits, experts, moe.Router(2), **OTHERS[name]).tokens

    def loss(*given):
        over = run
        if name == "devices":
            mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
            over = jax.shard_map(run, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
        return jnp.sum(over(*given).astype(jnp.float32))

    jax.eval_shape(jax.value_and_grad(loss, (0, 1, 2)), x, logits, weights)


@pytest.mark.sampled(2, 3)
@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("capacity", [4, None])
def test_the_exchange(path, capacity):
    def there_and_back(x, ids):
        sent = moe.dispatch(x, x[:, :2], ids, 4, "x", capacity=capacity)
        return moe.combine(sent.rows, sent.plan, weights=sent.weights)

    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    over = jax.shard_map(there_and_back, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    x, ids = (jax.ShapeDtypeStruct((16, n), of) for n, of in ((4, "bfloat16"), (2, "int32")))
    jax.eval_shape(jax.grad(lambda *given: jnp.sum(over(*given).astype(jnp.float32))), x, ids)
