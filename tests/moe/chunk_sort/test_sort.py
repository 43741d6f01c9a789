"""What `tests/moe/test_cases.py` does not see of the chunk sort."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from triax import moe
from triax.moe.chunk_sort import ops


@pytest.fixture(params=["xla", "interpret"])
def implementation(request):
    return request.param


def test_example(implementation):
    x = np.arange(6, dtype=np.float32)[:, None]
    sort = jax.jit(functools.partial(moe.sort_chunks_by_index, implementation=implementation))
    out = sort(x, np.array([2, 1, 2]), np.array([1, 0, 2]))
    assert isinstance(out, moe.Sorted)
    assert out.probs is None
    assert np.asarray(out.rows)[:, 0].tolist() == [2, 0, 1, 3, 4, 5]


@pytest.mark.parametrize("dtype", ["complex64", "int4"])
def test_dtypes_triton_lacks_go_through_plain_jax(dtype):
    x = np.arange(18).reshape(9, 2).astype(jnp.dtype(dtype))
    rows = jax.jit(moe.sort_chunks_by_index)(x, np.array([4, 0, 3]), np.array([2, 0, 1])).rows
    np.testing.assert_array_equal(np.asarray(rows), x[[4, 5, 6, 0, 1, 2, 3, 7, 8]])


def test_maps_of_sums_beyond_32_bits(implementation):
    """Of 2**30 rows that are named three times, the second and third time past the last row."""
    sizes, indices = jnp.full(3, 2**30), jnp.zeros(3, jnp.int32)
    maps = ops.chunk_maps(sizes, indices, num_rows=2**30, implementation=implementation)
    assert maps.forward.ends.tolist() == maps.inverse.ends.tolist() == [2**30] * 3
    assert maps.forward.shifts.tolist() == [0, -(2**30), -(2**30)]
    assert maps.inverse.shifts.tolist() == [0, 0, 0]


def test_the_transpose_of_the_gradient_sorts_again():
    sort = lambda x: moe.sort_chunks_by_index(x, np.array([2, 1, 2]), np.array([2, 0, 1])).rows
    x = jnp.arange(6, dtype=jnp.float32)[:, None]
    back = lambda gradient: jax.vjp(sort, x)[1](gradient)[0]
    np.testing.assert_array_equal(jax.vjp(back, x)[1](x)[0], sort(x))
