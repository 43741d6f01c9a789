"""Sums over shards for the gradients of a bias; all else is in tests/moe/test_sharding.py."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.moe.products.case import ragged_dot
from triax import moe

pytestmark = pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")


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
    specs = {
        "rows": (P("x"), P(), P(), P("x"), P("x")),
        "columns": (P(), P(None, None, "x"), P(None, "x"), P(), P(None, "x")),
    }[cut]
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True)
        ]
        d_bias, d_each = jax.jit(run)(*placed)
    np.testing.assert_array_equal(d_bias if cut == "rows" else d_each, 262)


@pytest.mark.sampled(1, 2)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_some_groups_of_sharded_rows(axis, kind):
    case = ragged_dot(None, (16, 6, 4, 2), given=((3, 2, 4, 5, 1),), others=3)
    arrays = case.inputs(0) | {"group_offset": np.int32(1)}
    arrays["rows"], arrays["g_out"] = np.ones((16, 6), "f"), np.ones((16, 4), "f")
    mesh = jax.make_mesh((2,), ("x",), (kind,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        by_rows, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
        of = {"rows": by_rows, "g_out": by_rows}
        if axis:
            of = {"rows": NamedSharding(mesh, P(None, "x"))}
        placed = {name: jax.device_put(a, of.get(name, whole)) for name, a in arrays.items()}
        found = jax.device_get(jax.jit(case.everything)(placed))
    flat = {name: a for part in found.values() for name, a in part.items()}
    assert case.judge(arrays, flat) is None
