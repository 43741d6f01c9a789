"""Weights of quantized checkpoints, each against its format's own definition in NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.moe.quantization.oracle import exactly
from triax import moe
from triax.errors import ArgumentTypeError, ArgumentValueError

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
    found = moe.from_gptq(*given, v2=v2)
    assert found.block == (*[1] * len(lead), GROUP, 1)
    np.testing.assert_array_equal(exactly(found), wanted)


def test_dequantized_gptq():
    found = moe.from_gptq(*gptq((2,)))
    np.testing.assert_allclose(found.dequantize(), exactly(found), rtol=1e-6)


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
    np.testing.assert_array_equal(exactly(moe.from_awq(*given)), wanted)


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
    found = moe.from_compressed_tensors(
        weight, scale, np.broadcast_to(shape, (*lead, 2)), zero_point, group_size=GROUP
    )
    assert (found.zeros is not None) == zeros
    np.testing.assert_array_equal(exactly(found), wanted)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.int8])
@pytest.mark.parametrize("scale_dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e8m0fnu])
@pytest.mark.parametrize("sizes", [(), (1,), (5,), (5, 1), (3, 2)])
def test_8_bits(dtype, scale_dtype, sizes):
    lead, out, depth, rows, columns = (3,), 5, 6, 2, 4
    weight = rng.integers(-100, 100, (*lead, out, depth)).astype(dtype)
    scale = (2.0 ** rng.integers(-3, 3, (*lead, *sizes))).astype(scale_dtype)
    found = moe.from_8_bits(weight, scale, block=(rows, columns))
    wanted = np.empty((*lead, depth, out))
    for e, i, o in np.ndindex(*wanted.shape):
        at = {(3, 2): (o // rows, i // columns), (5, 1): (o, 0), (5,): (o,), (1,): (0,), (): ()}
        wanted[e, i, o] = float(weight[e, o, i]) * float(scale[(e, *at[sizes])])
    np.testing.assert_array_equal(exactly(found), wanted)
    assert found.values is weight
    assert found.scales.dtype == (scale_dtype if found.scales.dtype.itemsize == 1 else np.float32)


FUNCTIONS = {
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
    on_host, traced = function(**given), jax.jit(function)(**given)
    for host, device in zip(jax.tree.leaves(on_host), jax.tree.leaves(traced), strict=True):
        assert type(host) is np.ndarray
        assert isinstance(device, jax.Array)
        assert host.dtype == device.dtype
        assert host.tobytes() == np.asarray(device).tobytes()


def test_no_experts():
    assert moe.from_gptq(*gptq((0,))).shape == moe.from_awq(*awq((0,))).shape == (0, DEPTH, OUT)


def test_words_that_are_not_contiguous():
    weight, scale, shape = packed()
    found = moe.from_compressed_tensors(np.asfortranarray(weight), scale, shape)
    wanted = moe.from_compressed_tensors(weight, scale, shape)
    np.testing.assert_array_equal(found.values, wanted.values)


# --- groups --------------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [(), (3,)])
def test_g_idx_in_order(lead):
    given, order = gptq(lead), np.arange(DEPTH, dtype=np.int32) // GROUP
    found = moe.from_gptq(*given, np.broadcast_to(order, (*lead, DEPTH)))
    assert found.block[-2:] == (GROUP, 1)


def test_g_idx_tells_groups_of_which_the_last_is_partial():
    order = np.arange(DEPTH, dtype=np.int32) // 48
    assert moe.from_gptq(*gptq(), order).block == (48, 1)


@pytest.mark.parametrize("size", [None, -1, 128])
def test_one_group(size):
    given = gptq(groups=1)
    assert moe.from_gptq(*given, group_size=size).block == (None, 1)
    order = np.zeros(DEPTH, np.int32)
    assert moe.from_gptq(*given, order, group_size=size).block == (None, 1)


def test_compressed_tensors_without_an_order():
    given = packed()
    found = moe.from_compressed_tensors(*given, None, np.full(DEPTH, -1, np.int32))
    assert found.block == (GROUP, 1)


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
        with pytest.raises(ArgumentValueError, match=r'g_idx` must be .*"desc_act": .*"Act order"'):
            ORDERED[name](index)


@pytest.mark.parametrize(("groups", "size"), [(3, None), (2, 16), (2, -1), (0, None), (2, 0)])
def test_group_sizes_that_do_not_fit(groups, size):
    with pytest.raises(
        ArgumentValueError, match=rf"`group_size`.* {groups} groups.*`in` is 64; got {size}"
    ):
        moe.from_gptq(*gptq(groups=groups), group_size=size)


def test_groups_that_shapes_leave_open():
    """Two groups of a depth of 96 are of 48, or of 64 and 32."""
    given = words(12, OUT), words(2, OUT // 8), np.ones((2, OUT), np.float16)
    with pytest.raises(ArgumentValueError, match="there are 2 groups, and `in` is 96; got None"):
        moe.from_gptq(*given)
    assert moe.from_gptq(*given, group_size=64).block == (64, 1)


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
            r"`weight_shape` must be \(24, in\).*16 words.*got \[24, 64\]. Only 4 bits",
        ),
        (
            lambda: moe.from_compressed_tensors(
                words(OUT, 8), A_SCALE.T, np.array([OUT, 63]), group_size=32
            ),
            "2 groups of 32 are 64 numbers, and `in` is 63, which must be even; got 32",
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
            lambda: moe.from_compressed_tensors(words(OUT, 8), A_SCALE.T, None, words(24, 2)),
            r"`weight_zero_point` must have shape \(3, 2\)",
        ),
        (
            lambda: moe.from_awq(words(63, 3), *gptq()[1:], group_size=32),
            "`in` is 63, which must be even",
        ),
        (
            lambda: moe.from_8_bits(INT8, np.ones((1, 2), np.float32)),
            r"shapes \(1, 1\), \(24, 1\) .*128 × 128; got \(1, 2\)",
        ),
        (
            lambda: moe.from_8_bits(INT8[None], np.ones((24, 1), np.float32)),
            r"\(1, 24, 1\) to go with",
        ),
        (lambda: moe.from_8_bits(INT8, np.float32([1]), block=(0, 1)), r"`block\[0\]`"),
        (lambda: moe.from_gptq(*gptq(), np.zeros((2, DEPTH), np.int32)), "`g_idx` must have shape"),
    ],
)
def test_shapes_that_do_not_match(call, message):
    with pytest.raises(ArgumentValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: moe.from_gptq(*map(jnp.float32, gptq())), "`qweight` must be an array of int32"),
        (lambda: moe.from_gptq(words(8), *gptq()[1:]), "`qweight` .* two dimensions or more"),
        (lambda: moe.from_gptq(*gptq(dtype=np.float64)), "`scales` must be an array of float32 or"),
        (lambda: moe.from_gptq(*gptq(), v2="gptq"), "`v2` must be a bool"),
        (lambda: moe.from_gptq(*gptq(), np.zeros(DEPTH)), "`g_idx` must be an array of int32 or i"),
        (lambda: moe.from_gptq(*gptq(), group_size="32"), "`group_size` must be a Python int"),
        (lambda: moe.from_8_bits(np.ones((2, 2)), A_SCALE), "`weight` must be an array of float8"),
        (lambda: moe.from_8_bits(INT8, INT8), "`weight_scale` must be an array of float32 or"),
        (lambda: moe.from_8_bits(INT8, np.float32([1]), block=128), "`block` must be two ints"),
        (lambda: moe.from_mxfp4(INT8, INT8), "`blocks` must be an array of uint8"),
    ],
)
def test_types_that_are_wrong(call, message):
    with pytest.raises(ArgumentTypeError, match=message):
        call()
