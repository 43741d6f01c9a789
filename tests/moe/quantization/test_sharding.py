"""Arrays that are cut over devices: along dimensions with a block of one nothing moves."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.moe.quantization.case import special
from tests.moe.test_sharding import collectives, compiled, kind, mesh_of, spec_of  # noqa: F401
from triax import moe
from triax.testing import assert_same_bits

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")

SHAPE = 8, 16, 40


def draw(*shape):
    return special(np.random.default_rng(0), shape)


def quantized(array, block, transposed, to="float8_e5m2"):
    found = moe.quantize(array, to, block=block, transposed=transposed)
    return found.values, found.scales


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize(
    ("to", "block", "transposed", "spec", "result", "gathered"),
    [
        ("float8_e5m2", (1, 1, None), False, P("data", "model"), P("data", "model"), False),
        ("float8_e5m2", (1, 1, 16), False, P("data", "model"), P("data", "model"), False),
        ("float8_e5m2", (1, None, 1), True, P("data", None, "model"), P("data", "model"), False),
        ("float8_e5m2", (1, 16, 16), True, P("model"), P("model"), False),
        ("float8_e5m2", (1, None, 1), True, P("data", "model"), P("data"), True),
        ("float8_e5m2", (2, 1, 3), False, P("data", "model"), P(None, "model"), True),
        ("int4", (1, None, 1), True, P("data", None, "model"), P("data", "model"), False),
        ("int4", (1, 32, 1), True, P("data", "model"), P("data"), True),
        # Two numbers of a byte stay together.
        ("int4", (1, 1, 1), True, P("data", "model"), P("data"), True),
    ],
)
def test_bits_and_what_moves(kind, to, block, transposed, spec, result, gathered):  # noqa: F811
    array = draw(*SHAPE)
    function = functools.partial(quantized, block=block, transposed=transposed, to=to)
    program, found = compiled(function, mesh_of(kind), [array], [spec])
    jax.tree.map(assert_same_bits, found, jax.jit(function)(array))
    assert [spec_of(part) for part in found] == [result, result]
    assert bool(collectives(program)) == gathered


@pytest.mark.sampled(1)
def test_there_and_back_on_cut_arrays(kind):  # noqa: F811
    array = np.random.default_rng(0).standard_normal(SHAPE, np.float32)

    def back(array):
        return moe.quantize(array, block=(1, None, 1), transposed=True).dequantize()

    program, found = compiled(back, mesh_of(kind), [array], [P("data", None, "model")])
    assert_same_bits(found, jax.jit(back)(array))
    assert collectives(program) == []
