"""ScaledArray: what it stands for, as a pytree and as a sequence, and its checks."""

from __future__ import annotations

import dataclasses
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.moe.plans.case import ready_plan
from triax import moe
from triax.errors import ArgumentTypeError, ArgumentValueError, TriaxError
from triax.moe.quantization.scaled import check
from triax.testing import assert_same_bits


def scaled(transposed=False):
    values = jnp.asarray(np.arange(-60, 66).reshape(2, 9, 7), jnp.int8)
    scales = jnp.asarray(2.0 ** np.arange(2 * 3 * 1).reshape(2, 3, 1), jnp.float32)
    return moe.ScaledArray(values, scales, (1, None, 4) if transposed else (1, 4, 7), transposed)


@pytest.mark.parametrize("transposed", [False, True])
def test_dequantize(transposed):
    array = scaled(transposed)
    wanted = np.asarray(array.values) * np.repeat(np.asarray(array.scales), 4, axis=1)[:, :9]
    if transposed:
        wanted = wanted.swapaxes(1, 2)
    assert array.shape == wanted.shape
    assert (array.ndim, array.size, array.dtype, array.nbytes) == (3, 126, jnp.int8, 126 + 24)
    np.testing.assert_array_equal(array.dequantize(), wanted)
    np.testing.assert_array_equal(array.mT.dequantize(), wanted.swapaxes(1, 2))
    found = jax.jit(lambda a: a.astype("bfloat16"))(array)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, wanted.astype(jnp.bfloat16))


@pytest.mark.parametrize("dtype", ["int8", bool, "complex64", "float7"])
def test_dequantized_numbers_are_floats(dtype):
    array = moe.quantize(jnp.ones((4, 4)), block=(1, None))
    with pytest.raises(ArgumentTypeError, match="`dtype` must be a float such as"):
        array.dequantize(dtype)


def test_a_pytree_of_anything():
    array = scaled(True)
    for other in (None, object(), 3, P("x"), jax.ShapeDtypeStruct((7,), "float32")):
        mapped = jax.tree.map(lambda _, new=other: new, array)
        assert (mapped.values, mapped.block, mapped.transposed) == (other, (1, None, 4), True)
        assert repr(mapped).count("\n") < 3
    assert dataclasses.replace(array, values=P("x"), scales=P("x")).scales == P("x")
    assert hash(jax.tree.structure(array)) == hash(jax.tree.structure(scaled(True)))
    assert jax.tree.structure(array) != jax.tree.structure(scaled())
    stacked = jax.tree.map(lambda a: jnp.stack([a, a]), array)
    mapped = jax.vmap(lambda a: a.dequantize())(stacked)
    _, scanned = jax.lax.scan(lambda _, a: (None, a.dequantize()), None, stacked)
    np.testing.assert_array_equal(mapped, np.stack(2 * [array.dequantize()]))
    np.testing.assert_array_equal(scanned, mapped)
    assert "values" in str(jax.tree_util.tree_flatten_with_path(array)[0][0][0])
    with pytest.raises(
        ArgumentValueError, match=r"`self` is a ScaledArray with a mistake: .*`block"
    ):
        stacked.dequantize()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("first", [1, None, 8])
@pytest.mark.parametrize(("dtype", "transposed"), [("int4", True), ("float8_e5m2", False)])
def test_indices(first, dtype, transposed):
    array = np.random.default_rng(0).standard_normal((5, 12, 8), np.float32)
    array = moe.quantize(array, dtype, block=(first, 4, 1), transposed=transposed)
    if dtype == "int4":
        array = dataclasses.replace(array, zeros=np.ones(array.scales.shape, np.float32))
    indices = (3, -1, np.int32(2), slice(2, 5), slice(None, None, 2), slice(0, 0))
    parts, part, whole = jax.jit(
        lambda a, i: ([a[at].dequantize() for at in indices], a[i].dequantize(), a.dequantize())
    )(array, 3)
    whole = np.asarray(whole)
    for found, index in zip(parts, indices, strict=True):
        assert_same_bits(found, whole[index])
    assert_same_bits(part, whole[3])
    assert len(array) == len(list(array)) == 5
    with pytest.raises(IndexError, match="5 is out of range"):
        array[5]
    with pytest.raises(ArgumentTypeError, match="an int or a slice of its first dimension; got"):
        array[1, 2]


def test_parts_that_cannot_be_indexed():
    array = moe.quantize(jnp.ones((4, 6)), block=(2, None))
    for one in (array, array.mT, moe.quantize(jnp.ones(4), block=(1,))):
        with pytest.raises(
            ArgumentValueError, match="along a first dimension that is stored first"
        ):
            one[0]
    for index in (True, np.True_, None, ...):
        with pytest.raises(ArgumentTypeError, match="indexed by an int or a slice"):
            scaled()[index]


def test_sizes_that_are_not_numbers():
    (rows,) = jax.export.symbolic_shape("rows")
    x = moe.quantize(np.ones((4, 32), np.float32), block=(1, None))
    types = jax.tree.map(lambda a: jax.ShapeDtypeStruct((rows, *a.shape[1:]), a.dtype), x)
    sizes, w = np.array([4]), moe.quantize(np.ones((1, 32, 8), np.float32), block=(1, None, 1))
    plan = ready_plan(np.zeros((4, 1), np.int32), 1)
    for function, match in (
        (lambda x: moe.ragged_dot(x, w, sizes), "`rows` must have concrete sizes"),
        (lambda x: x[:2], "must have concrete sizes"),
        (lambda x: moe.permute(x, plan), "to go with the plan"),
    ):
        with pytest.raises(TriaxError, match=match):
            jax.export.export(jax.jit(function))(types)
    values = jax.ShapeDtypeStruct((1, 16 * rows, 8), "int8")
    scales = jax.ShapeDtypeStruct((1, rows, 8), "float32")
    deep = moe.ScaledArray(values, scales, (1, 16, 1))
    product = jax.jit(lambda w: moe.ragged_dot(jnp.ones((4, 32)), w, sizes))
    with pytest.raises(TriaxError, match="`weights` must have concrete sizes"):
        jax.export.export(product)(deep)


def test_without_dimensions():
    one = moe.quantize(jnp.float32(3), block=())
    assert one.dequantize() == 3
    with pytest.raises(TypeError, match=r"no len\(\)"):
        len(one)


@pytest.mark.parametrize("turn", [np.asarray, jnp.asarray, jnp.sum, lambda a: jnp.ones(7) + a])
def test_it_is_no_array_by_itself(turn):
    with pytest.raises(TypeError, match=r"dequantize|unsupported operand"):
        turn(scaled())


@pytest.mark.parametrize("compare", [operator.eq, operator.ne])
@pytest.mark.parametrize("other", [scaled(), np.ones(7), jnp.ones(7), None])
def test_comparisons_are_refused(compare, other):
    for pair in ((scaled(), other), (other, scaled())):
        with pytest.raises(ArgumentTypeError, match=r"(results of|Call) `dequantize"):
            compare(*pair)


def test_its_text():
    text = "ScaledArray(int8[2,7,9], block=(1, None, 4), transposed=True,\n"
    assert repr(scaled(True)) == text + "            values=int8[2,9,7], scales=float32[2,3,1])"
    sums = jax.tree.map(jnp.sum, dataclasses.replace(scaled(), values=jnp.zeros((2, 9, 7), "int8")))
    assert repr(sums).startswith("ScaledArray(block=(1, 4, 7), transposed=False,")


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"values": None}, ArgumentTypeError, "`values` .* float8_e5m2 or int8; got None"),
        ({"scales": 1.0}, ArgumentTypeError, "`scales` must be an array of float32 .*; got 1.0"),
        ({"values": jnp.ones((2, 9, 7))}, ArgumentTypeError, "float8_e5m2 or int8; got float32"),
        (
            {"scales": jnp.ones((2, 3, 1), "int8")},
            ArgumentTypeError,
            "float32 or float8_e8m0fnu; got int8",
        ),
        ({"block": 4}, ArgumentTypeError, "`block` must be a tuple .* got 4 of type int"),
        ({"block": (4, 7)}, ArgumentValueError, r"shape \(2, 9, 7\); got \(4, 7\)"),
        ({"block": (1, 0, 7)}, ArgumentValueError, r"`block\[1\]` must be at least 1 .* got 0"),
        ({"block": (1, 3.0, 7)}, ArgumentTypeError, r"`block\[1\]` must be a Python int"),
        ({"block": (1, 3, 3)}, ArgumentValueError, r"shape \(2, 3, 3\), one .* got \(2, 3, 1\)"),
        ({"transposed": "no"}, ArgumentTypeError, "`transposed` must be a bool"),
    ],
)
def test_checks(change, error, match):
    with pytest.raises(error, match=match):
        dataclasses.replace(scaled(), **change)


def test_checks_of_arguments():
    check("w", scaled())
    with pytest.raises(ArgumentTypeError, match="`w` must be a ScaledArray; got 3 of type int"):
        check("w", 3)
    with pytest.raises(ArgumentTypeError, match="`w` must have an array as its `values`; got None"):
        check("w", jax.tree.map(lambda _: None, scaled()))
    packed = moe.ScaledArray(
        jnp.zeros((1, 2), "uint8"),
        jnp.ones((1, 1)),
        (1, None),
        packed="int4",
        zeros=jax.ShapeDtypeStruct((1, 1), "int8"),
    )
    with pytest.raises(ArgumentTypeError, match="`w` must have an array as its `zeros`"):
        check("w", packed)
    with pytest.raises(ArgumentValueError, match=r"`transposed` must be False for .* two dimens"):
        moe.ScaledArray(jnp.ones(4, "int8"), jnp.ones(1), (4,), True)
