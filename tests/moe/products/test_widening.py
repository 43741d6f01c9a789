"""A kernel takes weights out of tiles for the gradient of rows."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from triax import moe


@pytest.mark.cuda_plugin
@pytest.mark.parametrize("block", [(1, None, 1), (1, None, None), (1, 64, 1)])
@pytest.mark.parametrize("numbers", ["float8_e4m3fn", "int8", "int4"])
def test_tiles_for_the_gradient_of_rows_are_not_reordered_in_memory(numbers, block, monkeypatch):
    array = np.random.default_rng(0).standard_normal((2, 192, 128), np.float32)
    weights = moe.quantize(array, numbers, block=block, transposed=True)

    def gradient(rows, weights):
        product = lambda rows: moe.ragged_dot(rows, weights, np.array([3, 5]))
        return jax.vjp(product, rows)[1](rows[:, :128])[0]

    monkeypatch.setenv("TRIAX_CUDA_ARCH", "90")
    types = jax.ShapeDtypeStruct((8, 192), "bfloat16"), jax.eval_shape(weights.tile)
    lowered = jax.jit(gradient).trace(*types).lower(lowering_platforms=("cuda",)).as_text()
    assert 'triax.kernel = "widen"' in lowered
    assert "stablehlo.transpose" not in lowered
