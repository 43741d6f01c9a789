"""Sums of bfloat16 over some axes of a mesh: on CPUs XLA ends the process if they are written as
such. So each is run in another one."""

from __future__ import annotations

import concurrent.futures
import multiprocessing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import triax
from triax import moe, testing

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")

TOKENS, HIDDEN, WIDTH, EXPERTS, TOP_K = 16, 8, 4, 4, 2
IDS = np.arange(TOKENS * TOP_K, dtype=np.int32).reshape(TOKENS, TOP_K) * 5 % EXPERTS


def of_rows(x):
    return triax.sharded(lambda x: jnp.sum(x, axis=0), "t h -> h", reduce="t")(x)


def scaled(x, weight):
    return triax.sharded(jnp.multiply, "t h, h -> t h", cut="t")(x, weight)


def unpermuted(rows, weights):
    return moe.unpermute(rows, moe.make_plan(IDS, EXPERTS), weights)


def layer(x, logits, w_gate_up, w_down, b_down):
    experts = moe.Experts(w_gate_up, w_down, b_down=b_down)
    return moe.feed_forward(x, logits.astype(jnp.float32), experts, moe.Router(TOP_K)).tokens


# Functions with the shapes of their arguments, and how these are cut.
OF_TOKENS = (TOKENS, HIDDEN)
CASES = {
    of_rows: [(OF_TOKENS, P("a"))],
    scaled: [(OF_TOKENS, P("a")), ((HIDDEN,), P())],
    unpermuted: [((TOKENS * TOP_K, HIDDEN), P(None, "a")), ((TOKENS, TOP_K), P())],
    layer: [
        (OF_TOKENS, P("a")),
        ((TOKENS, EXPERTS), P("a")),
        ((EXPERTS, HIDDEN, 2 * WIDTH), P("a")),
        ((EXPERTS, WIDTH, HIDDEN), P(None, "b")),
        ((EXPERTS, HIDDEN), P()),
    ],
}


def compare(function, kinds):
    """The result and gradients with those on one device."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=kinds, devices=jax.devices()[:4])
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.standard_normal(shape), "bfloat16") for shape, _ in CASES[function]]

    def loss(*args):
        out = function(*args)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

    both = jax.value_and_grad(loss, range(len(args)), has_aux=True)
    (_, out), gradients = jax.jit(both)(*args)
    specs = [spec for _, spec in CASES[function]]
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(a, NamedSharding(mesh, spec))
            for a, spec in zip(args, specs, strict=True)
        ]
        (_, found), of_each = jax.jit(both)(*placed)
    for got, wanted in zip((found, *of_each), (out, *gradients), strict=True):
        assert got.dtype == jnp.bfloat16
        testing.assert_close(np.asarray(got), np.asarray(wanted, np.float64), terms=TOKENS)


@pytest.fixture(scope="module")
def process():
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.sampled(0, 4)
@pytest.mark.parametrize("beside", [AxisType.Explicit, AxisType.Auto], ids=lambda kind: kind.name)
@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_sums_of_bfloat16(process, function, beside):
    process.submit(compare, function, (AxisType.Explicit, beside)).result()
