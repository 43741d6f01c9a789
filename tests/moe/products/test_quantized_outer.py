"""Weights' gradients in 8 bits over devices, and that they have no derivative."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.moe import bounds
from tests.moe.bounds import Near
from tests.moe.plans.case import spans
from tests.moe.products.case import EIGHT_BITS
from tests.moe.products.outer_case import products
from triax.errors import DifferentiationError
from triax.moe.products.quantized_outer_ops import outer_in_8_bits

ROWS, LEFT, RIGHT = 300, 70, 144


def both_sides():
    rng = np.random.default_rng(0)
    return [rng.standard_normal((ROWS, columns), np.float32) for columns in (LEFT, RIGHT)]


def run(left, right, sizes, sources=(None, None)):
    product = functools.partial(
        outer_in_8_bits,
        dtypes=EIGHT_BITS,
        result_dtype="float32",
        fast_sums=True,
        implementation=None,
    )
    return jax.jit(product)(left, right, np.array(sizes, np.int32), sources=sources)


def check(found, *parts):
    """The sum of the parts' products."""
    wanted = Near(np.zeros(found.shape), np.zeros(found.shape))
    for left, right, sizes in parts:
        groups = spans(np.array(sizes), len(left))
        wanted += products(left, right, EIGHT_BITS, groups)
    assert bounds.fault("out", found, wanted) is None


@pytest.mark.slow("many programs for one rule")
def test_named_rows_that_are_cut_over_devices():
    left, right = both_sides()
    source = np.random.default_rng(3).integers(0, 40, ROWS).astype(np.int32)
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    sizes = [0, 150, 0, 150]  # a group for each device
    with jax.set_mesh(mesh):
        put = lambda array: jax.device_put(array, NamedSharding(mesh, PartitionSpec("a")))
        cut = jax.jit(lambda *sides, source: run(*sides, sizes, sources=(source, None)))
        out = cut(put(left), put(right), source=put(source))
    check(out, (left[source], right, sizes))


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("cut", ["rows", "columns"])
def test_over_devices(kind, cut):
    """Columns are as if they were not cut; each part of the rows has scales of its own."""
    left, right = both_sides()
    sizes = [0, 100, 60, 140]
    mesh = jax.make_mesh((2,), ("a",), axis_types=(kind,), devices=jax.devices()[:2])
    spec = PartitionSpec("a") if cut == "rows" else PartitionSpec(None, "a")
    with jax.set_mesh(mesh):
        put = lambda array: jax.device_put(array, NamedSharding(mesh, spec))
        out = jax.jit(lambda *sides: run(*sides, sizes))(put(left), put(right))
    halves = (left[:150], right[:150], [0, 100, 50, 0]), (left[150:], right[150:], [0, 0, 10, 140])
    check(out, *(halves if cut == "rows" else [(left, right, sizes)]))


def test_no_derivative():
    left, right = both_sides()
    with pytest.raises(DifferentiationError, match="has no derivative"):
        jax.grad(lambda x: jnp.sum(run(x, right, [0, 0, 300, 0])))(jnp.asarray(left))
