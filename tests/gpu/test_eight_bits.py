"""Layers in 8 bits on a GPU."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from tests.gpu.references import on_cpu
from tests.moe import flat
from triax import moe

pytestmark = pytest.mark.gpu


def error(found, wanted):
    found = np.asarray(found, np.float64)
    assert np.all(np.isfinite(found))
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


RECIPES = {"rows": "rows", "blocks": "blocks", "all": moe.Recipe(weight_gradient="rows")}


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_layer(recipe):
    """The kernels against plain JAX: both quantize to the same bits."""
    keys = jax.random.split(jax.random.key(1), 4)
    shapes = (500, 256), (500, 8), (8, 256, 384), (8, 192, 256)
    given = [
        jax.random.normal(k, s) / (1 if len(s) == 2 else 14)
        for k, s in zip(keys, shapes, strict=True)
    ]
    given = [a.astype("float32" if i == 1 else "bfloat16") for i, a in enumerate(given)]

    @functools.partial(jax.jit, static_argnames="implementation")
    def run(*given, implementation):
        def tokens(*given):
            how = {"top_k": 2, "normalize": True, "implementation": implementation}
            return flat.layer(*given, recipe=RECIPES[recipe], **how).tokens

        out, pull = jax.vjp(tokens, *given)
        return out, *pull(given[0])

    plain = on_cpu(run, *given, implementation="xla")
    for found, wanted in zip(run(*given, implementation="triton"), plain, strict=True):
        assert error(found, np.asarray(wanted, np.float64)) < 1e-2
