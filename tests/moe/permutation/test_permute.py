"""What `tests/moe/test_cases.py` does not see of permute and unpermute."""

from __future__ import annotations

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.moe.plans.case import ready_plan
from triax import moe
from triax.testing import assert_same_bits

# tests/conftest.py turns them off, for versions that know the flag.
FLAG = "xla_cpu_use_fusion_emitters"
EMITTERS = {FLAG: True} if FLAG in os.environ.get("XLA_FLAGS", "") else None


@pytest.fixture(params=["xla", "interpret"])
def implementation(request):
    return request.param


def test_example(implementation):
    plan = ready_plan(np.array([[1, 0], [2, 1]]), 3)
    x = np.array([[1, 2], [3, 4]], np.float32)
    rows = jax.jit(functools.partial(moe.permute, implementation=implementation))(x, plan)
    assert rows.tolist() == [[1, 2], [1, 2], [3, 4], [3, 4]]
    weights = np.array([[0.5, 0.5], [2, 0]], np.float32)
    back = jax.jit(functools.partial(moe.unpermute, implementation=implementation))
    y = back(rows, plan, weights)
    assert y.tolist() == [[1, 2], [6, 8]]


@pytest.mark.sampled(2, 2)
@pytest.mark.parametrize("wide", [False, True])
def test_overflow_to_float8_is_the_same_everywhere(wide, implementation):
    """JAX casts what float8_e4m3fn does not hold to NaN; a GPU would saturate."""
    ids = np.full((1, 20 if wide else 2), -1)
    ids[0, :2] = 0
    plan = ready_plan(ids, 1, num_rows=2)
    rows = np.full((2, 4), 400.0, jnp.float8_e4m3fn)
    op = lambda *weights: moe.unpermute(rows, plan, *weights, implementation=implementation)
    assert np.isnan(np.asarray(jax.jit(op)()).astype(np.float32)).all()

    gradient = jax.jit(lambda weights: jax.vjp(op, weights)[1](jnp.ones((1, 4), rows.dtype)))
    for dtype, is_nan in (("float8_e4m3fn", True), ("float8_e5m2", False)):
        (d_weights,) = gradient(np.ones(ids.shape, jnp.dtype(dtype)))
        assert d_weights.dtype == dtype
        expected = np.where(ids >= 0, np.nan if is_nan else 1536.0, 0.0)  # 4 * 400, rounded
        np.testing.assert_array_equal(np.asarray(d_weights).astype(np.float32), expected)


def test_dtypes_triton_lacks_go_through_plain_jax():
    plan = ready_plan(np.array([[1], [0]]), 2)
    for dtype in ("complex64", "int4"):
        x = np.arange(6).reshape(2, 3).astype(jnp.dtype(dtype))
        np.testing.assert_array_equal(jax.jit(moe.permute)(x, plan), x[::-1])


def test_gradients_of_complex_tokens():
    plan = ready_plan(np.array([[1, 0], [0, -1]]), 2)
    x = (np.arange(6).reshape(2, 3) * (1 + 2j)).astype(np.complex64)
    grad = jax.jit(jax.grad(lambda x: jnp.sum(moe.permute(x, plan)).imag))(x)
    np.testing.assert_array_equal(grad, np.array([[-2j] * 3, [-1j] * 3]))


@pytest.mark.slow("many programs for one rule")
def test_a_batch_of_constants_under_jit():
    """Of which XLA computes the results while it compiles, some of them wrongly."""
    ids = jnp.asarray([[1, 0], [0, 1], [2, -1], [2, 0], [1, 2], [0, 2]])
    plan = moe.make_plan(ids, 3, align_size=4)
    x = jnp.asarray(np.random.default_rng(4).standard_normal((2, 6, 3), np.float32))
    rows = jnp.zeros((2, plan.num_rows, 3))
    permute = jax.vmap(lambda x: moe.permute(x, plan, implementation="xla"))
    unpermute = jax.vmap(lambda rows: moe.unpermute(rows, plan, implementation="xla"))
    for function in (lambda: permute(x), lambda: jax.vjp(unpermute, rows)[1](x)[0]):
        program = jax.jit(function).lower().compile(compiler_options=EMITTERS)
        assert_same_bits(program(), function())
