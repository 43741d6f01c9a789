"""Arrays that are cut over devices: along dimensions with a block of one nothing moves."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.moe.quantization.oracle import draw
from tests.moe.test_sharding import collectives, compiled, kind, mesh_of, spec_of  # noqa: F401
from triax import moe
from triax.testing import assert_same_bits

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")

SHAPE = 8, 16, 40


def quantized(array, block, transposed):
    found = moe.quantize(array, "float8_e5m2", block=block, transposed=transposed)
    return found.values, found.scales


@pytest.mark.sampled(0, 2)
@pytest.mark.parametrize(
    ("block", "transposed", "spec", "result", "gathered"),
    [
        ((1, 1, None), False, P("data", "model"), P("data", "model"), False),
        ((1, 1, 16), False, P("data", "model"), P("data", "model"), False),
        ((1, None, 1), True, P("data", None, "model"), P("data", "model"), False),
        ((1, 16, 16), True, P("model"), P("model"), False),
        ((1, None, 1), True, P("data", "model"), P("data"), True),
        ((2, 1, 3), False, P("data", "model"), P(None, "model"), True),
    ],
)
def test_bits_and_what_moves(kind, block, transposed, spec, result, gathered):  # noqa: F811
    array = draw(SHAPE, np.float32)
    function = functools.partial(quantized, block=block, transposed=transposed)
    program, found = compiled(function, mesh_of(kind), [array], [spec])
    jax.tree.map(assert_same_bits, found, jax.jit(function)(array))
    assert [spec_of(part) for part in found] == [result, result]
    assert bool(collectives(program)) == gathered


@pytest.mark.sampled(1)
def test_a_cut_batch_moves_nothing(kind):  # noqa: F811
    batches = draw((8, *SHAPE), np.float32)
    function = jax.vmap(functools.partial(quantized, block=(1, None, 1), transposed=True))
    spec = P(("data", "model"))
    program, found = compiled(function, mesh_of(kind), [batches], [spec])
    jax.tree.map(assert_same_bits, found, jax.jit(function)(batches))
    assert [spec_of(part) for part in found] == [spec, spec]
    assert collectives(program) == []


@pytest.mark.sampled(1)
def test_there_and_back_on_cut_arrays(kind):  # noqa: F811
    array = draw(SHAPE, np.float32, special=False)

    def back(array):
        return moe.quantize(array, block=(1, None, 1), transposed=True).dequantize()

    program, found = compiled(back, mesh_of(kind), [array], [P("data", None, "model")])
    assert_same_bits(found, jax.jit(back)(array))
    assert collectives(program) == []


def test_inside_shard_map():
    array = draw(SHAPE, np.float32)
    function = functools.partial(quantized, block=(1, 1, 16), transposed=False)
    each = jax.shard_map(function, in_specs=P("data", "model"), out_specs=P("data", "model"))
    _, found = compiled(each, mesh_of("plain"), [array], [P("data", "model")])
    jax.tree.map(assert_same_bits, found, jax.jit(function)(array))
