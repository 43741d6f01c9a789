"""Numbers of 4 bits, and scales that are powers of two: bit for bit, and as arrays."""

from __future__ import annotations

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.moe.plans.case import ready_plan
from tests.moe.quantization.case import E8M0, PACKED
from tests.moe.quantization.oracle import E4M3, exactly, nvfp4
from triax import moe
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe.quantization import packing
from triax.moe.quantization.packing import pack
from triax.testing import assert_same_bits

# One number of each kind in float4_e2m1fn.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

dequantized = jax.jit(moe.ScaledArray.dequantize, static_argnames="dtype")


def test_the_first_of_two_is_the_lower_half_of_a_byte():
    array = moe.quantize(np.float32([[6, -0.5, 1, 3]]), "float4_e2m1fn", block=(1, None))
    np.testing.assert_array_equal(array.values, [[0x97, 0x52]])
    array = moe.quantize(np.float32([[7, -1], [-7, 3]]), "int4", block=(None, 1), transposed=True)
    assert array.block == (None, 1)
    np.testing.assert_array_equal(array.scales, [[1], [np.float32(3) / 7]])
    np.testing.assert_array_equal(array.values, [[0x97], [0x7E]])


def test_every_number_of_e2m1_and_halves_to_even():
    scale = {"block": (1, 16), "scale_dtype": E8M0}
    array = moe.quantize(E2M1[None], "float4_e2m1fn", **scale)
    (codes,) = np.asarray(array.values)
    np.testing.assert_array_equal(codes & 15, np.arange(16)[::2])
    np.testing.assert_array_equal(codes >> 4, np.arange(16)[1::2])
    assert_same_bits(dequantized(array), E2M1[None])
    middles = np.float32([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -5, 7.9, -7.9])[None]
    found = moe.quantize(middles, "float4_e2m1fn", block=(1, 12), scale_dtype=E8M0)
    np.testing.assert_array_equal(dequantized(found)[0], [6, 0, 1, 1, 2, 2, 4, 4, -0.0, -4, 6, -6])


@pytest.mark.parametrize("to", ["float4_e2m1fn", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_every_power_of_two(to, dtype):
    """Of numbers that float32 holds; the least power is itself a subnormal one."""
    codes = np.arange(256, dtype=np.uint8)[:, None]
    packed = to if to in PACKED else None
    values = np.full((256, 1), 0xF7, np.uint8) if packed else np.float32([[6, -6]] * 256).astype(to)
    array = moe.ScaledArray(values, codes.view(E8M0), (1, 2), False, packed)
    with jax.enable_x64():
        found = np.asarray(dequantized(array, dtype)).astype(np.float64)
    wanted = np.ldexp([[6.0, -6.0]], codes.astype(np.int32) - 127)
    if dtype != "float64":
        wanted[wanted > 3.5e38], wanted[wanted < -3.5e38] = np.inf, -np.inf
    wanted[255] = np.nan
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("dtype", ["int4", "float4_e2m1fn"])
def test_a_tile_is_what_threads_hold(dtype):
    """The left operand of `mma` with 16 rows, as PTX defines it, and 8 neighbours of each 32."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (128, 192))
    array = moe.ScaledArray(pack(codes), np.ones((128, 1), np.float32), (1, None), False, dtype)
    words = array.tile().values
    assert words.shape == (2, 3, 512)
    places = {"int4": [0, 1, 2, 3], "float4_e2m1fn": None}[dtype]
    for _ in range(200):
        row, tile, warp, lane, step, register, half = (
            int(rng.integers(n)) for n in (2, 3, 4, 32, 4, 4, 2)
        )
        column = 64 * row + 16 * warp + lane // 4 + 8 * (register % 2)
        depth = 64 * tile + 32 * (step // 2) + 8 * (lane % 4) + 4 * (step % 2)
        depth += 2 * (register // 2) + half
        word = int(words[row, tile, 128 * warp + 4 * lane + step])
        if places is None:
            at = [(6, 7, 8, 15), (9, 10, 11, 18), (12, 13, 14, 21), (4, 0, 1, 3)][register]
        else:
            at = [4 * register + place for place in places]
        found = sum((word >> (of + 16 * half) % 32 & 1) << bit for bit, of in enumerate(at))
        assert found == codes[column, depth]


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_a_tile_of_8_bits_is_what_threads_hold(dtype):
    """As above; the four words that a thread loads at once are of the same 32."""
    codes = np.random.default_rng(0).integers(0, 256, (128, 192), np.uint8)
    values = codes.view(getattr(ml_dtypes, dtype, dtype))
    array = moe.ScaledArray(values, np.ones((128, 1), np.float32), (1, None))
    words = array.tile().values
    assert words.shape == (2, 3, 1024)
    row, tile, warp, step, lane, word, byte = np.indices((2, 3, 4, 2, 32, 4, 4)).reshape(7, -1)
    column = 64 * row + 16 * warp + lane // 4 + 8 * (byte % 2)
    depth = 64 * tile + 32 * step + 8 * (lane % 4) + 2 * word + byte // 2
    np.testing.assert_array_equal(words.view(np.uint8).ravel(), codes[column, depth])


@pytest.mark.sampled(1, 2)
@pytest.mark.parametrize("dtype", ["int4", "float4_e2m1fn", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("transposed", [False, True])
def test_tiles_stand_for_the_same_numbers(transposed, dtype):
    array = np.random.default_rng(0).standard_normal((3, 128, 192), np.float32)
    array = moe.quantize(array, dtype, block=(1, 32, 1), transposed=transposed)
    array = jax.tree.map(np.asarray, array)
    tiled = array.tile()
    assert isinstance(tiled.values, np.ndarray)
    assert (tiled.tiled, array.tiled, tiled.tile()) == (True, False, tiled)
    for name in ("shape", "block", "dtype", "nbytes", "size", "ndim"):
        assert getattr(tiled, name) == getattr(array, name)
    assert "values=int32[3," in repr(tiled)
    on_device = jax.jit(moe.ScaledArray.tile)(array)
    assert_same_bits(on_device.values, tiled.values)
    for back in (tiled.untile(), jax.jit(moe.ScaledArray.untile)(tiled)):
        assert_same_bits(back.values, array.values)
    same = lambda f: assert_same_bits(f(tiled), f(array))
    same(lambda a: a.dequantize())
    same(lambda a: a.mT.dequantize("bfloat16"))
    same(lambda a: a[1].dequantize())
    same(lambda a: a[1:].tile().dequantize())
    stacked = lambda a: jax.tree.map(lambda part: jnp.stack([part, part[::-1]]), a)
    same(lambda a: jax.vmap(lambda one: one.dequantize())(stacked(a)))


def test_zeros_are_tiled_with_their_scales():
    rng = np.random.default_rng(0)
    values = rng.integers(0, 256, (2, 128, 64), np.uint8)
    zeros = rng.integers(-128, 128, (2, 128, 4)).astype(np.int8)
    array = moe.ScaledArray(values, zeros.astype("f"), (1, 32, 1), True, "int4", zeros)
    tiled = array.tile()
    assert_same_bits(tiled.zeros, tiled.scales.astype(np.int8))
    assert_same_bits(tiled.untile().zeros, zeros)
    np.testing.assert_array_equal(tiled.dequantize(), exactly(array))


def test_nvfp4():
    """Bit for bit against the definition, whose last product alone rounds; and in tiles."""
    array = nvfp4((2, 128, 192))
    codes = np.stack([array.values & 15, array.values >> 4], -1).reshape(2, 192, 128)
    wanted = E2M1[codes] * np.repeat(array.scales.astype(np.float32), 16, -1)
    wanted = (wanted * array.global_scales).swapaxes(1, 2)
    assert_same_bits(dequantized(array), wanted)
    assert_same_bits(array.mT[1].dequantize(), wanted[1].T)
    tiled = array.tile()
    assert_same_bits(tiled.global_scales, array.global_scales)
    assert (tiled.nbytes, tiled.scales.shape) == (array.nbytes, (2, 3, 8 * 64))
    for same in (tiled, jax.jit(moe.ScaledArray.tile)(array), pickle.loads(pickle.dumps(tiled))):
        assert_same_bits(dequantized(same), wanted)
        assert_same_bits(same[1:].dequantize("bfloat16"), wanted[1:].astype(jnp.bfloat16))
        jax.tree.map(assert_same_bits, jax.tree.map(np.asarray, same.untile()), array)
    without = dataclasses.replace(array, global_scales=None)
    assert_same_bits(without.dequantize() * array.global_scales.swapaxes(1, 2), wanted)


@pytest.mark.slow("many programs for one rule")
def test_tiles_of_another_version_must_be_made_again():
    """The version is a part of the structure, and of a pickle; pickles of old tiles have none."""
    stored = moe.quantize(np.zeros((64, 64), np.float32), "int4", block=(1, 32))
    tiled = pickle.loads(pickle.dumps(jax.tree.map(np.asarray, stored.tile())))
    assert tiled.tiles == stored.tile().tiles == packing.TILES_VERSION
    assert jax.tree.structure(tiled) != jax.tree.structure(stored)
    np.testing.assert_array_equal(tiled.dequantize(), stored.dequantize())
    with pytest.raises(ArgumentValueError, match=r"`tiles` must be 1.*got 0\. Call `tile` again"):
        dataclasses.replace(tiled, tiles=0)
    vars(tiled)["tiles"] = 0
    with pytest.raises(ArgumentValueError, match=r"`self` is .*mistake: .*got 0\. Call `tile`"):
        tiled.dequantize()
    del vars(tiled)["tiles"]
    with pytest.raises(ArgumentTypeError, match=r"got int32.*their version, `tiles`: call `tile`"):
        tiled.dequantize()


def test_what_is_not_tiled():
    zeros = lambda *shape: jnp.zeros(shape, jnp.bfloat16)
    with pytest.raises(ArgumentTypeError, match=r"`self` must have .* tiled; got float8_e5m2"):
        moe.quantize(zeros(64, 64), "float8_e5m2", block=(1, None)).tile()
    eight = moe.quantize(zeros(64, 64), block=(1, None)).tile()
    with pytest.raises(ArgumentValueError, match=r"`packed` must be .*float8_e4m3fn"):
        dataclasses.replace(eight, values=eight.values.astype(jnp.uint8), tiles=None)
    with pytest.raises(ArgumentValueError, match=r"depth / 64, 1024\] where float8_e4m3fn"):
        dataclasses.replace(eight, values=eight.values[..., :512])
    for shape in ((0, 64), (64,)):
        array = moe.quantize(zeros(*shape), "int4", block=(1,) * len(shape))
        with pytest.raises(ArgumentValueError, match=r"columns and a depth to be tiled; got shape"):
            array.tile()
    tiled = moe.quantize(zeros(64, 64), "int4", block=(1, None)).tile()
    with pytest.raises(ArgumentValueError, match=r"first dimension that is stored first"):
        tiled[0]
    plan = moe.make_plan(jnp.zeros((64, 1), jnp.int32), 2)
    with pytest.raises(ArgumentValueError, match=r"`x` must not be in tiles, .* Leave out `tile`"):
        moe.permute(tiled, plan)
    with pytest.raises(ArgumentValueError, match=r"int4 is packed in int32; got \(1, 1, 256\)"):
        dataclasses.replace(tiled, values=tiled.values[..., :256])


@pytest.mark.parametrize("zeros", [np.int8, np.float32])
@pytest.mark.parametrize("transposed", [False, True])
def test_zeros(zeros, transposed):
    rng = np.random.default_rng(0)
    values = rng.integers(0, 256, (3, 9, 10), np.uint8)
    scales = rng.uniform(0.5, 2, (3, 3, 3)).astype(np.float32)
    zeros = rng.integers(-8, 9, scales.shape).astype(zeros) + zeros(0.5)
    block = (1, 8, 4) if transposed else (1, 4, 8)
    array = moe.ScaledArray(values, scales, block, transposed, "int4", zeros)
    assert array.shape == ((3, 20, 9) if transposed else (3, 9, 20))
    np.testing.assert_allclose(dequantized(array), exactly(array), rtol=1e-7)
    without = dataclasses.replace(array, zeros=None)
    assert not np.allclose(dequantized(without), exactly(array))


def test_tokens_move():
    x = np.random.default_rng(0).standard_normal((6, 64)).astype(jnp.bfloat16)
    plan = ready_plan(np.array([[0], [2], [1], [1], [0], [2]], np.int32), 3)

    @jax.jit
    def move(x, plan):
        x4 = moe.quantize(x, "float4_e2m1fn", block=(1, 32), scale_dtype=E8M0)
        rows = moe.permute(x4, plan)
        assert rows.shape == (6, 64)
        return rows.dequantize("bfloat16"), moe.permute(x4.dequantize("bfloat16"), plan)

    assert_same_bits(*move(x, plan))
    ones = np.ones((6, 1), np.float32)
    zeros = moe.ScaledArray(np.zeros((6, 32), np.uint8), ones, (1, 64), packed="int4")
    with pytest.raises(ValueError, match="`x` has `zeros`, which do not move"):
        moe.permute(moe.ScaledArray(**vars(zeros) | {"zeros": ones}), plan)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"array": np.ones((3, 5))}, ArgumentValueError, "`array` must have an even size .* -1, "),
        ({"transposed": True}, ArgumentValueError, "`array` must have an even size .* -2, .* int4"),
        ({"array": np.ones(()), "block": ()}, ArgumentValueError, r"even size .* shape \(\)"),
        (
            {"scale_dtype": E8M0},
            ArgumentValueError,
            "`scale_dtype` .* for floats; got `dtype` int4",
        ),
        ({"scale_dtype": E8M0, "dtype": "int8"}, ArgumentValueError, "`scale_dtype` .* int8"),
        ({"scale_dtype": "bfloat16"}, ArgumentValueError, "`scale_dtype` must be float32 or"),
        ({"scale_dtype": 3}, ArgumentValueError, "`scale_dtype` must be float32 or .* got 3"),
        ({"implementation": "triton"}, ArgumentValueError, "`implementation` is 'triton', and no"),
        (
            {"implementation": "interpret", "dtype": "float8_e5m2", "scale_dtype": E8M0},
            ArgumentValueError,
            "no kernel rounds to float8_e5m2 with scales of float8_e8m0fnu",
        ),
    ],
)
def test_mistakes_in_quantize(change, error, match):
    given = {"array": np.ones((3, 4)), "dtype": "int4", "block": (1, None)} | change
    with pytest.raises(error, match=match):
        moe.quantize(given.pop("array").astype(np.float32), given.pop("dtype"), **given)


NVFP4 = {"packed": "float4_e2m1fn", "scales": jnp.ones((2, 9, 2), E4M3)}


def packed(**change):
    given = {
        "values": jnp.zeros((2, 9, 8), jnp.uint8),
        "scales": jnp.ones((2, 9, 2)),
        "block": (1, 8, 1),
        "transposed": True,
        "packed": "int4",
    }
    return moe.ScaledArray(**given | change)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (
            {"packed": "fp4"},
            ArgumentValueError,
            "`packed` must be one of None, .*'int4'; got 'fp4'",
        ),
        ({"packed": None}, ArgumentTypeError, "got uint8.* 4-bit numbers are stored in uint8"),
        (
            {"packed": None, "values": np.zeros((2, 9, 16), ml_dtypes.int4)},
            ArgumentTypeError,
            "got int4.* 4-bit numbers",
        ),
        ({"values": jnp.zeros((2, 9, 16), jnp.int8)}, ArgumentTypeError, "`values` .* uint8; got"),
        ({"values": np.uint8(1)}, ArgumentValueError, "`values` must have a dimension or more"),
        (
            {"block": (1, 4, 1)},
            ArgumentValueError,
            r"`scales` .* shape \(2, 9, 4\), .* \(2, 9, 2\)",
        ),
        ({"scales": jnp.ones((2, 9, 2), "uint8")}, ArgumentTypeError, r"view\(jnp.float8_e8m0fnu"),
        ({"scales": jnp.ones((2, 9, 2), "int8")}, ArgumentTypeError, "int8.* Cast them"),
        (
            {
                "packed": None,
                "values": jnp.zeros((2, 9, 16), jnp.int8),
                "scales": jnp.ones((2, 9, 2), "bfloat16"),
            },
            ArgumentTypeError,
            "`scales` must be an array of float32 or float8_e8m0fnu; got bfloat16.* Cast them",
        ),
        ({"zeros": 8}, ArgumentTypeError, "`zeros` must be an array of int8 or float32; got 8 of"),
        ({"zeros": jnp.ones((2, 9, 2), "int32")}, ArgumentTypeError, "`zeros` .* got int32"),
        ({"zeros": jnp.ones((2, 9, 1))}, ArgumentValueError, "`zeros` must have the shape of `sca"),
        ({"scales": jnp.ones((2, 9, 2), E4M3)}, ArgumentTypeError, "`scales` .* got float8_e4m3fn"),
        (
            {"global_scales": jnp.ones((2, 9, 1))},
            ArgumentValueError,
            "`global_scales` must be None unless scales are float8_e4m3fn; got scales of float32",
        ),
        (
            NVFP4 | {"global_scales": jnp.ones((2, 9, 1), "bfloat16")},
            ArgumentTypeError,
            "`global_scales` must be an array of float32; got bfloat16.* Cast them",
        ),
        (
            NVFP4 | {"global_scales": jnp.ones((2, 9, 2))},
            ArgumentValueError,
            r"`global_scales` must have shape \(2, 9, 1\), .*; got \(2, 9, 2\)",
        ),
        (
            {"packed": "float4_e2m1fn", "zeros": jnp.ones((2, 9, 2))},
            ArgumentValueError,
            "`zeros` must be None unless values are packed as int4; got values of float4_e2m1fn",
        ),
    ],
)
def test_parts_that_do_not_go_together(change, error, match):
    packed(zeros=jnp.ones((2, 9, 2)))
    with pytest.raises(error, match=match):
        packed(**change)


def test_zeros_of_8_bits_are_refused():
    scaled = moe.quantize(np.ones((3, 4), np.float32), "int8", block=(1, None))
    with pytest.raises(ArgumentValueError, match="packed as int4; got values of int8"):
        dataclasses.replace(scaled, zeros=jnp.ones((3, 1)))


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_scales_of_16_bits_are_those_numbers(dtype, tiled):
    """Bit for bit what their float32 gives, in fewer bytes."""
    array = np.random.default_rng(0).standard_normal((2, 128, 64), np.float32)
    array = moe.quantize(array, "int4", block=(1, 64, 1), transposed=True)
    short = dataclasses.replace(array, scales=array.scales.astype(dtype))
    wide = dataclasses.replace(short, scales=short.scales.astype("float32"))
    assert wide.nbytes - short.nbytes == 2 * short.scales.size
    short, wide = (short.tile(), wide.tile()) if tiled else (short, wide)
    assert short.scales.dtype == dtype
    assert_same_bits(short.dequantize(), wide.dequantize())


@pytest.mark.slow("many programs for one rule")
def test_mxfp4():
    """Against the definition: 32 numbers in 16 bytes, the lower halves first."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (2, 6, 3, 16), np.uint8)
    scales = rng.integers(100, 150, (2, 6, 3), np.uint8)
    array = moe.from_mxfp4(blocks, scales)
    wanted = np.empty((2, 6, 3, 32))
    wanted[..., 0::2], wanted[..., 1::2] = E2M1[blocks & 15], E2M1[blocks >> 4]
    wanted = np.ldexp(wanted, scales.astype(np.int32)[..., None] - 127).reshape(2, 6, 96)
    assert array.shape == (2, 96, 6)
    np.testing.assert_array_equal(array.dequantize("bfloat16"), wanted.swapaxes(1, 2))
    one = jax.jit(moe.from_mxfp4)(blocks[0], scales[0])
    np.testing.assert_array_equal(one.dequantize(), wanted[0].T)
    again = moe.quantize(
        array.dequantize(), "float4_e2m1fn", block=(1, 32, 1), transposed=True, scale_dtype=E8M0
    )
    assert_same_bits(again.dequantize(), array.dequantize())


@pytest.mark.parametrize(
    ("blocks", "scales", "match"),
    [
        ((2, 6, 3, 8), (2, 6, 3), r"`blocks` must have shape \(2, out, in / 32, 16\) .*; got"),
        ((3, 16), (3,), r"`blocks` must have shape \(out, in / 32, 16\)"),
        ((2, 6, 3, 16), (2, 6, 1), r"`scales` must have shape \(2, 6, 3\) .* got \(2, 6, 1\)"),
    ],
)
def test_mistakes_in_mxfp4(blocks, scales, match):
    with pytest.raises(ArgumentValueError, match=match):
        moe.from_mxfp4(np.zeros(blocks, np.uint8), np.zeros(scales, np.uint8))
    with pytest.raises(
        ArgumentTypeError, match="`scales` must be an array of uint8 or float8_e8m0fnu; got float32"
    ):
        moe.from_mxfp4(np.zeros((2, 6, 3, 16), np.uint8), np.zeros((2, 6, 3), np.float32))


@pytest.mark.sampled(1, 1)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P("a"), P(None, "a"), P(None, None, "a")])
def test_arrays_that_are_cut_are_tiled(spec, axis_type):
    """Also within tiles, of which there are fewer than devices."""
    array = np.random.default_rng(0).standard_normal((4, 128, 128), np.float32)
    array = moe.quantize(array, "int4", block=(1, 32, 1))
    mesh = jax.make_mesh((4,), ("a",), axis_types=(axis_type,), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        values = jax.device_put(array.values, NamedSharding(mesh, spec))
        tiled = dataclasses.replace(array, values=values).tile()
        assert_same_bits(np.asarray(tiled.values), np.asarray(array.tile().values))
        of_words = spec if spec == P("a") else P(None, None, None, "a")
        values = jax.device_put(tiled.values, NamedSharding(mesh, of_words))
        found = dataclasses.replace(tiled, values=values).dequantize()
        assert_same_bits(np.asarray(found), np.asarray(array.dequantize()))
