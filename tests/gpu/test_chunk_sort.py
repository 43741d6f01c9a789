"""The chunk sort's kernels on a GPU: against NumPy, at odd sizes and at full size."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.moe.draws import bits
from triax import moe
from triax.testing import assert_same_bits, poison

pytestmark = pytest.mark.gpu


def valid_case(seed, num_rows, num_chunks, fill=1.0):
    """Sizes that sum to `fill` of the rows, a permutation, and where rows come from and go."""
    rng = np.random.default_rng(seed)
    moved = int(num_rows * fill)
    sizes = np.bincount(rng.integers(0, num_chunks, moved), minlength=num_chunks)
    indices = rng.permutation(num_chunks)
    chunk_of_row = np.repeat(np.arange(num_chunks), sizes)
    forward = np.arange(num_rows)
    forward[:moved] = np.argsort(np.argsort(indices)[chunk_of_row], kind="stable")
    return sizes.astype(np.int32), indices.astype(np.int32), forward, np.argsort(forward)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _numbered(start, num_rows, width, dtype):
    """Rows whose elements tell their row and column."""
    row = start + jax.lax.broadcasted_iota(jnp.uint32, (num_rows, width), 0)
    column = jax.lax.broadcasted_iota(jnp.uint32, (num_rows, width), 1)
    mixed = (row * jnp.uint32(2654435761)) ^ (column * jnp.uint32(40503))
    mixed = mixed ^ (mixed >> 15)
    if dtype == "float32":
        return jax.lax.bitcast_convert_type(mixed, jnp.float32)
    return mixed.astype(dtype)


def assert_rows_on_device(actual, source, block=65536):
    """Row i of `actual`, made by `_numbered`, is row source[i]; compared in blocks on the GPU."""

    @jax.jit
    def same(part, source):
        row = source.astype(jnp.uint32)[:, None]
        column = jax.lax.broadcasted_iota(jnp.uint32, part.shape, 1)
        mixed = (row * jnp.uint32(2654435761)) ^ (column * jnp.uint32(40503))
        mixed = mixed ^ (mixed >> 15)
        if part.dtype == jnp.float32:
            return jnp.all(jax.lax.bitcast_convert_type(part, jnp.uint32) == mixed)
        return jnp.all(part == mixed.astype(part.dtype))

    for start in range(0, len(source), block):
        part = jax.lax.dynamic_slice_in_dim(actual, start, min(block, len(source) - start))
        assert same(part, source[start : start + block]), f"rows from {start}"


@pytest.mark.parametrize(
    ("num_rows", "width", "num_chunks", "dtype"),
    [(524288, 4096, 64, "float32"), (70001, 65537, 64, "uint8"), (2**22 + 1, 1031, 256, "uint8")],
    ids=["full size", "past 2**32 elements, wide", "past 2**32 elements, long"],
)
@pytest.mark.xdist_group("large")
def test_large(num_rows, width, num_chunks, dtype):
    sizes, indices, forward, back = valid_case(10, num_rows, num_chunks)
    x = _numbered(0, num_rows, width, dtype)
    poison(x.nbytes)
    rows = jax.jit(moe.sort_chunks_by_index)(x, sizes, indices).rows
    assert_rows_on_device(rows, forward)
    # Spot checks that trust nothing on the device.
    for row in (0, num_rows // 3, num_rows - 1):
        assert_same_bits(rows[row], np.asarray(x[int(forward[row])]))
    del rows
    # Its gradient is the inverse sort, and takes the same road as a function of g.
    if dtype == "float32":
        poison(x.nbytes)
        pull = jax.jit(
            lambda x, sizes, indices: jax.vjp(
                lambda x: moe.sort_chunks_by_index(x, sizes, indices).rows, x
            )[1](x)[0]
        )
        assert_rows_on_device(pull(x, sizes, indices), back)


def test_new_sizes_compile_nothing():
    from triax.compiling import compiler

    def run(num_rows, num_chunks):
        sizes, indices, forward, _ = valid_case(14, num_rows, num_chunks)
        x = bits(np.random.default_rng(15), (num_rows, 96), "float32")
        assert_same_bits(jax.jit(moe.sort_chunks_by_index)(x, sizes, indices).rows, x[forward])

    run(1, 1)
    before = compiler.compile_count()
    for num_rows in (2, 17, 4096, 4097):
        for num_chunks in (1, 2, 16, 1025):
            run(num_rows, num_chunks)
    assert compiler.compile_count() == before


def test_index_computed_in_the_same_program():
    """Indices that do not exist before the program runs, in a scan, under jit."""
    sizes, indices, forward, _ = valid_case(16, 600, 12)
    x = bits(np.random.default_rng(17), (600, 40), "float32")

    @jax.jit
    def program(x, sizes, ranks):
        def step(x, _):
            return moe.sort_chunks_by_index(x, sizes, jnp.argsort(ranks)).rows, None

        return jax.lax.scan(step, x, length=3)[0]

    expected = x
    # The same sizes each time: sizes are of the positions, whatever lies in them.
    for _ in range(3):
        expected = expected[forward]
    assert_same_bits(program(x, sizes, np.argsort(indices)), expected)
