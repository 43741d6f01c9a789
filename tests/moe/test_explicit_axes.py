"""Functions made of ops and of plain JAX, which wants arrays that explicit axes cut alike."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.moe.placements.case import Uncut
from tests.moe.placements.ops import OPS, SIZES, draw_array
from triax import testing

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("losses", 0),
        *(("TransformerEngine's maps", variant) for variant in (0, 2)),
        *(("TransformerEngine's router", variant) for variant in (1, 2)),
    ],
)
def test_arrays_may_be_cut_each_otherwise(name, variant):
    op, sizes = OPS[name][variant], SIZES[0]
    uncut = Uncut(name, variant, sizes)
    rng = np.random.default_rng(variant)
    arrays = {n: draw_array(n, rng, sizes, op, np.float32) for n in op.arrays.split()}
    given = {n: np.ones(t.shape, t.dtype) for n, t in uncut.results(arrays).items()}
    wanted = uncut.program(False)(arrays, given)

    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=2 * (AxisType.Explicit,))
    cuts = [P("b"), P("a")], [P("a", "b"), P("b", "a")]
    placed = {
        n: jax.device_put(array, NamedSharding(mesh, cuts[array.ndim - 1][i % 2]))
        for i, (n, array) in enumerate(arrays.items())
    }
    with jax.set_mesh(mesh):
        found = uncut.program(False)(placed, given)
    for n, array in wanted.items():
        testing.assert_close(np.asarray(found[n], np.float32), array, terms=64, err_msg=n)
