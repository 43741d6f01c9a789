"""ScaledArray: what it stands for, as a pytree, and its checks."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from triax import moe
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe.quantization.scaled import check


def scaled(transposed=False):
    values = jnp.asarray(np.arange(-60, 66).reshape(2, 9, 7), jnp.int8)
    scales = jnp.asarray(2.0 ** np.arange(2 * 3 * 1).reshape(2, 3, 1), jnp.float32)
    return moe.ScaledArray(values, scales, (1, 4, 7), transposed)


@pytest.mark.parametrize("transposed", [False, True])
def test_dequantize(transposed):
    array = scaled(transposed)
    wanted = np.asarray(array.values) * np.repeat(np.asarray(array.scales), 4, axis=1)[:, :9]
    if transposed:
        wanted = wanted.swapaxes(1, 2)
    assert array.shape == wanted.shape
    assert (array.ndim, array.dtype) == (3, jnp.int8)
    np.testing.assert_array_equal(array.dequantize(), wanted)
    found = jax.jit(lambda a: a.dequantize("bfloat16"))(array)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, wanted.astype(jnp.bfloat16))


@pytest.mark.parametrize("dtype", ["int8", bool, "complex64", "float7"])
def test_dequantized_numbers_are_floats(dtype):
    array = moe.quantize(jnp.ones((4, 4)), block=(1, None))
    with pytest.raises(ArgumentTypeError, match="`dtype` must be a float such as"):
        array.dequantize(dtype)


def test_a_pytree_of_anything():
    array = scaled(True)
    for other in (None, object(), 3):
        mapped = jax.tree.map(lambda _, new=other: new, array)
        assert (mapped.values, mapped.block, mapped.transposed) == (other, (1, 4, 7), True)
    assert hash(jax.tree.structure(array)) == hash(jax.tree.structure(scaled(True)))
    assert jax.tree.structure(array) != jax.tree.structure(scaled())
    stacked = jax.tree.map(lambda a: jnp.stack([a, a]), array)
    mapped = jax.vmap(lambda a: a.dequantize())(stacked)
    _, scanned = jax.lax.scan(lambda _, a: (None, a.dequantize()), None, stacked)
    np.testing.assert_array_equal(mapped, np.stack(2 * [array.dequantize()]))
    np.testing.assert_array_equal(scanned, mapped)
    assert "values" in str(jax.tree_util.tree_flatten_with_path(array)[0][0][0])


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"values": None}, ArgumentTypeError, "an array as its `values`; got None"),
        ({"scales": 1.0}, ArgumentTypeError, "an array as its `scales`; got 1.0"),
        ({"values": jnp.ones((2, 9, 7))}, ArgumentTypeError, "float8_e5m2, int8; got float32"),
        (
            {"scales": jnp.ones((2, 3, 1), "int8")},
            ArgumentTypeError,
            "float32 or float8_e8m0fnu; got int8",
        ),
        ({"block": (4, 7)}, ArgumentValueError, r"`block` of one .* got \(4, 7\)"),
        ({"block": (1, 0, 7)}, ArgumentValueError, r"`block` of one .* got \(1, 0, 7\)"),
        ({"block": (1, 3.0, 7)}, ArgumentValueError, r"`block` of one"),
        ({"block": (1, 3, 3)}, ArgumentValueError, r"shape \(2, 3, 3\), one .* got \(2, 3, 1\)"),
    ],
)
def test_checks(change, error, match):
    with pytest.raises(error, match=f"`w` .*{match}"):
        check("w", dataclasses.replace(scaled(), **change))


def test_checks_of_other_things():
    check("w", scaled())
    with pytest.raises(ArgumentTypeError, match="`w` must be a ScaledArray; got 3 of type int"):
        check("w", 3)
    flat = moe.ScaledArray(jnp.ones(4, "int8"), jnp.ones(1), (4,), True)
    with pytest.raises(ArgumentValueError, match="`w` is transposed, which takes two dimensions"):
        check("w", flat)
