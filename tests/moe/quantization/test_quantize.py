"""quantize on both paths, bit for bit against NumPy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.moe.quantization.oracle import DTYPES, draw, expected
from triax import moe
from triax.errors import DifferentiationError
from triax.moe.quantization import reference
from triax.testing import assert_same_bits, checked, poison

PATHS = ["interpret", "xla"]
# Shape, block, transposed: what kernels do.
KERNELS = [
    ((33, 21), (1, None), False),
    ((2, 3, 9000), (1, 1, None), False),  # two passes
    ((130, 256), (1, 16), False),
    ((5, 2880), (1, 128), False),
    ((130, 200), (128, 128), False),
    ((2, 130, 140), (1, 128, 128), True),
    ((2, 300, 70), (1, None, 1), True),
    ((33, 21), (None, 1), True),  # no four values are one number
]
OTHERS = [
    ((7, 30), (2, 7), False),
    ((7, 30), (2, 7), True),
    ((6, 10, 4), (2, None, 3), True),
    ((40,), (64,), False),
    ((9, 5), (1, 1), False),
    ((), (), False),
]


def assert_expected(found, array, dtype, block, transposed):
    values, scales = expected(array, dtype, block, transposed)
    assert_same_bits(found.scales, scales)
    assert_same_bits(found.values, values)
    assert (found.block, found.shape) == (block, array.shape)


@pytest.mark.sampled(2, 6)
@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("to", DTYPES)
@pytest.mark.parametrize(("dtype", "special"), [("bfloat16", True), ("float32", False)])
@pytest.mark.parametrize(("shape", "block", "transposed"), KERNELS)
def test_bits(implementation, to, dtype, special, shape, block, transposed):
    array = draw(shape, jnp.dtype(dtype), special=special)
    poison(8 * array.nbytes)
    with checked():
        found = moe.quantize(
            array, to, block=block, transposed=transposed, implementation=implementation
        )
    assert_expected(found, array, to, block, transposed)


@pytest.mark.parametrize(
    ("implementation", "to"),
    [
        *(("interpret", to) for to in DTYPES),
        ("xla", "int8"),
        *(
            pytest.param("xla", to, marks=pytest.mark.slow("test_bits has bfloat16's"))
            for to in DTYPES[:2]
        ),
    ],
)
def test_bits_of_float16_and_of_special_float32(implementation, to):
    for dtype in ("float16", "float32"):
        array = draw((40, 300), jnp.dtype(dtype))
        found = jax.jit(
            functools.partial(
                moe.quantize, dtype=to, block=(1, None), implementation=implementation
            )
        )(array)
        assert_expected(found, array, to, (1, None), False)


@pytest.mark.sampled(2, 3)
@pytest.mark.parametrize("to", DTYPES)
@pytest.mark.parametrize(("shape", "block", "transposed"), OTHERS)
def test_other_blocks(to, shape, block, transposed):
    array = draw(shape or (1,), np.float32, special=False).reshape(shape)
    found = moe.quantize(array, to, block=block, transposed=transposed)
    assert_expected(found, array, to, block, transposed)


@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (3, 0, 128), (0,)])
def test_empty_arrays(implementation, shape):
    block = (1,) * (len(shape) - 1) + (None,)
    found = moe.quantize(jnp.zeros(shape), block=block, implementation=implementation)
    assert found.values.shape == shape
    assert found.scales.shape == (*shape[:-1], min(shape[-1], 1))
    assert found.dequantize().shape == shape


@pytest.mark.sampled(2, 4)
@pytest.mark.parametrize("implementation", PATHS)
@pytest.mark.parametrize("to", DTYPES)
def test_quotients_next_to_the_middle_of_two_values(implementation, to):
    """They are rounded as float32 first, on which a last bit that is wrong would tell."""
    rng = np.random.default_rng(0)
    kind = reference.FORMATS[np.dtype(to)]
    if to == "int8":
        numbers = np.arange(128, dtype=np.float32)
    else:
        numbers = np.arange(kind.top + 1, dtype=np.uint8).view(to).astype(np.float32)
    middles = (numbers[1:] + numbers[:-1]) / 2
    scales = rng.uniform(1, 2, (300, 1)).astype(np.float32) * 2.0 ** rng.integers(
        -125, 90, (300, 1)
    )
    near = (middles * scales.astype(np.float32)).astype(np.float32)
    above, below = (np.nextafter(near, np.float32(to)) for to in (np.inf, 0))
    top = np.float32(kind.largest) * scales.astype(np.float32)
    array = np.concatenate([near, -above, below, top], axis=1)
    found = moe.quantize(array, to, block=(1, None), implementation=implementation)
    assert_expected(found, array, to, (1, None), False)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("units", [-3, 3])
def test_plain_jax_does_not_trust_a_division(monkeypatch, units):
    """GPUs' is off by two units: here by more."""
    array = draw((20, 300), np.float32, special=False)
    wanted = expected(array, "float8_e4m3fn", (1, None))
    divide = jnp.divide
    monkeypatch.setattr(jnp, "divide", lambda a, b: divide(a, b) + units * 2.0**-23)
    how = {"block": (1, 300), "dtype": np.dtype(ml_dtypes.float8_e4m3fn), "transposed": False}
    # A program of its own, which no other test shares.
    anew = jax.jit(functools.partial(reference.quantize_reference.__wrapped__, **how))
    jax.tree.map(assert_same_bits, anew(array), wanted)


@pytest.mark.slow("many programs for one rule")
@given(st.integers(0, 2**32 - 1), st.sampled_from(DTYPES), st.sampled_from([1, 7, 40]))
@settings(max_examples=40, deadline=None)
def test_a_value_is_within_half_a_step(seed, to, block):
    array = draw((9, 40), np.float32, seed, special=False)
    found = moe.quantize(array, to, block=(1, block))
    scales = np.repeat(np.asarray(found.scales, np.float64), block, axis=1)[:, :40]
    back = np.asarray(found.values).astype(np.float64) * scales
    if to == "int8":
        step = 1.0
    else:
        least = float(ml_dtypes.finfo(to).smallest_subnormal)
        mantissa = reference.FORMATS[np.dtype(to)].mantissa
        _, exponent = np.frexp(np.abs(array) / scales)
        step = np.maximum(2.0 ** (exponent - 1 - mantissa), least)
    assert (np.abs(array - back) <= step / 2 * scales * (1 + 2**-20)).all()


@pytest.mark.sampled(1, 1)
@pytest.mark.parametrize("to", DTYPES)
@pytest.mark.parametrize(("shape", "block", "transposed"), [*KERNELS[:4], KERNELS[6]])
def test_twice_is_once(to, shape, block, transposed):
    """Where scales are powers of two, so that values times scales are exact."""
    array = np.asarray(draw(shape, np.float32, special=False))
    once = moe.quantize(array, to, block=block, transposed=transposed)
    _, exponents = np.frexp(np.asarray(once.scales))
    scales = np.ldexp(np.float32(1), exponents)
    exact = moe.ScaledArray(once.values, scales, once.block, once.transposed)
    there_and_back = jax.jit(
        lambda a: moe.quantize(a.dequantize(), to, block=block, transposed=transposed)
    )
    again = there_and_back(exact)
    twice = there_and_back(again)
    jax.tree.map(assert_same_bits, twice, again)
    large = scales > 2.0**-120  # others' scale is the least one
    assert_same_bits(np.asarray(again.scales)[large], scales[large])


@pytest.mark.sampled(1, 1)
@pytest.mark.parametrize("implementation", PATHS)
def test_under_vmap_and_scan(implementation):
    array = draw((3, 2, 130, 70), jnp.bfloat16)
    how = {"block": (1, None, 1), "transposed": True, "implementation": implementation}
    one = functools.partial(moe.quantize, **how)

    @jax.jit
    def run(array):
        middle = jax.vmap(one, in_axes=2, out_axes=1)(jnp.moveaxis(array, 0, 2))
        _, scanned = jax.lax.scan(lambda _, a: (None, one(a)), None, array)
        return one(array.reshape(6, 130, 70)), jax.vmap(one)(array), scanned, middle

    wanted, mapped, scanned, middle = run(array)
    assert mapped.block == wanted.block
    for found in (mapped, scanned, jax.tree.map(lambda a: np.moveaxis(a, 1, 0), middle)):
        parts = jax.tree.map(lambda a: np.asarray(a).reshape(6, *a.shape[2:]), found)
        jax.tree.map(assert_same_bits, parts, wanted)


@pytest.mark.sampled(1, 1)
@pytest.mark.parametrize("implementation", PATHS)
def test_derivatives_are_refused(implementation):
    how = {"block": (1, 16), "implementation": implementation}
    x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32)

    def loss(x):
        return jnp.sum(moe.quantize(x, **how).dequantize())

    for run in (
        jax.grad(loss),
        jax.jit(jax.grad(loss)),
        jax.vmap(jax.grad(lambda x: loss(x[None]))),
    ):
        with pytest.raises(DifferentiationError, match="quantize is not differentiable"):
            run(x)
    with pytest.raises(DifferentiationError, match=r"stop_gradient\(x\)"):
        jax.jvp(lambda x: jax.lax.stop_gradient(loss(x)), (x,), (x,))

    def straight_through(x):
        y = moe.quantize(jax.lax.stop_gradient(x), **how).dequantize()
        return jnp.sum((x + jax.lax.stop_gradient(y - x)) ** 2)

    back = jax.jit(lambda x: moe.quantize(x, **how).dequantize())(x)
    gradient = jax.jit(jax.grad(straight_through))(x)
    np.testing.assert_allclose(gradient, 2 * np.asarray(back), rtol=1e-6)


def test_one_op_in_a_jaxpr():
    jaxpr = jax.make_jaxpr(lambda x: moe.quantize(x, block=(1, None)))(jnp.ones((2, 4)))
    assert [str(each.primitive) for each in jaxpr.eqns] == ["triax_quantize"]
