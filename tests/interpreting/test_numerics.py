"""Arithmetic in narrow formats: bfloat16 rounds after each operation."""

import functools

import jax
import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl

from triax import triton_call
from triax.binding.launch import Result

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


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
