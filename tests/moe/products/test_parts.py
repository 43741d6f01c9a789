"""Products and their gradients where one size is cut over two devices, as on one device."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from triax import moe
from triax.testing import assert_close

pytestmark = pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")

ROWS, DEPTH, COLUMNS, GROUPS = 16, 6, 4, 3
# What is cut of rows, weights, bias and the rows' weights.
CUTS = {
    "rows": (P("x"), P(), P(), P("x")),
    "depth": (P(None, "x"), P(None, "x"), P(), P()),
    "columns": (P(), P(None, None, "x"), P(None, "x"), P()),
}


@functools.cache
def drawn():
    rng = np.random.default_rng(0)
    shapes = (ROWS, DEPTH), (GROUPS, DEPTH, COLUMNS), (GROUPS, COLUMNS), (ROWS,)
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


def loss(x, w, bias, each, *, sizes, weighted, **how):
    biases = {"bias": bias, "bias_weights": each} if weighted else {"bias": bias}
    out = moe.ragged_dot(x, w, sizes, **biases, **how)
    return jnp.sum(jnp.sin(out)), out


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize(
    ("cut", "weighted", "kind"),
    [
        *((cut, weighted, AxisType.Explicit) for cut in CUTS for weighted in (True, False)),
        ("depth", False, AxisType.Auto),
    ],
    ids=str,
)
def test_products_with_a_bias(cut, weighted, kind):
    mesh = jax.make_mesh((2,), ("x",), (kind,), devices=jax.devices()[:2])
    sizes = np.array([5, 0, 9], np.int32)
    run = functools.partial(loss, sizes=sizes, weighted=weighted)
    run = jax.jit(jax.grad(run, (0, 1, 2, 3) if weighted else (0, 1, 2), has_aux=True))
    expected = run(*drawn())
    arrays = [
        jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in zip(drawn(), CUTS[cut], strict=True)
    ]
    with jax.set_mesh(mesh):
        found = run(*arrays)
    for got, wanted in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert_close(got, wanted, terms=ROWS)


@pytest.mark.sampled(2, 2)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("cut", ["rows", "columns"])
def test_sums_for_a_bias_are_rounded_once(cut, kind):
    mesh = jax.make_mesh((2,), ("x",), (kind,), devices=jax.devices()[:2])
    numbers = jnp.array([200, 59, 1, 2], jnp.bfloat16)  # 259 is none of bfloat16's, 262 is
    ones, by_row = jnp.ones((4, 4), jnp.bfloat16), numbers[:, None] * jnp.ones((1, 4), "bfloat16")
    bias, gradient = (ones[:1], by_row) if cut == "rows" else (numbers[None], ones)

    def run(x, w, bias, each, gradient):
        def product(w, bias, each):
            return moe.ragged_dot(x, w, np.array([4]), bias=bias, bias_weights=each)

        return jax.vjp(product, w, bias, each)[1](gradient)[1:]

    arrays = ones, ones[None], bias, ones[0], gradient
    of_result = P("x") if cut == "rows" else P(None, "x")
    specs = *CUTS[cut], of_result
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True)
        ]
        d_bias, d_each = jax.jit(run)(*placed)
    np.testing.assert_array_equal(d_bias if cut == "rows" else d_each, 262)


def test_some_groups_of_rows_that_are_cut():
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Explicit,), devices=jax.devices()[:2])
    sizes = np.array([3, 2, 4, 5, 1], np.int32)
    x, w, *_ = drawn()
    run = jax.jit(lambda x, w: moe.ragged_dot(x, w, sizes, group_offset=1))
    with jax.set_mesh(mesh):
        rows = jax.device_put(x, NamedSharding(mesh, P("x")))
        found = run(rows, jax.device_put(w, NamedSharding(mesh, P())))
    assert_close(found, run(x, w), terms=DEPTH)
