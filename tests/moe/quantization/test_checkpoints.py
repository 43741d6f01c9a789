"""Weights of quantized checkpoints, each against its format's own definition in NumPy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.moe.quantization.oracle import exactly
from triax import moe
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.testing import assert_same_bits

DEPTH, OUT, GROUP = 64, 24, 32
GROUPS = DEPTH // GROUP
ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # of AWQ's columns in a word
LEADS = [(), (3,), (2, 2)]

rng = np.random.default_rng(0)


def words(*shape):
    return rng.integers(-(2**31), 2**31, shape, np.int32)


def number(words, *at, place):
    return words[at] >> 4 * place & 15


def by_definition(lead, at, zero_at, scale_at, group=GROUP, depth=DEPTH):
    """Each weight from its word, its zero and its scale."""
    wanted = np.empty((*lead, depth, OUT))
    for *e, i, o in np.ndindex(*wanted.shape):
        number, zero = at(*e, i=i, o=o), zero_at(*e, g=i // group, o=o)
        wanted[(*e, i, o)] = (number - zero) * np.float64(scale_at(*e, g=i // group, o=o))
    return wanted


def gptq(lead=(), dtype=np.float16, groups=GROUPS):
    scales = rng.random((*lead, groups, OUT)).astype(dtype)
    return words(*lead, DEPTH // 8, OUT), words(*lead, groups, OUT // 8), scales


def awq(lead=()):
    return words(*lead, DEPTH, OUT // 8), *gptq(lead)[1:]


def packed(lead=(), depth=DEPTH, groups=GROUPS):
    scale = rng.random((*lead, OUT, groups)).astype(np.float16)
    return words(*lead, OUT, -(-depth // 8)), scale, np.array([OUT, depth])


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("lead", LEADS)
def test_gptq(lead, v2):
    qweight, qzeros, scales = given = gptq(lead)
    wanted = by_definition(
        lead,
        lambda *e, i, o: number(qweight, *e, i // 8, o, place=i % 8),
        lambda *e, g, o: number(qzeros, *e, g, o // 8, place=o % 8) + (not v2),
        lambda *e, g, o: scales[(*e, g, o)],
    )
    found = moe.from_gptq(*given, v2=v2, group_size=GROUP)
    assert found.block == (*[1] * len(lead), GROUP, 1)
    assert found.scales.dtype == scales.dtype
    np.testing.assert_array_equal(exactly(found), wanted)


def test_dequantized_gptq():
    found = moe.from_gptq(*gptq((2,)), group_size=GROUP)
    back = jax.jit(moe.ScaledArray.dequantize)(found)
    np.testing.assert_allclose(back, exactly(found), rtol=1e-6)


@pytest.mark.parametrize("lead", LEADS)
def test_awq(lead):
    qweight, qzeros, scales = given = awq(lead)
    place = lambda o: ORDER.index(o % 8)
    wanted = by_definition(
        lead,
        lambda *e, i, o: number(qweight, *e, i, o // 8, place=place(o)),
        lambda *e, g, o: number(qzeros, *e, g, o // 8, place=place(o)),
        lambda *e, g, o: scales[(*e, g, o)],
    )
    np.testing.assert_array_equal(exactly(moe.from_awq(*given, group_size=GROUP)), wanted)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("depth", [DEPTH, DEPTH - 2])
@pytest.mark.parametrize("lead", LEADS)
def test_compressed_tensors(lead, depth, zeros):
    weight, scale, shape = packed(lead, depth)
    zero_point = words(*lead, OUT // 8, GROUPS) if zeros else None
    zero = lambda *e, g, o: number(zero_point, *e, o // 8, g, place=o % 8) if zeros else 8
    wanted = by_definition(
        lead,
        lambda *e, i, o: number(weight, *e, o, i // 8, place=i % 8),
        zero,
        lambda *e, g, o: scale[(*e, o, g)],
        depth=depth,
    )
    shape = np.broadcast_to(shape, (*lead, 2))
    found = moe.from_compressed_tensors(weight, scale, shape, zero_point, group_size=GROUP)
    assert (found.zeros is not None) == zeros
    assert found.scales.dtype == scale.dtype
    np.testing.assert_array_equal(exactly(found), wanted)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.int8])
@pytest.mark.parametrize("scale_dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e8m0fnu])
@pytest.mark.parametrize("sizes", [(), (1,), (1, 1), (7,), (7, 1), (4, 3), (7, 3), (1, 3)])
def test_8_bits(dtype, scale_dtype, sizes):
    lead, out, depth, size = (3,), 7, 6, 2
    weight = rng.integers(-100, 100, (*lead, out, depth)).astype(dtype)
    scale = (2.0 ** rng.integers(-3, 3, (*lead, *sizes))).astype(scale_dtype)
    found = moe.from_8_bits(weight, scale, block_size=(size, size) if 4 in sizes else None)
    wanted = np.empty((*lead, depth, out))
    for e, i, o in np.ndindex(*wanted.shape):
        rows = {1: 0, 4: o // size, 7: o}
        at = (rows[sizes[0]], i // size if sizes[1:] == (3,) else 0)[: len(sizes)] if sizes else ()
        wanted[e, i, o] = float(weight[e, o, i]) * float(scale[(e, *at)])
    np.testing.assert_array_equal(exactly(found), wanted)
    assert found.values is weight
    assert found.scales.dtype == (scale_dtype if found.scales.dtype.itemsize == 1 else np.float32)


HALVES = np.array([0, 1, 2, 3, 4, 6, 8, 12, -0.0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def nvfp4(lead=(), out=OUT, depth=DEPTH):
    scales = rng.integers(0, 127, (*lead, out, depth // 16), np.uint8)
    return {
        "weight": rng.integers(0, 256, (*lead, out, depth // 2), np.uint8),
        "weight_scale": scales.view(ml_dtypes.float8_e4m3fn),
        "weight_scale_2": np.asarray(rng.uniform(1e-5, 1e-3, lead), np.float32),
    }


@pytest.mark.parametrize("ones", [0, 1, 2])
@pytest.mark.parametrize("lead", LEADS)
def test_nvfp4(lead, ones):
    """Bit for bit in float32: the product of number and scale is exact, and the next one rounds."""
    weight, scale, scale_2 = nvfp4(lead).values()
    wanted = np.empty((*lead, DEPTH, OUT), np.float32)
    for *e, i, o in np.ndindex(*wanted.shape):
        code = weight[(*e, o, i // 2)] >> 4 * (i % 2) & 15
        number = HALVES[code] / 2 * scale[(*e, o, i // 16)].astype(np.float32)
        wanted[(*e, i, o)] = number * scale_2[(*e,)]
    found = moe.from_nvfp4(weight, scale, scale_2.reshape((*lead, *[1] * ones)))
    assert (found.block, found.transposed) == ((*[1] * len(lead), 16, 1), True)
    assert_same_bits(found.dequantize(), wanted)


FUNCTIONS = {
    "from_nvfp4": lambda: nvfp4((3,)),
    "from_mxfp4": lambda: {
        "blocks": rng.integers(0, 256, (3, OUT, 2, 16), np.uint8),
        "scales": rng.integers(0, 255, (3, OUT, 2), np.uint8),
    },
    "from_gptq": lambda: dict(zip(("qweight", "qzeros", "scales"), gptq((3,)), strict=True)),
    "from_awq": lambda: dict(zip(("qweight", "qzeros", "scales"), awq((3,)), strict=True)),
    "from_compressed_tensors": lambda: {
        "weight_packed": packed((3,))[0],
        "weight_scale": packed((3,))[1],
        "weight_zero_point": words(3, OUT // 8, GROUPS),
    },
    "from_8_bits": lambda: {
        "weight": np.ones((3, 4, 5), np.int8),
        "weight_scale": np.ones((3, 1, 1), np.float16),
    },
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_numpy_stays_on_the_host_and_jax_gives_the_same(name):
    function, given = getattr(moe, name), FUNCTIONS[name]()
    if name not in ("from_mxfp4", "from_nvfp4", "from_8_bits"):
        function = functools.partial(function, group_size=GROUP)
    on_host, traced = function(**given), jax.jit(function)(**given)
    for host, device in zip(jax.tree.leaves(on_host), jax.tree.leaves(traced), strict=True):
        assert type(host) is np.ndarray
        assert isinstance(device, jax.Array)
        assert host.dtype == device.dtype
        assert host.tobytes() == np.asarray(device).tobytes()


def test_no_experts():
    for function, words in ((moe.from_gptq, gptq), (moe.from_awq, awq)):
        assert function(*words((0,)), group_size=GROUP).shape == (0, DEPTH, OUT)


def test_words_that_are_not_contiguous():
    weight, scale, shape = packed()
    read = functools.partial(moe.from_compressed_tensors, group_size=GROUP)
    found, wanted = (read(of, scale, shape) for of in (np.asfortranarray(weight), weight))
    np.testing.assert_array_equal(found.values, wanted.values)


# --- groups --------------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [(), (3,)])
def test_g_idx_in_order(lead):
    given, order = gptq(lead), np.arange(DEPTH, dtype=np.int32) // GROUP
    found = moe.from_gptq(*given, np.broadcast_to(order, (*lead, DEPTH)))
    assert found.block[-2:] == (GROUP, 1)


SIZES = [1, 2, 5, 8, 12, 16, 24, 40, 60, 64, 80, 96, 128, 160]


def in_groups_of(size, rows=160):
    """GPTQ's arrays for groups of a size; the last one may be partial, as with 64."""
    groups = -(-rows // size)
    arrays = words(rows // 8, OUT), words(groups, OUT // 8), np.ones((groups, OUT), np.float16)
    return arrays, np.arange(rows, dtype=np.int64) // size


@pytest.mark.parametrize("size", SIZES[:-1])
def test_sizes_of_groups_follow_from_their_order(size):
    given, order = in_groups_of(size)
    assert moe.from_gptq(*given, order).block == (size, 1)
    assert moe.from_gptq(*given, order, group_size=size).block == (size, 1)
    for other in (size + 1, -1):
        with pytest.raises(
            ArgumentValueError, match=rf"`group_size` must be {size}, .*; got {other}"
        ):
            moe.from_gptq(*given, order, group_size=other)


@pytest.mark.parametrize("size", SIZES)
def test_sizes_of_groups_follow_from_shapes_with_one_reading(size):
    """160 rows in 20 groups are 20 groups of 8; 4 groups may be of 40, or of 41 to 53."""
    given, _ = in_groups_of(size)
    block = None if size == 160 else size
    awq = words(160, OUT // 8), *given[1:]
    packed = words(OUT, 20), given[2].T
    calls = {
        moe.from_gptq: given,
        moe.from_awq: awq,
        moe.from_compressed_tensors: packed,
    }
    for function, arrays in calls.items():
        assert function(*arrays, group_size=size).block == (block, 1)
        with pytest.raises(ArgumentValueError, match=r"block of `group_size` 3; got"):
            function(*arrays, group_size=3)
        same = [of for of in range(1, 161) if -(-160 // of) == len(given[2])]
        if same == [size] or size == 160:
            assert function(*arrays).block == (block, 1)
        else:
            with pytest.raises(ArgumentValueError, match=r"each block of `group_size`; got \(24, "):
                function(*arrays)


@pytest.mark.parametrize("size", [(96, 96), (128, 128), (96, 32), (1, 64), (-1, -1), (-1, 64)])
def test_sizes_of_blocks(size):
    """192 rows in 2 blocks may be 96 + 96 or 128 + 64, in 3 blocks 64 + 64 + 64 or 80 + 80 + 32."""
    counts = [1 if of == -1 else -(-192 // of) for of in size]
    weight, scale = np.zeros((192, 192), np.int8), np.ones(counts, np.float32)
    found = moe.from_8_bits(weight, scale, block_size=size)
    assert found.block == tuple(None if of == -1 else of for of in size[::-1])
    for other in ((64, 32), (size[0], 16), (16, size[1])):
        with pytest.raises(
            ArgumentValueError, match=r"block of `block_size` \(.*\); got \(\d+, \d"
        ):
            moe.from_8_bits(weight, scale, block_size=other)
    if size == (-1, -1):
        assert moe.from_8_bits(weight, scale).block == (None, None)
    else:
        with pytest.raises(ArgumentValueError, match="block of `block_size`; got"):
            moe.from_8_bits(weight, scale)


def test_scales_in_bytes():
    """A byte of an MX scale is 2 ** (byte - 127), in float8_e8m0fnu or in uint8."""
    weight = np.array([[1.5, -2.0] * 32], ml_dtypes.float8_e4m3fn)
    codes = np.array([[127, 124]], np.uint8)
    wanted = np.array([1.5, -2.0] * 16 + [1.5 / 8, -2.0 / 8] * 16)[:, None]
    for scales in (codes, codes.view(ml_dtypes.float8_e8m0fnu)):
        found = moe.from_8_bits(weight, scales, block_size=(1, 32))
        assert found.scales.dtype == ml_dtypes.float8_e8m0fnu
        np.testing.assert_array_equal(exactly(found), wanted)
    numbers = np.tile(np.array([0x42], np.uint8), (1, 32))  # 1, then 2
    wanted = np.array([1.0, 2.0] * 16 + [1 / 8, 2 / 8] * 16)[:, None]
    for values in (numbers, numbers.view(np.int8), numbers.reshape(1, 2, 16)):
        for scales in (codes, codes.view(ml_dtypes.float8_e8m0fnu)):
            np.testing.assert_array_equal(exactly(moe.from_mxfp4(values, scales)), wanted)


def test_a_partial_last_group_is_not_taken_for_a_whole_one():
    """96 rows in groups of 40, 40 and 16 have as many scales as in groups of 32."""
    given, order = in_groups_of(40, rows=96)
    for how in ({"group_size": 40}, {"g_idx": order}):
        assert moe.from_gptq(*given, **how).block == (40, 1)
    with pytest.raises(ArgumentValueError, match=r"Without `group_size`, .* exactly one size"):
        moe.from_gptq(*given)


def test_one_group():
    given = gptq(groups=1)
    assert moe.from_gptq(*given).block == (None, 1)
    assert moe.from_gptq(*given, np.zeros(DEPTH, np.int32)).block == (None, 1)


def test_compressed_tensors_without_an_order():
    given = packed()
    no_order = np.full(DEPTH, -1, np.int32)
    found = moe.from_compressed_tensors(*given, None, no_order, group_size=GROUP)
    assert found.block == (GROUP, 1)
    with pytest.raises(ArgumentValueError, match=r"`group_size`; got \(24, 2\)"):
        moe.from_compressed_tensors(*given, None, no_order)


ORDERED = {
    "gptq": lambda index: moe.from_gptq(*gptq(), index),
    "compressed_tensors": lambda index: moe.from_compressed_tensors(*packed(), None, index),
}


@pytest.mark.parametrize("name", ORDERED)
def test_act_order_is_refused(name):
    order = np.arange(DEPTH, dtype=np.int32)
    shuffled, uneven = order // GROUP, np.minimum(order // 16, 1)
    shuffled[[3, 40]] = shuffled[[40, 3]]
    for index in (shuffled, uneven, shuffled[::-1].copy()):
        with pytest.raises(ArgumentValueError, match=r'g_idx` must be .*without it, .*"Act order"'):
            ORDERED[name](index)
    with pytest.raises(ArgumentValueError, match="in order, in groups of 16, as `group_size` says"):
        moe.from_gptq(*gptq(), shuffled, group_size=16)


@pytest.mark.parametrize("groups", [0, 3, 5, 65])
def test_groups_that_fit_no_size_or_several(groups):
    message = rf"`scales` must have .* got \(24, {groups}\) .*\(24, 64\).* exactly one size"
    with pytest.raises(ArgumentValueError, match=message):
        moe.from_gptq(*gptq(groups=groups))


# --- mistakes ------------------------------------------------------------------------------------

A_SCALE, INT8 = np.ones((2, OUT), np.float16), np.zeros((24, 64), np.int8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: moe.from_gptq(*awq()), r"`scales` must have shape \(groups, 3\).*GPTQ's `qweight"),
        (lambda: moe.from_awq(*gptq()), r"`scales` must have shape \(groups, 192\).*AWQ's"),
        (
            lambda: moe.from_gptq(words(16, OUT), words(2, OUT // 4), A_SCALE),
            r"`qzeros` must have shape \(2, 3\).*Only 4 bits",
        ),
        (
            lambda: moe.from_compressed_tensors(words(OUT, 16), A_SCALE.T, np.array([OUT, 64])),
            r"`weight_packed` must have shape \(24, 8\) to go with `weight_shape`.*Only 4 bits",
        ),
        (
            lambda: moe.from_compressed_tensors(words(OUT, 8), A_SCALE.T, np.array([8, 64])),
            r"`weight_packed` must have shape \(8, 8\) to go with `weight_shape`",
        ),
        (
            lambda: moe.from_compressed_tensors(words(OUT, 8), A_SCALE.T, np.array([OUT, 63])),
            "`weight_shape` must have even `in`; got 63",
        ),
        (
            lambda: moe.from_compressed_tensors(words(OUT, 8), A_SCALE.T, np.zeros(3, np.int32)),
            r"`weight_shape` must have shape \(2,\)",
        ),
        (
            lambda: moe.from_compressed_tensors(words(OUT, 8), A_SCALE, None),
            r"`weight_scale` must have shape \(24, groups\)",
        ),
        (
            lambda: moe.from_compressed_tensors(words(OUT, 8), np.ones(OUT, np.float16)),
            r"`weight_scale` must have shape \(24, groups\).*got \(24,\)",
        ),
        (
            lambda: moe.from_compressed_tensors(words(OUT, 8), A_SCALE.T, None, words(24, 2)),
            r"`weight_zero_point` must have shape \(3, 2\)",
        ),
        (
            lambda: moe.from_gptq(words(8), *gptq()[1:]),
            r"`qweight` must have shape \(in / 8, out\)",
        ),
        (
            lambda: moe.from_8_bits(INT8, np.ones((24, 5), np.float32)),
            r"`weight_scale` must have .* got \(24, 5\) .*\(24, 64\)",
        ),
        (
            lambda: moe.from_8_bits(np.zeros((256, 128), np.int8), np.ones((4, 8), np.float32)),
            r"`block_size`; got \(4, 8\) .*\(256, 128\)",
        ),
        (
            lambda: moe.from_8_bits(INT8[None], np.ones((24, 1), np.float32)),
            r"`weight_scale` must have shape \(1, out / size\) .*got \(24, 1\)",
        ),
        (
            lambda: moe.from_8_bits(INT8, np.ones((1, 1, 1), np.float32)),
            r"`weight_scale` must have shape \(out / size, in / size\)",
        ),
        (lambda: moe.from_gptq(*gptq(), np.zeros((2, DEPTH), np.int32)), "`g_idx` must have shape"),
        (lambda: moe.from_gptq(*gptq(), group_size=0), "`group_size` must be at least 1 "),
        (lambda: moe.from_gptq(*gptq(), group_size=-2), "`group_size` must be at least -1 "),
        (
            lambda: moe.from_8_bits(INT8, np.ones((1, 1), np.float32), block_size=(0, 1)),
            r"`block_size\[0\]` must be at least 1 ",
        ),
    ],
)
def test_shapes_that_do_not_match(call, message):
    with pytest.raises(ArgumentValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: moe.from_gptq(*map(jnp.float32, gptq())), "`qweight` must be an array of int32"),
        (lambda: moe.from_gptq(*gptq(dtype=np.float64)), "`scales` must be an array of float32 or"),
        (lambda: moe.from_gptq(*gptq(), v2="gptq"), "`v2` must be a bool"),
        (lambda: moe.from_gptq(*gptq(), group_size="32"), "`group_size` must be a Python int"),
        (lambda: moe.from_awq(*awq(), group_size=32.0), "`group_size` must be a Python int"),
        (lambda: moe.from_8_bits(INT8, INT8, block_size=128), "must be the two sizes .* got 128"),
        (
            lambda: moe.from_8_bits(INT8, INT8, block_size=(128, None)),
            r"must be the two sizes .* got \(128, None\)",
        ),
        (lambda: moe.from_gptq(*gptq(), np.zeros(DEPTH)), "`g_idx` must be an array of int32 or i"),
        (
            lambda: moe.from_compressed_tensors(*packed()[:2], (OUT, DEPTH)),
            r"`weight_shape` must be an array of int32 or int64; got \(24, 64\)",
        ),
        (lambda: moe.from_8_bits(np.ones((2, 2)), A_SCALE), "`weight` must be an array of float8"),
        (lambda: moe.from_8_bits(INT8, INT8), "`weight_scale` must be an array of float32 or"),
        (lambda: moe.from_mxfp4(A_SCALE, INT8), "`blocks` must be an array of uint8 or int8"),
        (lambda: moe.from_mxfp4(INT8, INT8), "`scales` must be an array of uint8 or float8_e8m0"),
        (lambda: moe.from_nvfp4(INT8, INT8, A_SCALE), "`weight` must be an array of uint8; got in"),
        (
            lambda: moe.from_nvfp4(**nvfp4() | {"weight_scale": INT8}),
            "`weight_scale` must be an array of float8_e4m3fn; got int8",
        ),
        (
            lambda: moe.from_nvfp4(**nvfp4() | {"weight_scale_2": np.float64(1)}),
            "`weight_scale_2` must be an array of float32; got",
        ),
    ],
)
def test_types_that_are_wrong(call, message):
    with pytest.raises(ArgumentTypeError, match=message):
        call()


def of_64(name, groups=4):
    """Arrays of weights [2, 128, 64] for a `from_` function, which has tiles of them."""
    scales = rng.random((2, groups, 64)).astype(np.float16)
    zeros, blocks = words(2, groups, 8), rng.integers(0, 127, (2, 64, 4, 16), np.uint8)
    return {
        "from_mxfp4": lambda: (blocks, blocks[..., 0]),
        "from_nvfp4": lambda: tuple(nvfp4((2,), 64, 128).values()),
        "from_gptq": lambda: (words(2, 16, 64), zeros, scales),
        "from_awq": lambda: (words(2, 128, 8), zeros, scales),
        "from_compressed_tensors": lambda: (words(2, 64, 16), scales.mT.copy()),
        "from_8_bits": lambda: (blocks.reshape(2, 64, -1).repeat(2, 2).view(np.int8), scales.mT),
    }[name]()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_weights_that_kernels_read_are_in_tiles(name):
    function, given = getattr(moe, name), of_64(name)
    others = {"from_mxfp4": {}, "from_nvfp4": {}, "from_8_bits": {"block_size": (1, 32)}}
    how = others.get(name, {"group_size": 32})
    found, stored = function(*given, **how), function(*given, **how, tiles=False)
    assert (found.tiled, stored.tiled) == (True, False)
    np.testing.assert_array_equal(exactly(found), exactly(stored))
    assert_same_bits(jax.jit(functools.partial(function, **how))(*given).values, found.values)
    with pytest.raises(ArgumentTypeError, match="`tiles` must be a bool"):
        function(*given, **how, tiles="int8")


def test_weights_that_no_kernel_reads_in_tiles_stay_as_they_are():
    scales = np.ones((2, 64, 1), np.float32)
    eight = lambda dtype, *shape: (np.ones(shape, dtype), np.ones((2, shape[1], 1), np.float32))
    for found in (
        moe.from_8_bits(*eight(ml_dtypes.float8_e5m2, 2, 64, 128)),
        moe.from_8_bits(*eight(np.int8, 2, 64, 96)),
        moe.from_8_bits(*eight(np.int8, 2, 96, 64)),
        moe.from_8_bits(eight(np.int8, 2, 64, 128)[0], scales.repeat(8, 2), block_size=(1, 16)),
        moe.from_gptq(*of_64("from_gptq", groups=8), group_size=16),
    ):
        assert not found.tiled
    assert moe.from_8_bits(*eight(np.int8, 2, 64, 128)).tiled
