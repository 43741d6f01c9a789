"""What is computed after what."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from triax import moe
from triax.moe.shared.order import after

X, OTHER = np.arange(6, dtype=np.float32).reshape(2, 3), np.full(4, np.nan, np.float32)


def test_it_is_its_first_argument_and_so_are_its_derivatives():
    run = jax.jit(after)
    np.testing.assert_array_equal(run(X, OTHER), X)
    np.testing.assert_array_equal(after(X, OTHER), X)
    square = lambda x: jnp.sum(after(x**2, OTHER * x[0, 0]) * x)
    np.testing.assert_array_equal(jax.jit(jax.grad(square))(X), 3 * X**2)
    curvature = np.asarray(jax.jit(jax.jacfwd(jax.grad(square)))(X))
    np.testing.assert_array_equal(curvature.sum((2, 3)), 6 * X)
    for axes in ((0, None), (None, 0), (1, 0)):
        size = 4 if axes[0] is None else X.shape[axes[0]]
        other = np.ones((size, 2), np.float32) if axes[1] == 0 else OTHER
        expected = np.stack(4 * [X]) if axes[0] is None else np.moveaxis(X, axes[0], 0)
        np.testing.assert_array_equal(jax.jit(jax.vmap(after, axes))(X, other), expected)


@pytest.mark.sampled(1, 3)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("devices", [1, 2])
def test_one_device_keeps_the_order_and_several_wait_for_no_sums(devices, kind):
    """The weights' gradient is summed up over devices; each device's part is not, in shard_map."""
    mesh = jax.make_mesh((devices,), ("x",), (kind,), devices=jax.devices()[:devices])
    rows, whole = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (("x",), ()))
    x = jax.device_put(np.ones((8, 4), np.float32), rows)
    w, sizes = np.ones((2, 4, 6), np.float32), np.array([3, 5])
    w, sizes = jax.device_put((w, sizes), whole)
    of = lambda x, w, sizes: jnp.sum(moe.ragged_dot(x, w, sizes) ** 2)
    gradients = jax.grad(of, (0, 1))
    text = jax.jit(gradients).lower(x, w, sizes).as_text()
    alone = devices == 1 and kind is AxisType.Auto
    assert ("optimization_barrier" in text) == alone
    specs = rows.spec, whole.spec
    local = jax.shard_map(gradients, mesh=mesh, in_specs=(*specs, whole.spec), out_specs=specs)
    assert "optimization_barrier" in jax.jit(local).lower(x, w, sizes).as_text()
