"""quantize on a GPU: kernels and plain JAX give the same bits, and NumPy's."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.gpu.references import on_cpu
from tests.moe.quantization.oracle import DTYPES, draw, expected
from tests.moe.quantization.test_quantize import KERNELS, OTHERS
from triax import moe
from triax.testing import assert_same_bits, poison

pytestmark = pytest.mark.gpu

FLOATS = "float32", "bfloat16", "float16"
MODELS = [
    ((1000, 7168), (1, None), False),
    ((65, 16384), (1, None), False),
    ((4099, 40), (1, None), False),
    ((333, 2880), (1, 128), False),
    ((1000, 7168), (1, 128), False),
    ((1000, 2048), (1, 32), False),
    ((3, 2880, 1440), (1, 128, 128), False),
    ((3, 2880, 1440), (1, 128, 128), True),
    ((3, 2880, 1440), (1, None, 1), True),
    ((2, 7168, 512), (1, None, 1), True),
]


@pytest.mark.parametrize(
    ("shape", "block", "transposed", "dtype", "to", "special"),
    [
        (*case, FLOATS[(i + j) % 3], to, bool((i + j) % 4))
        for i, case in enumerate([*KERNELS, *MODELS])
        for j, to in enumerate(DTYPES)
    ],
)
def test_kernels_and_plain_jax(shape, block, transposed, dtype, to, special):
    array = jnp.asarray(draw(shape, jnp.dtype(dtype), special=special))
    quantize = functools.partial(moe.quantize, dtype=to, block=block, transposed=transposed)
    poison(2 * array.nbytes)
    kernel = jax.jit(functools.partial(quantize, implementation="triton"))
    found = kernel(array)
    for plain in (array, np.asarray(array)):  # on the GPU, and on the CPU
        where = on_cpu if plain is not array else lambda function, array: function(array)
        wanted = where(jax.jit(functools.partial(quantize, implementation="xla")), plain)
        jax.tree.map(assert_same_bits, found, wanted)
    for _ in range(3):
        jax.tree.map(assert_same_bits, kernel(array), found)


@pytest.mark.parametrize(
    ("shape", "block", "transposed", "implementation", "to"),
    [
        (*case, ("triton", "xla")[i % 2], DTYPES[i // 2 % 3])
        for i, case in enumerate([*KERNELS, *KERNELS])
    ],
)
def test_numpy_finds_the_same(shape, block, transposed, implementation, to):
    array = draw(shape, np.float32)
    found = moe.quantize(
        array, to, block=block, transposed=transposed, implementation=implementation
    )
    jax.tree.map(
        assert_same_bits, (found.values, found.scales), expected(array, to, block, transposed)
    )


@pytest.mark.parametrize("to", ["float8_e4m3fn"])
@pytest.mark.parametrize(("shape", "block", "transposed"), OTHERS)
def test_other_blocks(shape, block, transposed, to):
    array = draw(shape or (1,), np.float32).reshape(shape)
    found = moe.quantize(array, to, block=block, transposed=transposed)
    jax.tree.map(
        assert_same_bits, (found.values, found.scales), expected(array, to, block, transposed)
    )


@pytest.mark.parametrize("to", DTYPES)
def test_every_bfloat16_by_many_scales(to):
    """All numbers of 16 bits, each beside a largest one that makes another scale."""
    bits = np.arange(2**15, dtype=np.uint16).view(jnp.bfloat16).astype(np.float32)
    bits = np.sort(bits[np.isfinite(bits)]).reshape(-1, 128)
    rng = np.random.default_rng(0)
    with np.errstate(over="ignore"):
        largest = bits[:, -1:] * rng.uniform(1, 2**9, (len(bits), 1)).astype(np.float32)
    array = np.concatenate([bits, largest], axis=1)
    array[~np.isfinite(array)] = 3.4028235e38
    for implementation in ("triton", "xla"):
        found = moe.quantize(array, to, block=(1, None), implementation=implementation)
        jax.tree.map(assert_same_bits, (found.values, found.scales), expected(array, to, (1, None)))
