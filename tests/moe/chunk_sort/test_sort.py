"""The chunk sort against its definition: values, dtypes, sizes, gradients; every path."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from triax import moe
from triax.moe.chunk_sort import ops

FLOATS = ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
OTHERS = ["int8", "uint16", "int32", "bool"]

# Few shapes, so that plain JAX compiles few programs: no rows, one row, odd widths, no width,
# more rows than one program moves, more blocks than one in a row.
SHAPES = [(0, 3, 2), (1, 1, 1), (5, 3, 0), (7, 5, 3), (33, 1, 8), (17, 0, 4), (70, 67, 5)]


@functools.partial(jax.jit, static_argnames="implementation")
def sort_and_pull(x, sizes, indices, probs, g, g_probs, implementation):
    """The sort, and its gradient for the cotangents g."""

    def op(x, probs):
        out = moe.sort_chunks_by_index(x, sizes, indices, probs, implementation=implementation)
        return out.rows, out.probs

    moved, pull = jax.vjp(op, x, probs)
    return *moved, *pull((g, g_probs))


def check(oracle, case, implementation):
    rows, probs, d_x, d_probs = sort_and_pull(
        case.x, case.sizes, case.indices, case.probs, case.g, case.g_probs, implementation
    )
    forward = oracle.sources(case.sizes, case.indices, len(case.x))
    back = oracle.destinations(case.sizes, case.indices, len(case.x))
    oracle.assert_same_bits(rows, case.x[forward])
    oracle.assert_same_bits(probs, case.probs[forward])
    oracle.assert_same_bits(d_x, case.g[back])
    oracle.assert_same_bits(d_probs, case.g_probs[back])


def test_example(implementation):
    x = np.arange(6, dtype=np.float32)[:, None]
    sort = jax.jit(functools.partial(moe.sort_chunks_by_index, implementation=implementation))
    out = sort(x, np.array([2, 1, 2]), np.array([1, 0, 2]))
    assert isinstance(out, moe.Sorted)
    assert out.probs is None
    assert np.asarray(out.rows)[:, 0].tolist() == [2, 0, 1, 3, 4, 5]


@pytest.mark.sampled(1, 2)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@given(seed=st.integers(0, 2**32 - 1), fill=st.sampled_from([0.0, 0.5, 1.0]))
def test_equals_definition(oracle, shape, seed, fill):
    case = oracle.make_case(seed, *shape, fill=fill)
    for implementation in ("xla", "interpret"):
        check(oracle, case, implementation)


wrong_sizes = st.lists(
    st.one_of(st.integers(0, 6), st.sampled_from([-(2**31), -1, 20, 2**31 - 1])),
    min_size=6,
    max_size=6,
)
wrong_indices = st.lists(
    st.one_of(st.integers(-1, 6), st.sampled_from([-(2**31), 2**31 - 1])), min_size=6, max_size=6
)


# Named three times, past the last chunk, not at all, and cut off; a negative size; one too large.
@example(sizes=[3, 4, 2, 5, 1, 4], indices=[1, 1, 6, 0, 1, 3])
@example(sizes=[3, -4, 2, 5, 1, 2**31 - 1], indices=[5, -1, 3, 2**31 - 1, 1, 0])
@given(sizes=wrong_sizes, indices=wrong_indices)
def test_wrong_values_misplace_rows_as_told(oracle, sizes, indices):
    """The interpreter checks every access, so this is the proof that none goes outside."""
    case = oracle.make_case(1, 19, 3, 6)
    case.sizes, case.indices = np.array(sizes, np.int32), np.array(indices, np.int32)
    for implementation in ("xla", "interpret"):
        check(oracle, case, implementation)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [*FLOATS, "float64"])
def test_floats_move_bit_by_bit(oracle, dtype, implementation):
    with jax.enable_x64(dtype == "float64"):
        check(oracle, oracle.make_case(2, 70, 33, 5, jnp.dtype(dtype)), implementation)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", OTHERS)
def test_other_dtypes_move(oracle, dtype, implementation):
    """Rows that have no gradient do not keep the probs from theirs."""
    case = oracle.make_case(3, 70, 33, 5, dtype)

    @jax.jit
    def run(probs, g_probs):
        def op(probs):
            out = moe.sort_chunks_by_index(
                case.x, case.sizes, case.indices, probs, implementation=implementation
            )
            return out.probs, out.rows

        probs, pull, rows = jax.vjp(op, probs, has_aux=True)
        return probs, pull(g_probs)[0], rows

    probs, d_probs, rows = run(case.probs, case.g_probs)
    forward = oracle.sources(case.sizes, case.indices, len(case.x))
    oracle.assert_same_bits(rows, case.x[forward])
    oracle.assert_same_bits(probs, case.probs[forward])
    back = oracle.destinations(case.sizes, case.indices, len(case.x))
    oracle.assert_same_bits(d_probs, case.g_probs[back])


def test_integer_rows_as_a_primal(implementation):
    """A cotangent without elements (float0) comes in for the rows, and goes out for x."""
    x, probs = np.arange(3)[:, None], np.arange(3, dtype=np.float32)

    def loss(x, probs):
        out = moe.sort_chunks_by_index(
            x, np.array([1, 2]), np.array([1, 0]), probs, implementation=implementation
        )
        return jnp.sum(out.probs * np.array([1, 2, 4], np.float32))

    d_x, d_probs = jax.jit(jax.grad(loss, (0, 1), allow_int=True))(x, probs)
    assert d_x.dtype == jax.dtypes.float0
    assert d_probs.tolist() == [4, 1, 2]


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_probs_keep_their_dtype(oracle, dtype, implementation):
    case = oracle.make_case(4, 20, 3, 4)
    case.probs = case.probs.astype(jnp.dtype(dtype))
    case.g_probs = case.g_probs.astype(jnp.dtype(dtype))
    check(oracle, case, implementation)


@pytest.mark.parametrize("dtype", ["complex64", "int4"])
def test_dtypes_triton_lacks_go_through_plain_jax(oracle, dtype):
    case = oracle.make_case(5, 9, 2, 3)
    x = np.arange(18).reshape(9, 2).astype(jnp.dtype(dtype))
    rows = jax.jit(moe.sort_chunks_by_index)(x, case.sizes, case.indices).rows
    expected = x[oracle.sources(case.sizes, case.indices, 9)]
    np.testing.assert_array_equal(np.asarray(rows), expected)


@pytest.mark.sampled(2, 2)
@pytest.mark.parametrize("width", [1, 64, 4097, 5000])
def test_widths(oracle, width, implementation):
    """Narrow rows, and rows of several blocks, the last of them partly filled."""
    check(oracle, oracle.make_case(6, 9, width, 3), implementation)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("num_rows", "num_chunks"), [(5, 1023), (300, 1024), (5, 1025), (300, 3000)]
)
def test_many_chunks(oracle, num_rows, num_chunks, implementation):
    """More chunks than one load takes, and more chunks than rows."""
    check(oracle, oracle.make_case(7, num_rows, 2, num_chunks, fill=0.9), implementation)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("num_rows", "num_chunks"), [(40, 127), (40, 129), (20, 20000)])
def test_many_chunks_of_wide_rows(oracle, num_rows, num_chunks, implementation):
    """A program for each row, which looks at many chunks at a time."""
    check(oracle, oracle.make_case(8, num_rows, 600, num_chunks, fill=0.9), implementation)


def test_empty_chunks(oracle, implementation):
    case = oracle.make_case(8, 12, 3, 7)
    case.sizes = np.array([0, 0, 5, 0, 6, 0, 0], np.int32)
    case.indices = np.array([6, 4, 5, 0, 1, 2, 3], np.int32)
    check(oracle, case, implementation)


def test_no_rows_no_chunks_no_width(implementation):
    ids = lambda n: np.zeros(n, np.int32)
    for shape, chunks in [((0, 4), 3), ((4, 0), 3), ((3, 4), 0), ((0, 0), 0)]:
        x = np.ones(shape, np.float32)
        out = moe.sort_chunks_by_index(x, ids(chunks), ids(chunks), implementation=implementation)
        assert out.rows.shape == shape
        np.testing.assert_array_equal(out.rows, x)


def test_maps_of_sums_beyond_32_bits(implementation):
    """Of 2**30 rows that are named three times, the second and third time past the last row."""
    sizes, indices = jnp.full(3, 2**30), jnp.zeros(3, jnp.int32)
    maps = ops.chunk_maps(sizes, indices, num_rows=2**30, implementation=implementation)
    assert maps.forward.ends.tolist() == maps.inverse.ends.tolist() == [2**30] * 3
    assert maps.forward.shifts.tolist() == [0, -(2**30), -(2**30)]
    assert maps.inverse.shifts.tolist() == [0, 0, 0]


def test_inverse_permutation_is_the_way_back(oracle, implementation):
    case = oracle.make_case(9, 70, 5, 6)
    sort = jax.jit(functools.partial(moe.sort_chunks_by_index, implementation=implementation))
    there = sort(case.x, case.sizes, case.indices, case.probs)
    order = np.argsort(case.indices).astype(np.int32)
    back = sort(there.rows, case.sizes[case.indices], order, there.probs)
    oracle.assert_same_bits(back.rows, case.x)
    oracle.assert_same_bits(back.probs, case.probs)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ["int8", "uint32", "int64"])
def test_dtypes_of_sizes_and_indices(oracle, dtype, implementation):
    with jax.enable_x64(True):
        case = oracle.make_case(10, 300, 3, 6)
        case.sizes, case.indices = case.sizes.astype(dtype), case.indices.astype(dtype)
        check(oracle, case, implementation)
        case.sizes[1] = case.indices[2] = np.iinfo(dtype).max
        check(oracle, case, implementation)
        if np.dtype(dtype).itemsize == 8:
            case.sizes[1] = case.indices[2] = 2**32 + 1  # 1, to whoever looks at 32 bits
            check(oracle, case, implementation)


def test_default_is_by_platform(oracle):
    check(oracle, oracle.make_case(11, 19, 3, 6), None)


@pytest.mark.sampled(1)
def test_forward_mode_moves_the_tangents(oracle, implementation):
    """Of rows, of probs, and of probs beside rows of integers."""
    sizes, indices = np.int32([2, 0, 3]), np.int32([2, 0, 1])
    sort = lambda x, probs: moe.sort_chunks_by_index(
        x, sizes, indices, probs, implementation=implementation
    )
    x = np.arange(12, dtype=np.float32).reshape(6, 2)
    probs = np.arange(6, dtype=np.float32) / np.float32(7)
    moved = jax.jvp(jax.jit(sort), (x, probs), (np.sin(x), np.sin(probs)))[1]
    jax.tree.map(oracle.assert_same_bits, moved, jax.jit(sort)(np.sin(x), np.sin(probs)))
    alone = jax.jvp(jax.jit(lambda x: sort(x, probs)), (x,), (np.sin(x),))[1]
    oracle.assert_same_bits(alone.rows, moved.rows)
    assert not np.any(alone.probs)
    numbers = x.astype(np.int32)
    alone = jax.jvp(jax.jit(lambda probs: sort(numbers, probs)), (probs,), (np.sin(probs),))[1]
    assert alone.rows.dtype == jax.dtypes.float0
    oracle.assert_same_bits(alone.probs, moved.probs)
