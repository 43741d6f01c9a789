"""Tensor descriptors, of the host and made in the kernel."""

import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl

from triax.binding.launch import Result

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)


@triton.jit
def add_one(x, o, BM: tl.constexpr, BN: tl.constexpr):
    i, j = tl.program_id(0) * BM, tl.program_id(1) * BN
    o.store([i, j], x.load([i, j]) + 1)


@triton.jit
def load_block(x, o_ptr, BM: tl.constexpr, BN: tl.constexpr):
    at = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    tl.store(o_ptr + at, x.load([0, 0]))


@triton.jit
def move(x_ptr, o_ptr, m, n, i, j, BM: tl.constexpr, BN: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [m, n], [n, 1], [BM, BN])
    o = tl.make_tensor_descriptor(o_ptr, [m, n], [n, 1], [BM, BN])
    o.store([i, j], x.load([i, j]))


@triton.jit
def move_rows(x_ptr, rows_ptr, o_ptr, m, n, j, BN: tl.constexpr, ROWS: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [m, n], [n, 1], [1, BN])
    o = tl.make_tensor_descriptor(o_ptr, [m, n], [n, 1], [1, BN])
    rows = tl.load(rows_ptr + tl.arange(0, ROWS))
    o.scatter(x.gather(rows, j), rows, j)


@triton.jit
def combine(x_ptr, o_ptr, m, n, i, j, OP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [m, n], [n, 1], [BM, BN])
    o = tl.make_tensor_descriptor(o_ptr, [m, n], [n, 1], [BM, BN])
    value = x.load([i, j])
    if OP == "add":
        o.atomic_add([i, j], value)
    elif OP == "min":
        o.atomic_min([i, j], value)
    elif OP == "max":
        o.atomic_max([i, j], value)
    elif OP == "xor":
        o.atomic_xor([i, j], value)


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16, np.int8], ids=str)
def test_descriptors_of_the_host(interpret, rng, host_descriptor, dtype):
    x = rng.integers(-9, 9, (20, 48)).astype(dtype)
    arguments = {
        "x": host_descriptor(x, (16, 32)),
        "o": host_descriptor(np.zeros((20, 48), dtype), (16, 32)),
    }
    (out,) = interpret(
        add_one, arguments, [((20, 48), dtype)], aliases={1: 0}, grid=(2, 2, 1), BM=16, BN=32
    )
    np.testing.assert_array_equal(out, x + np.ones((), dtype))


@pytest.mark.parametrize("dtype", [np.float32, E5M2], ids=str)
@pytest.mark.parametrize(("padding", "fill"), [("zero", 0), ("nan", np.nan)])
def test_padding(interpret, host_descriptor, dtype, padding, fill):
    x = np.ones((4, 16), dtype)
    arguments = {"x": host_descriptor(x, (8, 16), padding), "o_ptr": Result(0)}
    (out,) = interpret(load_block, arguments, [((8, 16), dtype)], BM=8, BN=16)
    np.testing.assert_array_equal(out[:4], x)
    np.testing.assert_array_equal(out[4:].astype(np.float32), np.full((4, 16), fill))


@pytest.mark.parametrize(("i", "j"), [(0, 0), (3, 5), (-2, -3), (17, 45)])
def test_blocks_begin_at_any_element(agree, rng, i, j):
    x = rng.normal(size=(20, 48)).astype(np.float32)
    inside = np.zeros((20, 48), bool)
    inside[max(i, 0) : i + 8, max(j, 0) : j + 16] = True
    arguments = {"x_ptr": x, "o_ptr": Result(0), "m": 20, "n": 48, "i": i, "j": j}
    (out,) = agree(move, arguments, [((20, 48), np.float32)], zeroed=(0,), BM=8, BN=16)
    np.testing.assert_array_equal(out, np.where(inside, x, 0))


def test_rows(interpret, rng):  # for GPUs from sm_100 on
    x = rng.normal(size=(20, 48)).astype(np.float32)
    rows = np.array([3, 1, 7, 19, 25, 0, 5, 6], np.int32)
    arguments = {"x_ptr": x, "rows_ptr": rows, "o_ptr": Result(0), "m": 20, "n": 48, "j": 3}
    (out,) = interpret(move_rows, arguments, [((20, 48), np.float32)], zeroed=(0,), BN=16, ROWS=8)
    expected = np.zeros((20, 48), np.float32)
    rows = rows[rows < 20]
    expected[rows, 3:19] = x[rows, 3:19]
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    ("op", "function", "dtype"),
    [
        ("add", np.add, np.int32),
        ("add", np.add, BFLOAT16),
        ("min", np.minimum, np.uint32),
        ("max", np.maximum, np.int32),
        ("xor", np.bitwise_xor, np.int32),
    ],
)
def test_atomics_on_blocks(agree, rng, op, function, dtype):
    x, o = (rng.integers(-100, 100, (20, 48)).astype(dtype) for _ in range(2))
    arguments = {"x_ptr": x, "o_ptr": o, "m": 20, "n": 48, "i": 14, "j": 2}
    (out,) = agree(combine, arguments, [((20, 48), dtype)], aliases={1: 0}, OP=op, BM=8, BN=16)
    block = np.s_[14:20, 2:18]
    o[block] = function(o[block], x[block])
    np.testing.assert_array_equal(out, o)
