"""quantize on a GPU in plain JAX, and of every number of 16 bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.moe.quantization.case import EIGHT, LARGE, NAMED, quantized
from tests.moe.test_cases import check, made
from triax import moe
from triax.testing import assert_same_bits

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", NAMED | LARGE)
def test_plain_jax(name):
    check(made(name, "xla"), runs=2)


@pytest.mark.parametrize("to", EIGHT)
def test_every_bfloat16_by_many_scales(to):
    """All numbers of 16 bits, each beside a largest one that makes another scale."""
    bits = np.arange(2**15, dtype=np.uint16).view(jnp.bfloat16).astype(np.float32)
    bits = np.sort(bits[np.isfinite(bits)]).reshape(-1, 128)
    rng = np.random.default_rng(0)
    with np.errstate(over="ignore"):
        largest = bits[:, -1:] * rng.uniform(1, 2**9, (len(bits), 1)).astype(np.float32)
    array = np.concatenate([bits, largest], axis=1)
    array[~np.isfinite(array)] = 3.4028235e38
    values, scales = quantized(array, to, (1, array.shape[1]), False)
    for implementation in ("triton", "xla"):
        found = moe.quantize(array, to, block=(1, None), implementation=implementation)
        wanted = values.reshape(array.shape), scales
        jax.tree.map(assert_same_bits, (found.values, found.scales), wanted)
