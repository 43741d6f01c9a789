"""Arithmetic in narrow formats: bfloat16 rounds after each operation, float8 saturates."""

import functools

import jax
import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from triax import triton_call
from triax.binding.launch import Result

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8 = {
    tl.float8e4nv: np.dtype(ml_dtypes.float8_e4m3fn),
    tl.float8e5: np.dtype(ml_dtypes.float8_e5m2),
}


@triton.jit
def arithmetic(x_ptr, y_ptr, o_ptr, N: tl.constexpr, OP: tl.constexpr):
    at = tl.arange(0, N)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    if OP == "add":
        z = x + y
    elif OP == "sub":
        z = x - y
    elif OP == "mul":
        z = x * y
    elif OP == "scaled":
        z = x * 3 - 0.5
    elif OP == "abs":
        z = tl.abs(x)
    elif OP == "max":
        z = tl.maximum(x, y)
    elif OP == "neg":
        z = -x
    elif OP == "where":
        z = tl.where(x < y, x, y)
    tl.store(o_ptr + at, z)


@triton.jit
def convert(x_ptr, o_ptr, n, N: tl.constexpr, DTYPE: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(o_ptr + at, tl.load(x_ptr + at, mask=at < n).to(DTYPE), mask=at < n)


@triton.jit
def constants(o_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(o_ptr + at, tl.full([N], 1.1, tl.bfloat16) + tl.zeros([N], tl.bfloat16))
    tl.store(o_ptr + N + at, 2.7)


@triton.jit
def one_bit(x_ptr, y_ptr, o_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    tl.store(o_ptr + at, x & ~y)
    tl.store(o_ptr + N + at, (x ^ y) | (x & y))
    tl.store(o_ptr + 2 * N + at, x == y)


@triton.jit
def integers(x_ptr, y_ptr, o_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    tl.store(o_ptr + at, x // y)
    tl.store(o_ptr + N + at, x % y)
    tl.store(o_ptr + 2 * N + at, x >> 2)
    tl.store(o_ptr + 3 * N + at, ~x)
    tl.store(o_ptr + 4 * N + at, x * 1000003)


OPERATIONS = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "scaled": lambda x, y: (x * 3).astype(BFLOAT16).astype(np.float32) - 0.5,
    "abs": lambda x, y: abs(x),
    "max": np.maximum,
    "neg": lambda x, y: -x,
    "where": np.minimum,
}


@pytest.mark.parametrize("op", OPERATIONS)
def test_bfloat16_rounds_after_each_operation(interpret, rng, op):
    x, y = rng.normal(size=(2, 256)).astype(BFLOAT16)
    arguments = {"x_ptr": x, "y_ptr": y, "o_ptr": Result(0)}
    (out,) = interpret(arithmetic, arguments, [((256,), BFLOAT16)], N=256, OP=op)
    expected = OPERATIONS[op](x.astype(np.float32), y.astype(np.float32)).astype(BFLOAT16)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("source", [np.float64, np.float32, np.float16, np.int32], ids=str)
def test_conversion_to_bfloat16_rounds_to_nearest(interpret, rng, source):
    x = (rng.normal(size=300) * 1000).astype(source)
    arguments = {"x_ptr": x, "o_ptr": Result(0), "n": 300}
    (out,) = interpret(convert, arguments, [((300,), BFLOAT16)], N=512, DTYPE=tl.bfloat16)
    np.testing.assert_array_equal(out, x.astype(np.float32).astype(BFLOAT16))
    assert (np.abs(out.astype(np.float64)) > np.abs(x)).any()  # truncation would never round up


@pytest.mark.parametrize("target", [tl.float64, tl.float32, tl.float16, tl.int32], ids=str)
def test_conversion_from_bfloat16(interpret, rng, target):
    x = (rng.normal(size=300) * 100).astype(BFLOAT16)
    dtype = {tl.float64: np.float64, tl.float32: np.float32, tl.float16: np.float16}.get(
        target, np.int32
    )
    arguments = {"x_ptr": x, "o_ptr": Result(0), "n": 300}
    (out,) = interpret(convert, arguments, [((300,), dtype)], N=512, DTYPE=target)
    np.testing.assert_array_equal(out, x.astype(np.float32).astype(dtype))


@given(values=st.lists(st.floats(width=32), min_size=1, max_size=16))
@settings(max_examples=100)
def test_conversion_to_bfloat16_of_any_float(interpret, values):
    x = np.array(values, np.float32)
    arguments = {"x_ptr": x, "o_ptr": Result(0), "n": x.size}
    (out,) = interpret(convert, arguments, [(x.shape, BFLOAT16)], N=16, DTYPE=tl.bfloat16)
    with np.errstate(over="ignore"):
        expected = x.astype(BFLOAT16)
    np.testing.assert_array_equal(out.astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("format", FLOAT8, ids=str)
@pytest.mark.parametrize("source", [np.float32, np.float16, BFLOAT16], ids=str)
def test_conversion_to_float8_rounds_and_saturates(interpret, rng, format, source):
    x = np.concatenate([rng.normal(size=290), [0, -0.0, 1e9, -1e9, np.inf, -np.inf, np.nan, 1e-3]])
    with np.errstate(over="ignore"):
        x = x.astype(source)
    arguments = {"x_ptr": x, "o_ptr": Result(0), "n": x.size}
    (out,) = interpret(convert, arguments, [(x.shape, FLOAT8[format])], N=512, DTYPE=format)
    limit = float(ml_dtypes.finfo(FLOAT8[format]).max)
    expected = np.clip(x.astype(np.float32), -limit, limit).astype(FLOAT8[format])
    np.testing.assert_array_equal(out.astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("format", FLOAT8, ids=str)
@pytest.mark.parametrize(("target", "dtype"), [(tl.float32, np.float32), (tl.bfloat16, BFLOAT16)])
def test_conversion_from_float8_is_exact(interpret, format, target, dtype):
    x = np.arange(256, dtype=np.uint8).view(FLOAT8[format])
    arguments = {"x_ptr": x, "o_ptr": Result(0), "n": 256}
    (out,) = interpret(convert, arguments, [((256,), dtype)], N=256, DTYPE=target)
    np.testing.assert_array_equal(out.astype(np.float32), x.astype(np.float32))


def test_bfloat16_constants(interpret):
    (out,) = interpret(constants, {"o_ptr": Result(0)}, [((32,), BFLOAT16)], N=16)
    expected = np.array([1.1] * 16 + [2.7] * 16, np.float32).astype(BFLOAT16)
    np.testing.assert_array_equal(out, expected)


def test_booleans(interpret):
    x, y = np.array([0, 0, 1, 1], bool), np.array([0, 1, 0, 1], bool)
    arguments = {"x_ptr": x, "y_ptr": y, "o_ptr": Result(0)}
    (out,) = interpret(one_bit, arguments, [((3, 4), np.bool_)], N=4)
    np.testing.assert_array_equal(out, [x & ~y, x | y, x == y])


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64], ids=str)
def test_integer_arithmetic_is_that_of_c(interpret, rng, dtype):
    low = 0 if np.dtype(dtype).kind == "u" else -1000
    x, y = rng.integers(low, 1000, 64).astype(dtype), rng.integers(1, 30, 64).astype(dtype)
    arguments = {"x_ptr": x, "y_ptr": y, "o_ptr": Result(0)}
    (out,) = interpret(integers, arguments, [((5, 64), dtype)], N=64)
    wide_x, wide_y = x.astype(np.int64), y.astype(np.int64)
    quotient = np.sign(wide_x) * (np.abs(wide_x) // wide_y)
    expected = [quotient, wide_x - quotient * wide_y, wide_x >> 2, ~wide_x, wide_x * 1000003]
    np.testing.assert_array_equal(out, np.array(expected).astype(dtype))


@triton.jit
def doubled(x_ptr, o_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(o_ptr + at, 2 * tl.load(x_ptr + at))


def test_subnormals_are_no_zeros():
    """As on GPUs; in XLA's threads on CPUs, which run callbacks, they are."""
    x = np.array([1e-40, -1e-45, 3e-39, 1.0], np.float32)
    run = functools.partial(
        triton_call, kernel=doubled, out_type=x, grid=1, implementation="interpret", N=4
    )
    for call in (run, jax.jit(run)):
        np.testing.assert_array_equal(call(x), 2 * x)
    # XLA's own arithmetic afterwards is what it was.
    mixed = jax.jit(lambda x: (x * 4, run(x), x * 4))
    first, _, last = mixed(x)
    np.testing.assert_array_equal(first, last)
