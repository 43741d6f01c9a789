"""The chunk sort's kernels on a GPU: against NumPy, at odd sizes and at full size."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.gpu.references import on_cpu
from tests.moe import oracle
from triax import moe
from triax.testing import assert_same_bits, poison

pytestmark = pytest.mark.gpu

DTYPES = [
    "float32",
    "bfloat16",
    "float16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int8",
    "int16",
    "int32",
    "uint8",
    "uint32",
    "bool",
]
# Rows, width, chunks: around the blocks of rows and width, no width, more chunks than one load.
SHAPES = [
    (1, 1, 1),
    (17, 33, 5),
    (1000, 64, 67),
    (1025, 1, 8),
    (300, 4097, 16),
    (511, 2880, 64),
    (257, 7168, 1025),
    (4097, 7, 3000),
    (100, 0, 9),
]


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


def random_bits(seed, shape, dtype):
    return oracle.random_bits(np.random.default_rng(seed), shape, dtype)


@functools.partial(jax.jit, static_argnames="implementation")
def sort_and_pull(x, sizes, indices, probs, g, g_probs, implementation=None):
    def op(x, probs):
        out = moe.sort_chunks_by_index(x, sizes, indices, probs, implementation=implementation)
        return out.rows, out.probs

    moved, pull = jax.vjp(op, x, probs)
    return *moved, *pull((g, g_probs))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("fill", [1.0, 0.7])
def test_equals_numpy(shape, fill):
    num_rows, width, num_chunks = shape
    sizes, indices, forward, back = valid_case(1, num_rows, num_chunks, fill)
    x = random_bits(2, (num_rows, width), "float32")
    g = random_bits(3, (num_rows, width), "float32")
    probs = random_bits(4, (num_rows,), "float32")
    g_probs = random_bits(5, (num_rows,), "float32")
    poison(64 << 20)
    rows, moved_probs, d_x, d_probs = sort_and_pull(x, sizes, indices, probs, g, g_probs)
    assert_same_bits(rows, x[forward])
    assert_same_bits(moved_probs, probs[forward])
    assert_same_bits(d_x, g[back])
    assert_same_bits(d_probs, g_probs[back])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [128, 67])
def test_dtypes(dtype, width):
    sizes, indices, forward, _ = valid_case(6, 301, 9)
    x = random_bits(7, (301, width), dtype)
    poison(64 << 20)
    rows = jax.jit(moe.sort_chunks_by_index)(x, sizes, indices).rows
    assert_same_bits(rows, x[forward])


def test_wrong_values_do_what_plain_jax_does():
    """Bad sizes and indices misplace rows, the same everywhere, and touch nothing outside."""
    x = random_bits(8, (301, 67), "float32")
    probs = random_bits(9, (301,), "float32")
    for seed in range(12):
        rng = np.random.default_rng(seed)
        num_chunks = int(rng.integers(1, 1500))
        sizes = rng.integers(-20, 60, num_chunks).astype(np.int32)
        indices = rng.integers(-2, num_chunks + 2, num_chunks).astype(np.int32)
        wild = rng.integers(0, num_chunks, 3)
        sizes[wild] = rng.choice([2**31 - 1, -(2**31), 10**9], 3)
        indices[rng.integers(0, num_chunks, 3)] = rng.choice([2**31 - 1, -(2**31), 10**6], 3)
        args = (x, sizes, indices, probs, x, probs)
        for actual, expected in zip(
            sort_and_pull(*args, implementation="triton"),
            on_cpu(sort_and_pull, *args, implementation="xla"),
            strict=True,
        ):
            assert_same_bits(actual, expected)


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


def test_every_run_gives_the_same_bits():
    sizes, indices, _, _ = valid_case(11, 5000, 700)
    indices = np.random.default_rng(0).integers(0, 700, 700).astype(np.int32)  # duplicates
    x = random_bits(12, (5000, 64), "float32")
    probs = random_bits(13, (5000,), "float32")
    first = sort_and_pull(x, sizes, indices, probs, x, probs)
    for _ in range(20):
        again = sort_and_pull(x, sizes, indices, probs, x, probs)
        for actual, expected in zip(again, first, strict=True):
            assert_same_bits(actual, expected)


def test_new_sizes_compile_nothing():
    from triax.compiling import compiler

    def run(num_rows, num_chunks):
        sizes, indices, forward, _ = valid_case(14, num_rows, num_chunks)
        x = random_bits(15, (num_rows, 96), "float32")
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
    x = random_bits(17, (600, 40), "float32")

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
