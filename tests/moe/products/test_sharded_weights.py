"""Scaled weights that are sharded along columns or depth: no numbers travel."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.moe.bounds import exact
from tests.moe.plans.case import spans
from tests.moe.products.case import dot
from tests.moe.quantization.oracle import E4M3, E8M0, exactly, nvfp4
from triax import moe
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.testing import assert_close, assert_same_bits

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")

SIZES = np.array([20, 0, 9], np.int32)
ROWS, DEPTH, COLUMNS = 40, 512, 256
MOVED = re.compile(r"= (\w+)\[([\d,]*)\]\S* (all-[a-z]+|collective-permute)(?:-start)?\(")

# The dtype, the block, and whether scales are powers of two.
WAYS = {
    "int4, a scale for each shard": ("int4", (1, DEPTH // 4, 1), "float32"),
    "int4, columns": ("int4", (1, None, 1), "float32"),
    "mxfp4": ("float4_e2m1fn", (1, 32, 1), E8M0),
    "nvfp4": ("float4_e2m1fn", (1, 16, 1), E4M3),
    "int8, columns": ("int8", (1, None, 1), "float32"),
    "e4m3, 128 x 64": ("float8_e4m3fn", (1, 128, 64), "float32"),
}


@functools.cache
def weights_of(dtype, block, scale_dtype="float32"):
    array = np.random.default_rng(1).standard_normal((len(SIZES), DEPTH, COLUMNS), np.float32)
    if scale_dtype == E4M3:
        return jax.tree.map(jnp.asarray, nvfp4(array.shape))
    return moe.quantize(array, dtype, block=block, transposed=True, scale_dtype=scale_dtype)


def rows():
    drawn = np.random.default_rng(0).standard_normal((ROWS, DEPTH), np.float32)
    return jnp.asarray(drawn, jnp.bfloat16)


def mesh_of(kind):
    return jax.make_mesh((4,), ("a",), axis_types=(kind,), devices=jax.devices()[:4])


def put(mesh, array, spec):
    """Shards each part as `spec` says where its size allows it."""

    def placed(part):
        fits = all(name is None or part.shape[i] % 4 == 0 for i, name in enumerate(spec))
        return jax.device_put(part, NamedSharding(mesh, spec if fits else P()))

    return jax.tree.map(placed, array)


def product(rows, weights, implementation="xla"):
    return moe.ragged_dot(rows, weights, SIZES, implementation=implementation)


def check(found, rows, weights):
    """Weights [groups, depth, columns] are rounded to bfloat16 first."""
    numbers = exact(weights.astype(np.float32).astype(jnp.bfloat16))
    wanted = dot(exact(np.asarray(rows)), numbers, spans(SIZES, ROWS), 0).value
    assert_close(np.asarray(found), wanted, terms=rows.shape[1])


@pytest.mark.sampled(4, 8)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("along", ["columns", "depth"])
@pytest.mark.parametrize("implementation", ["xla", "interpret"])
@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_results_travel_and_weights_stay(way, tiled, implementation, along, kind):
    weights = weights_of(*WAYS[way])
    mesh = mesh_of(kind)
    place = P(None, "a") if along == "columns" else P(None, None, "a")
    with jax.set_mesh(mesh):
        operands = put(mesh, rows(), P()), put(mesh, weights.tile() if tiled else weights, place)
        program = jax.jit(functools.partial(product, implementation=implementation))
        program = program.lower(*operands).compile()
        found = program(*operands)
    moved = MOVED.findall(program.as_text())
    sums = [("f32", f"{ROWS},{COLUMNS}", "all-reduce")]  # before they are rounded
    assert moved == (sums if along == "depth" else [])
    assert ("a" in found.sharding.spec) == (along == "columns")
    check(found, rows(), exactly(weights))


@pytest.mark.sampled(2, 2)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("along", ["columns", "depth"])
@pytest.mark.parametrize("way", WAYS)
def test_tiles_stay_for_the_gradient_of_rows(way, along, kind):
    weights, mesh = weights_of(*WAYS[way]), mesh_of(kind)
    place = P(None, "a") if along == "columns" else P(None, None, "a")
    upstream = rows()[:, :COLUMNS]

    def gradient(rows, weights, upstream):
        return jax.grad(lambda rows: jnp.sum(product(rows, weights) * upstream))(rows)

    with jax.set_mesh(mesh):
        whole = functools.partial(put, mesh, spec=P())
        operands = whole(rows()), put(mesh, weights.tile(), place), whole(upstream)
        program = jax.jit(gradient).lower(*operands).compile()
        found = program(*operands)
    shapes = [shape for _, shape, _ in MOVED.findall(program.as_text())]
    assert all(shape.count(",") == 1 for shape in shapes)  # weights have three dimensions or more
    check(found, upstream, exactly(weights).swapaxes(1, 2))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_blocks_that_several_shards_have_a_part_of(kind):
    weights, mesh = weights_of("int8", (1, DEPTH // 2, 1)), mesh_of(kind)
    with jax.set_mesh(mesh):
        operands = put(mesh, rows(), P()), put(mesh, weights, P(None, None, "a"))
        found = jax.jit(product)(*operands)
    check(found, rows(), exactly(weights))


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
@pytest.mark.parametrize("along", ["columns", "depth"])
def test_shards_inside_shard_map(along, implementation):
    """With one block of scales in each shard, which stay in the order of tiles."""
    weights = weights_of(*WAYS["int4, a scale for each shard"])
    place = {"columns": P(None, "a"), "depth": P(None, None, "a")}[along]

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh_of(AxisType.Auto),
        in_specs=(P(None, "a") if along == "depth" else P(), place),
        out_specs=P() if along == "depth" else P(None, "a"),
    )
    def run(rows, weights):
        how = {"preferred_element_type": "float32", "implementation": implementation}
        found = moe.ragged_dot(rows, weights, SIZES, **how)
        found = jax.lax.psum(found, "a") if along == "depth" else found
        return found.astype(rows.dtype)

    check(run(rows(), weights.tile()), rows(), exactly(weights))


def test_a_shard_has_the_tiles_of_its_numbers():
    """Tiles may be made before an array is sharded, or after."""
    weights = weights_of(*WAYS["int4, a scale for each shard"])
    tiled, half = weights.tile(), DEPTH // 2
    first = lambda part, size: part[..., : part.shape[-1] // size]
    stored = jax.tree.map(lambda part: first(part, 2), weights)
    parts = {"values": tiled.values[:, :, : half // 64], "scales": first(tiled.scales, 2)}
    jax.tree.map(assert_same_bits, stored.tile(), type(tiled)(**{**vars(tiled), **parts}))


# The dtype, the block, and the dtype of scales and of zeros.
UNEVEN = {
    "mxfp4": ("float4_e2m1fn", (1, 32, 1), E8M0, None),
    "nvfp4": ("float4_e2m1fn", (1, 16, 1), E4M3, None),
    "int4, groups, zeros": ("int4", (1, 32, 1), "float32", np.int8),
    "int4, columns": ("int4", (1, None, 1), "float32", None),
    "e4m3, 32 x 32": ("float8_e4m3fn", (1, 32, 32), "float32", None),
    "int8": ("int8", (1, None, None), "float32", None),
}


@functools.cache
def uneven(way, shards):
    """Weights [3, 192, 160] in tiles, whose shards are not whole tiles."""
    dtype, block, scale_dtype, zeros = UNEVEN[way]
    array = np.random.default_rng(1).standard_normal((len(SIZES), 192, 160), np.float32)
    how = {"block": block, "transposed": True, "scale_dtype": scale_dtype}
    if scale_dtype == E4M3:
        weights = jax.tree.map(jnp.asarray, nvfp4(array.shape))
    else:
        weights = moe.quantize(array, dtype, **how)
    if zeros is not None:
        drawn = np.random.default_rng(2).integers(-8, 8, weights.scales.shape)
        weights = moe.ScaledArray(**{**vars(weights), "zeros": jnp.asarray(drawn, zeros)})
    return weights, weights.tile(shards)


@pytest.mark.parametrize("shards", [(1, 1), (2, 1), (1, 5), (2, 5)])
@pytest.mark.parametrize("way", UNEVEN)
def test_shards_that_are_not_whole_tiles_are_filled_up(way, shards):
    weights, tiled = uneven(way, shards)
    assert (tiled.shape, tiled.mT.shape) == (weights.shape, weights.mT.shape)
    counts = [
        count * -(-size // count // 64) for size, count in zip((192, 160), shards, strict=True)
    ]
    assert tiled.values.shape[1:3] == (counts[1], counts[0])
    for same in (tiled, tiled[:], tiled.mT.mT, jax.jit(moe.ScaledArray.tile)(tiled)):
        np.testing.assert_array_equal(exactly(same), exactly(weights))
    back = tiled.untile()
    assert (back.shard, back.tiles, back.shape) == (None, None, weights.shape)
    assert_same_bits(back.values, weights.values)
    on_host = jax.tree.map(np.asarray, weights).tile(shards)
    jax.tree.map(assert_same_bits, on_host, jax.tree.map(np.asarray, tiled))


@pytest.mark.sampled(1, 2)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("implementation", ["xla", "interpret"])
@pytest.mark.parametrize("way", UNEVEN)
def test_filled_shards_stay_on_their_devices(way, implementation, kind):
    """The depth of 192 over two is 1.5 tiles."""
    weights, tiled = uneven(way, (2, 1))
    mesh = jax.make_mesh((2,), ("a",), axis_types=(kind,), devices=jax.devices()[:2])

    def place(part):
        spec = P(None, None, "a") if part.shape[2] % 2 == 0 else P()
        return jax.device_put(part, NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        x = jax.device_put(rows()[:, :192], NamedSharding(mesh, P()))
        operands = x, jax.tree.map(place, tiled)
        program = jax.jit(functools.partial(product, implementation=implementation))
        program = program.lower(*operands).compile()
        found = program(*operands)
    assert MOVED.findall(program.as_text()) == [("f32", f"{ROWS},160", "all-reduce")]
    check(found, rows()[:, :192], exactly(weights))


def test_shards_that_cannot_be():
    weights = uneven("mxfp4", (1, 1))[0]
    for shards, match in (
        ((5, 1), r"`shards\[0\]` must cut 192 into equal shards .*; got 5"),
        ((4, 1), r"`shards\[0\]` must cut 192 .* whole blocks of scales, 32; got 4"),
        ((0, 1), r"`shards\[0\]` must be at least 1"),
    ):
        with pytest.raises(ArgumentValueError, match=match):
            weights.tile(shards)
    with pytest.raises(ArgumentTypeError, match=r"`shards` must be two ints.* got 2"):
        weights.tile(2)
