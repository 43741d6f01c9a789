"""The op against float64. On a machine without a GPU, Triax interprets the kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from triax_example_norms import rms_norm
from triax_example_norms.rms_norm import rms_norm_reference

from triax import testing

RNG = np.random.default_rng(0)


def exact(x, weight, eps=1e-6):
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def draw(*shape, dtype=jnp.float32):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


@pytest.mark.parametrize("function", [rms_norm, rms_norm_reference])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(5, 100), (1, 64), (3, 1), (0, 8), (3, 0), (2, 3, 17)])
def test_any_shape(shape, dtype, function):
    x, weight = draw(*shape, dtype=dtype), draw(shape[-1], dtype=dtype)
    out = function(x, weight)
    assert (out.shape, out.dtype) == (x.shape, x.dtype)
    testing.assert_close(out, exact(x, weight), terms=shape[-1])


def test_gradient():
    with jax.enable_x64(True):
        x, weight = draw(3, 20, dtype=jnp.float64), draw(20, dtype=jnp.float64)
        # The kernels compute in float32.
        check_grads(rms_norm, (x, weight), order=1, modes=["rev"], atol=1e-2, rtol=1e-2, eps=1e-3)


def test_many_rows_share_a_program():
    """More rows than programs: each row's part of the weight's gradient counts once."""
    x, weight = draw(1030, 4), jnp.ones(4)
    d_weight = jax.grad(lambda weight: jnp.sum(rms_norm(x, weight)))(weight)
    testing.assert_close(d_weight, exact(x, weight).sum(0), terms=1030)


def test_vmap():
    x, weights = draw(3, 2, 5, 8), draw(3, 8)
    out = jax.vmap(rms_norm)(x, weights)
    testing.assert_close(out, exact(x, weights[:, None, None]), terms=8)


def test_no_race_and_nothing_unwritten():
    x, weight = draw(4, 24), draw(24)
    with testing.checked():
        jax.vjp(rms_norm, x, weight)[1](x)


@pytest.mark.parametrize(("x", "weight"), [((2, 3), (2,)), ((2, 3), (1, 3)), ((), (1,))])
def test_shapes_that_do_not_fit(x, weight):
    with pytest.raises(ValueError, match="`weight` must be"):
        rms_norm(jnp.ones(x), jnp.ones(weight))
