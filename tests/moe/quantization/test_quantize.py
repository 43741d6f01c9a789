"""What `tests/moe/test_cases.py` does not see of quantize."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.moe.quantization.case import middles, quantized
from triax import moe
from triax.errors import ArgumentTypeError, ArgumentValueError, DifferentiationError
from triax.moe.quantization import reference
from triax.testing import assert_same_bits


@pytest.mark.parametrize("units", [-3, 3])
def test_plain_jax_does_not_trust_a_division(monkeypatch, units):
    """GPUs' is off by two units: here by more."""
    to, block = "float8_e4m3fn", (1, 300)
    array = middles(np.random.default_rng(0), (20, 300), block, to)
    divide = jnp.divide
    monkeypatch.setattr(jnp, "divide", lambda a, b: divide(a, b) + units * 2.0**-23)
    how = {"block": block, "dtype": jnp.dtype(to), "transposed": False}
    # A program of its own, which no other test shares.
    anew = jax.jit(functools.partial(reference.quantize_reference.__wrapped__, **how))
    for found, wanted in zip(anew(array), quantized(array, to, block, False), strict=True):
        assert_same_bits(found, wanted.reshape(found.shape))


@pytest.mark.sampled(1, 1)
@pytest.mark.parametrize("implementation", ["interpret", "xla"])
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


# --- arguments -----------------------------------------------------------------------------------

X = np.ones((4, 300), np.float32)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"array": [1.0]}, ArgumentTypeError, "`array` must be an array; got"),
        ({"array": X.astype(int)}, ArgumentTypeError, "float32, bfloat16 or float16; got int64"),
        ({"array": X.astype(np.float64)}, ArgumentTypeError, "`array` .* got float64"),
        ({"array": X.astype(jnp.float8_e5m2)}, ArgumentTypeError, "`array` .* got float8_e5m2"),
        ({"dtype": "float8"}, ArgumentValueError, "`dtype` must be float8_e4m3fn, .* or int4; got"),
        ({"dtype": "float8_e4m3fnuz"}, ArgumentValueError, "`dtype` .* got 'float8_e4m3fnuz'"),
        ({"block": 128}, ArgumentTypeError, "`block` must be a tuple .* got 128 of type int"),
        (
            {"block": (128,)},
            ArgumentValueError,
            r"`block` must have .* shape \(4, 300\); got \(128",
        ),
        ({"block": (1, 0)}, ArgumentValueError, r"`block\[1\]` must be at least 1 .* got 0"),
        ({"block": (-1, 1)}, ArgumentValueError, r"`block\[0\]` must be at least 1 .* got -1"),
        ({"block": (True, 1)}, ArgumentTypeError, r"`block\[0\]` must be a Python int"),
        ({"block": (1, 8.0)}, ArgumentTypeError, r"`block\[1\]` must be a Python int"),
        ({"implementation": "cuda"}, ArgumentValueError, "`implementation` must be one of"),
        (
            {"array": X[0], "block": (300,), "transposed": True},
            ArgumentValueError,
            "`transposed` must be False for an array of fewer than two dimensions",
        ),
    ],
)
def test_errors(change, error, match):
    given = {"array": X, "block": (1, 128)} | change
    with pytest.raises(error, match=match):
        moe.quantize(given.pop("array"), **given)


@pytest.mark.parametrize("implementation", ["triton", "interpret"])
@pytest.mark.parametrize(
    ("block", "transposed"),
    [((1, 100), False), ((1, 8), False), ((2, None), False), ((1, None), True), ((2, 1), True)],
)
def test_blocks_that_no_kernel_does(implementation, block, transposed):
    with pytest.raises(ArgumentValueError, match=r"`block` must suit the kernels: .* got \("):
        moe.quantize(X, block=block, transposed=transposed, implementation=implementation)
    assert moe.quantize(X, block=block, transposed=transposed).shape == X.shape


def test_dtypes_by_any_name():
    for dtype in (jnp.float8_e5m2, "float8_e5m2", np.dtype(jnp.float8_e5m2)):
        assert moe.quantize(X, dtype, block=[1, None]).dtype == jnp.float8_e5m2
    assert moe.quantize(X, block=(1, None)).dtype == jnp.float8_e4m3fn
