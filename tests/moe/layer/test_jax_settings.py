"""The layer under settings of JAX that its own code must not depend on."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.moe import flat
from triax import moe
from triax.testing import assert_same_bits


@contextlib.contextmanager
def strict():
    """What would be promoted is an error, and so are NaNs."""
    with (
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
        jax.debug_nans(True),
    ):
        yield


@contextlib.contextmanager
def strict_with_64_bits():
    with jax.enable_x64(True), strict():
        yield


SETTINGS = {"strict": strict, "strict with 64 bits": strict_with_64_bits}
LAYERS = {
    "bfloat16": {},
    "interleaved": {"interleaved": True, "activation": moe.Swiglu(limit=7.0)},
    "sigmoid": {"score": "sigmoid", "num_groups": 2, "top_groups": 1},
    "8 bits": {"recipe": "rows"},
}


def draw():
    rng = np.random.default_rng(0)
    shapes = (12, 32), (12, 8), (8, 32, 48), (8, 24, 32), (8, 48), (8, 32)
    arrays = [jnp.asarray(rng.standard_normal(shape), "bfloat16") for shape in shapes]
    arrays[1] = arrays[1].astype("float32")
    return arrays


def layer(args, implementation, **options):
    x, logits, w_gate_up, w_down, b_gate_up, b_down = args
    biases = {} if "recipe" in options else {"b_gate_up": b_gate_up, "b_down": b_down}
    how = {"top_k": 2, "implementation": implementation} | biases | options
    found = flat.layer(x, logits, w_gate_up, w_down, **how)
    return jnp.sum(found.tokens.astype("float32")), found


def results(options, implementation):
    run = functools.partial(layer, implementation=implementation, **LAYERS[options])
    return jax.jit(jax.value_and_grad(run, has_aux=True))(draw())


plain = functools.cache(results)  # without a setting


@pytest.mark.sampled(0, 1)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("options", LAYERS)
@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_same_bits_under(setting, options, implementation):
    """Results, their types, and gradients."""
    with SETTINGS[setting]():
        found = results(options, implementation)
    jax.tree.map(assert_same_bits, found, plain(options, implementation))
