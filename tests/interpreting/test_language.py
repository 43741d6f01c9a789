"""The language: helpers, closures, control flow, reductions, scans, dots, random numbers."""

import math
import re

import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl
from triton.language import associative_scan, store
from triton.language import static_range as unrolled
from triton.runtime import interpreter as stock

from triax.binding.launch import Result
from triax.compat import triton_interpreter as compat
from triax.errors import OutOfBounds, UnsupportedError
from triax.interpreting.builder import Builder

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
HAS_BLOCK_POINTERS = hasattr(stock.InterpreterBuilder, "create_make_block_ptr")
FACTOR = tl.constexpr(3)


@triton.jit
def rows(x_ptr, m, n, M: tl.constexpr, N: tl.constexpr):
    i, j = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    return tl.load(x_ptr + i * n + j, mask=(i < m) & (j < n), other=0.0)


@triton.jit
def put_rows(o_ptr, value, m, n, M: tl.constexpr, N: tl.constexpr):
    i, j = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    tl.store(o_ptr + i * n + j, value, mask=(i < m) & (j < n))


@triton.jit
def rowwise(x_ptr, o_ptr, m, n, OP: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    x = rows(x_ptr, m, n, M, N)
    i = tl.arange(0, M)
    if OP == "sum":
        y = tl.sum(x, axis=1)
    elif OP == "method":
        y = x.sum(axis=1)
    elif OP == "max":
        y = tl.max(x, axis=-1)
    elif OP == "min":
        y = tl.min(x, axis=1)
    elif OP == "argmax":
        y = tl.argmax(x, axis=1)
    elif OP == "argmin":
        y = tl.argmin(x, axis=1)
    else:
        y = tl.reduce(x, 1, product)
    tl.store(o_ptr + i, y, mask=i < m)


@triton.jit
def product(a, b):
    return a * b


@triton.jit
def softmax(x_ptr, o_ptr, m, n, M: tl.constexpr, N: tl.constexpr):
    x = rows(x_ptr, m, n, M, N)
    x = tl.where(tl.arange(0, N)[None, :] < n, x, float("-inf"))
    top = tl.max(x, axis=1, keep_dims=True)
    weights = tl.exp(x - top)
    put_rows(o_ptr, weights / tl.sum(weights, axis=1, keep_dims=True), m, n, M, N)


@triton.jit
def library_softmax(x_ptr, o_ptr, m, n, M: tl.constexpr, N: tl.constexpr):
    put_rows(o_ptr, tl.softmax(rows(x_ptr, m, n, M, N)), m, n, M, N)


@triton.jit
def scan(x_ptr, o_ptr, m, n, OP: tl.constexpr, AXIS: tl.constexpr, REVERSE: tl.constexpr,
         M: tl.constexpr, N: tl.constexpr):  # fmt: skip
    x = rows(x_ptr, m, n, M, N)
    if OP == "sum":
        y = tl.cumsum(x, axis=AXIS, reverse=REVERSE)
    elif OP == "product":
        y = tl.cumprod(x + 1, axis=AXIS, reverse=REVERSE)
    else:
        y = associative_scan(x, AXIS, larger, REVERSE)
    put_rows(o_ptr, y, m, n, M, N)


@triton.jit
def sum_over_all(x_ptr, o_ptr, M: tl.constexpr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    at = tl.arange(0, 1)
    total = tl.trans(tl.sum(x, keep_dims=True))  # refuses fewer than two dimensions
    tl.store(o_ptr + at[:, None] + at[None, :], total)


@triton.jit
def positive(a, b):
    if a > b:
        return a
    else:
        return 0


@triton.jit
def reduce_to_a_number(x_ptr, o_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.store(o_ptr, tl.reduce(x, 0, positive))


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def affine(a1, b1, a2, b2):
    return a1 * a2, b1 * a2 + b2


@triton.jit
def recurrence(a_ptr, b_ptr, o_ptr, n, N: tl.constexpr):
    at = tl.arange(0, N)
    a = tl.load(a_ptr + at, mask=at < n, other=1.0)
    b = tl.load(b_ptr + at, mask=at < n, other=0.0)
    _, y = tl.associative_scan((a, b), 0, affine)
    total_a, total_b = tl.reduce((a, b), 0, affine)
    tl.store(o_ptr + at, y, mask=at < n)
    tl.store(o_ptr + n, total_a)
    tl.store(o_ptr + n + 1, total_b)


@triton.jit
def branching(a, b):
    if a > b:
        return a
    return b


@triton.jit
def reduce_branching(x_ptr, o_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.store(o_ptr, tl.reduce(x, 0, branching))
    tl.store(o_ptr + 1 + tl.arange(0, N), tl.associative_scan(x, 0, branching))


@triton.jit
def sort(x_ptr, o_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(o_ptr + at, tl.sort(tl.load(x_ptr + at)))


@triton.jit
def dot(x_ptr, y_ptr, o_ptr, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    i, j, r = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, k, K):
        at = start + r
        x = tl.load(x_ptr + i * k + at[None, :], mask=(i < m) & (at < k)[None, :], other=0.0)
        y = tl.load(y_ptr + at[:, None] * n + j, mask=(at < k)[:, None] & (j < n), other=0.0)
        total = tl.dot(x, y, total)
    put_rows(o_ptr, total, m, n, M, N)


@triton.jit
def loops(o_ptr, n):
    total = 0
    for i in range(n):
        total += i.to(tl.int64) * FACTOR
    for i in tl.range(0, n, 2, num_stages=2):
        total += i
    for i in unrolled(4):
        total += i
    i = 0
    while i < n:
        i += 3
    for j in range(n, 0, -1):
        total += j
    store(o_ptr, total)
    store(o_ptr + 1, i)
    store(o_ptr + 2, min(total, 5) + max(n, 100))


@triton.jit
def random(o_ptr, seed, n, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(o_ptr + at, tl.rand(seed, at), mask=at < n)


@triton.jit
def checked(x_ptr, o_ptr, n, N: tl.constexpr):
    tl.static_assert(N >= 16, "N is too small")
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    tl.device_assert((x >= 0) | (at >= n), "x is negative")
    tl.device_print("first", tl.max(x, 0))
    tl.store(o_ptr + at, tl.sqrt(x), mask=at < n)


@triton.jit
def block_condition(x_ptr, o_ptr):
    if tl.load(x_ptr + tl.arange(0, 16)) > 0:
        tl.store(o_ptr, 1)


@triton.jit
def logic(x_ptr, o_ptr, FLAG: tl.constexpr):
    at = tl.arange(0, 16)
    x = tl.load(x_ptr + at)
    y = -1
    if FLAG and not (x_ptr is None):  # noqa: E714
        inside = FLAG and (x > 0) and (x < 1)
        outside = (x < 0) or (x > 1)
        y = inside * 1 + outside * 2 + (not (x > 0)) * 4
    tl.store(o_ptr + at, y)


@triton.jit
def inline_asm(o_ptr):
    x = tl.inline_asm_elementwise("mov.u32 $0, 1;", "=r", [], tl.int32, True, 1)
    tl.store(o_ptr, x)


@triton.jit
def block_pointers(x_ptr, o_ptr, m, n, BM: tl.constexpr, BN: tl.constexpr):
    x = tl.make_block_ptr(x_ptr, (m, n), (n, 1), (tl.program_id(0) * BM, 0), (BM, BN), (1, 0))
    o = tl.make_block_ptr(o_ptr, (m, n), (n, 1), (tl.program_id(0) * BM, 0), (BM, BN), (1, 0))
    for _ in range(0, n, BN):
        block = tl.load(x, boundary_check=(0, 1), padding_option="zero")
        tl.store(o, block * 2, boundary_check=(0, 1))
        x, o = tl.advance(x, (0, BN)), tl.advance(o, (0, BN))


@triton.jit
def leaky_block_pointer(x_ptr, o_ptr, n, N: tl.constexpr):
    x = tl.make_block_ptr(x_ptr, (n,), (1,), (0,), (N,), (0,))
    tl.store(o_ptr + tl.arange(0, N), tl.load(x))


@triton.jit
def no_numbers(x_ptr, o_ptr):
    x = tl.load(x_ptr + tl.arange(0, 4))
    y = tl.load(x_ptr + 4 + tl.arange(0, 4))
    tl.store(o_ptr + tl.arange(0, 4), tl.maximum(x, y))
    tl.store(o_ptr + 4 + tl.arange(0, 4), tl.log(x) + tl.exp(y * 1e5) / (x - x))
    tl.store(o_ptr + 8, tl.max(x, 0))
    tl.store(o_ptr + 9, tl.argmax(x * float("nan"), 0))
    tl.store(o_ptr + 10 + tl.arange(0, 4), (y * 1e30).to(tl.int32))


@triton.jit
def steps(x):
    if x > 1:
        y = x * 2
    else:
        y = x - 1
    return y


@triton.jit
def mapped(x_ptr, o_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(o_ptr + at, tl.map_elementwise(steps, tl.load(x_ptr + at)))
    tl.store(o_ptr + N + at, tl.map_elementwise(product, tl.load(x_ptr + at), 3.0 + at))


@triton.jit
def shapes(x_ptr, o_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    tl.store(o_ptr + at, tl.flip(x, 0))
    tl.store(o_ptr + N + at, tl.gather(x, (at * 3) % N, 0))
    tl.store(o_ptr + 2 * N + at, tl.reshape(tl.trans(tl.reshape(x, [4, N // 4])), [N]))
    even, odd = tl.split(tl.reshape(x, [N // 2, 2]))
    tl.store(o_ptr + 3 * N + at, tl.reshape(tl.join(odd, even), [N]))
    tl.store(o_ptr + 4 * N + at, tl.histogram((x * 10).to(tl.int32), N))
    tl.store(o_ptr + 5 * N + at, tl.broadcast_to(tl.sum(x, 0), [N]))


@triton.jit
def gather(x_ptr, index_ptr, o_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.reshape(tl.load(x_ptr + at), [2, N // 2])
    index = tl.reshape(tl.load(index_ptr + at), [2, N // 2])
    tl.store(o_ptr + at, tl.reshape(tl.gather(x, index, 1), [N]))


@triton.jit
def histogram(x_ptr, o_ptr, n, N: tl.constexpr, BINS: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(o_ptr + tl.arange(0, BINS), tl.histogram(tl.load(x_ptr + at), BINS, mask=at < n))


@triton.jit
def high_half(x_ptr, y_ptr, o_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(o_ptr + at, tl.umulhi(tl.load(x_ptr + at), tl.load(y_ptr + at)))


def matrix(rng, m, n, dtype=np.float32):
    return rng.normal(size=(m, n)).astype(dtype)


REFERENCES = {
    "sum": lambda x: x.sum(1),
    "method": lambda x: x.sum(1),
    "max": lambda x: x.max(1),
    "min": lambda x: x.min(1),
    "argmax": lambda x: x.argmax(1),
    "argmin": lambda x: x.argmin(1),
    "product": lambda x: x.prod(1),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16, np.int32], ids=str)
@pytest.mark.parametrize("op", REFERENCES)
def test_reductions(interpret, rng, op, dtype):
    m, n = 5, 32
    values = [1, -1, 1, 2, 1] if op == "product" else range(-9, 9)
    x = rng.choice(values, (m, n)).astype(dtype)
    index = op.startswith("arg")
    arguments = {"x_ptr": x, "o_ptr": Result(0), "m": m, "n": n}
    outputs = [((m,), np.int32 if index else dtype)]
    (out,) = interpret(rowwise, arguments, outputs, OP=op, M=8, N=32)
    # Sums and products of these values are exact in every dtype.
    expected = REFERENCES[op](x.astype(np.float64))
    np.testing.assert_array_equal(out.astype(np.float64), expected)


def test_a_long_bfloat16_sum_does_not_stall(interpret):
    x = np.ones((1, 1024), BFLOAT16)  # one by one, it would stop growing at 256
    arguments = {"x_ptr": x, "o_ptr": Result(0), "m": 1, "n": 1024}
    (out,) = interpret(rowwise, arguments, [((1,), BFLOAT16)], OP="sum", M=1, N=1024)
    assert float(out[0]) == 1024


@pytest.mark.parametrize("kernel", [softmax, library_softmax])
def test_softmax(interpret, rng, kernel):
    m, n = (5, 27) if kernel is softmax else (16, 16)
    x = matrix(rng, m, n)
    arguments = {"x_ptr": x, "o_ptr": Result(0), "m": m, "n": n}
    sizes = {"M": 8, "N": 32} if kernel is softmax else {"M": 16, "N": 16}
    (out,) = interpret(kernel, arguments, [((m, n), np.float32)], **sizes)
    axis = 1 if kernel is softmax else 0  # tl.softmax without `dim` takes the first axis
    wide = np.exp(x.astype(np.float64) - x.max(axis, keepdims=True))
    np.testing.assert_allclose(out, wide / wide.sum(axis, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=str)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("op", ["sum", "product", "max"])
def test_scans(interpret, rng, op, axis, reverse, dtype):
    m, n = 8, 16
    x = rng.integers(0, 2, (m, n)).astype(dtype)
    arguments = {"x_ptr": x, "o_ptr": Result(0), "m": m, "n": n}
    (out,) = interpret(
        scan, arguments, [((m, n), dtype)], OP=op, AXIS=axis, REVERSE=reverse, M=m, N=n
    )
    wide = x.astype(np.float64)
    wide = np.flip(wide, axis) if reverse else wide
    if op == "max":
        expected = np.maximum.accumulate(wide, axis)
    else:
        expected = np.cumsum(wide, axis) if op == "sum" else np.cumprod(wide + 1, axis)
    expected = np.flip(expected, axis) if reverse else expected
    np.testing.assert_array_equal(out.astype(np.float64), expected)


def test_scan_and_reduction_with_a_combine_function_of_pairs(interpret, rng):
    n = 23
    a, b = rng.uniform(0.5, 1.5, (2, n)).astype(np.float32)
    arguments = {"a_ptr": a, "b_ptr": b, "o_ptr": Result(0), "n": n}
    (out,) = interpret(recurrence, arguments, [((n + 2,), np.float32)], N=32)
    state, expected = 0.0, []
    for ai, bi in zip(a.astype(np.float64), b.astype(np.float64), strict=True):
        state = state * ai + bi
        expected.append(state)
    expected += [math.prod(a.astype(np.float64)), state]
    np.testing.assert_allclose(out, expected, rtol=1e-5)


def test_combine_functions_with_control_flow(interpret, rng):
    x = rng.normal(size=16).astype(np.float32)
    arguments = {"x_ptr": x, "o_ptr": Result(0)}
    (out,) = interpret(reduce_branching, arguments, [((17,), np.float32)], N=16)
    np.testing.assert_array_equal(out, [x.max(), *np.maximum.accumulate(x)])


def test_a_sum_over_all_axes_keeps_them(interpret):
    x = np.arange(32, dtype=np.int32).reshape(4, 8)
    arguments = {"x_ptr": x, "o_ptr": Result(0)}
    (out,) = interpret(sum_over_all, arguments, [((1, 1), np.int32)], M=4, N=8)
    assert out.tolist() == [[496]]


@pytest.mark.parametrize("dtype", [np.int8, np.float32, BFLOAT16], ids=str)
def test_a_combine_function_that_returns_a_number(interpret, dtype):
    x = np.array([5, 3, 1, 2, 4, 1, 0, 9], dtype)
    (out,) = interpret(reduce_to_a_number, {"x_ptr": x, "o_ptr": Result(0)}, [((), dtype)], N=8)
    assert out == 5  # neighbours first: 5, 0, 4, 0; 5, 4


def test_maps_of_functions_with_control_flow(interpret, rng):
    x = rng.uniform(0, 2, 16).astype(np.float32)
    (out,) = interpret(mapped, {"x_ptr": x, "o_ptr": Result(0)}, [((2, 16), np.float32)], N=16)
    np.testing.assert_array_equal(out[0], np.where(x > 1, x * 2, x - 1))
    np.testing.assert_array_equal(out[1], x * np.arange(3, 19, dtype=np.float32))


def test_shapes(interpret, rng):
    x = rng.integers(0, 16, 16).astype(np.float32) / 10
    (out,) = interpret(shapes, {"x_ptr": x, "o_ptr": Result(0)}, [((6, 16), np.float32)], N=16)
    bins = np.bincount((x * 10).astype(np.int32), minlength=16)
    swapped = x.reshape(8, 2)[:, ::-1].ravel()
    moves = [x[::-1], x[np.arange(16) * 3 % 16], x.reshape(4, 4).T.ravel(), swapped, bins]
    np.testing.assert_array_equal(out[:5], moves)
    np.testing.assert_allclose(out[5], x.astype(np.float64).sum(), rtol=1e-6)


@pytest.mark.parametrize("wrong", [-1, 8])
def test_gather_stays_in_its_source(interpret, wrong):
    x, index = np.arange(16, dtype=np.int32), np.tile(np.arange(7, -1, -1, dtype=np.int32), 2)
    arguments = {"x_ptr": x, "index_ptr": index, "o_ptr": Result(0)}
    (out,) = interpret(gather, arguments, [((16,), np.int32)], N=16)
    assert out.tolist() == [*range(7, -1, -1), *range(15, 7, -1)]
    index[11] = wrong
    text = (
        f"Kernel `gather`, program (0, 0, 0): tl.gather with index {wrong}, outside the 8 elements "
        "of axis 1 of its source; 1 of 16 indices are outside."
    )
    with pytest.raises(OutOfBounds, match=re.escape(text)):
        interpret(gather, arguments, [((16,), np.int32)], N=16)


@pytest.mark.parametrize("value", [-1, 8, 9])
def test_histograms_count_what_lies_in_their_bins(interpret, monkeypatch, value):
    x = np.array([0, 7, 7, value] + [value] * 12, np.int32)
    arguments = {"x_ptr": x, "o_ptr": Result(0), "n": 3}
    expected = [1, 0, 0, 0, 0, 0, 0, 2]
    for wraps in (False, True):
        monkeypatch.setattr(compat, "HISTOGRAMS_WRAP", wraps)
        (out,) = interpret(histogram, arguments, [((8,), np.int32)], N=16, BINS=8)
        assert out.tolist() == expected
    arguments["n"] = 4
    text = rf"`histogram`, program \(0, 0, 0\): tl.histogram of the value {value} in 8 bins"
    with pytest.raises(OutOfBounds, match=text):
        interpret(histogram, arguments, [((8,), np.int32)], N=16, BINS=8)
    monkeypatch.setattr(compat, "HISTOGRAMS_WRAP", False)
    (out,) = interpret(histogram, arguments, [((8,), np.int32)], N=16, BINS=8)
    assert out.tolist() == expected


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint64], ids=str)
def test_the_high_half_of_a_product_is_unsigned(agree, dtype):
    x, y = (np.array(v, np.int64).astype(dtype) for v in ([-1, -5, 3, 2], [-1, 7, -2, 2]))
    bits = 8 * x.itemsize
    expected = [(int(a) % 2**bits) * (int(b) % 2**bits) >> bits for a, b in zip(x, y, strict=True)]
    arguments = {"x_ptr": x, "y_ptr": y, "o_ptr": Result(0)}
    (out,) = agree(high_half, arguments, [((4,), dtype)], N=4)
    assert out.view(f"u{x.itemsize}").tolist() == expected


def test_sort(interpret, rng):
    x = rng.normal(size=64).astype(np.float32)
    (out,) = interpret(sort, {"x_ptr": x, "o_ptr": Result(0)}, [((64,), np.float32)], N=64)
    np.testing.assert_array_equal(out, np.sort(x))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16, E4M3, E5M2], ids=str)
def test_dot(interpret, rng, dtype):
    m, n, k = 13, 17, 50
    x, y = matrix(rng, m, k, dtype), matrix(rng, k, n, dtype)
    arguments = {"x_ptr": x, "y_ptr": y, "o_ptr": Result(0), "m": m, "n": n, "k": k}
    (out,) = interpret(dot, arguments, [((m, n), np.float32)], M=16, N=32, K=16)
    expected = x.astype(np.float64) @ y.astype(np.float64)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_loops(interpret):
    (out,) = interpret(loops, {"o_ptr": Result(0), "n": 10}, [((3,), np.int64)])
    total = 3 * 45 + 20 + 6 + 55
    np.testing.assert_array_equal(out, [total, 12, 5 + 100])


def test_random_numbers_are_uniform_and_reproducible(interpret):
    arguments = {"o_ptr": Result(0), "seed": 42, "n": 1000}
    (first,) = interpret(random, arguments, [((1000,), np.float32)], N=1024)
    (again,) = interpret(random, arguments, [((1000,), np.float32)], N=1024)
    (other,) = interpret(random, {**arguments, "seed": 43}, [((1000,), np.float32)], N=1024)
    np.testing.assert_array_equal(first, again)
    assert ((first >= 0) & (first < 1)).all()
    assert np.unique(first).size > 990
    assert abs(first.mean() - 0.5) < 0.03
    assert (first != other).mean() > 0.99


def test_asserts_and_prints(interpret, rng, capsys):
    x = rng.uniform(1, 2, 30).astype(np.float32)
    arguments = {"x_ptr": x, "o_ptr": Result(0), "n": 30}
    (out,) = interpret(checked, arguments, [((30,), np.float32)], N=32)
    np.testing.assert_array_equal(out, np.sqrt(x))
    assert re.fullmatch(r"\(0, 0, 0\) +first: +\[1\.9\d*\]\n", capsys.readouterr().out)
    with pytest.raises(AssertionError, match="x is negative") as raised:
        interpret(checked, {**arguments, "x_ptr": -x}, [((30,), np.float32)], N=32)
    assert "Raised by kernel `checked`, program (0, 0, 0)." in raised.value.__notes__
    with pytest.raises(AssertionError, match="N is too small"):
        interpret(checked, arguments, [((30,), np.float32)], N=8)


def test_a_block_is_no_condition(interpret):
    arguments = {"x_ptr": np.zeros(16, np.float32), "o_ptr": Result(0)}
    with pytest.raises(UnsupportedError, match=r"A block of shape \(16,\) cannot be a condition"):
        interpret(block_condition, arguments, [((16,), np.float32)])


def test_logic_works_element_by_element(interpret):
    x = np.linspace(-1, 2, 16, dtype=np.float32)
    arguments = {"x_ptr": x, "o_ptr": Result(0)}
    (out,) = interpret(logic, arguments, [((16,), np.int32)], FLAG=True)
    np.testing.assert_array_equal(
        out, ((x > 0) & (x < 1)) * 1 + ((x < 0) | (x > 1)) * 2 + (x <= 0) * 4
    )
    (out,) = interpret(logic, arguments, [((16,), np.int32)], FLAG=False)
    np.testing.assert_array_equal(out, np.full(16, -1))


@triton.jit
def multiply_pairs(x_ptr, y_ptr, z_ptr, o_ptr):
    at = tl.arange(0, 16)
    x = tl.load(x_ptr + at)
    y = tl.load(y_ptr + at)
    z = tl.load(z_ptr)
    assembly: tl.constexpr = "fma.rn.bf16x2 $0, $1, $2, $3;"
    x = tl.inline_asm_elementwise(assembly, "=r,r,r,r", [x, y, z], tl.int32, True, 1)
    tl.store(o_ptr + at, x)


def test_an_instruction_multiplies_pairs_of_bfloat16(interpret):
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((16, 2)).astype(ml_dtypes.bfloat16) for _ in range(2))
    x[0], y[0] = (2.0**-133, -(2.0**-126)), (2.0**127, 2.0**-4)  # a result is subnormal
    z = np.array([0.5, -(2.0**-133)]).astype(ml_dtypes.bfloat16)
    wanted = (x.astype("float64") * y.astype("float64") + z.astype("float64")).astype(x.dtype)
    arguments = {n: a.view("int32")[..., 0] for n, a in (("x_ptr", x), ("y_ptr", y))}
    arguments |= {"z_ptr": z.view("int32"), "o_ptr": Result(0)}
    (out,) = interpret(multiply_pairs, arguments, [((16,), np.int32)])
    np.testing.assert_array_equal(out, wanted.view("int32")[:, 0])


@triton.jit
def repeat_halves(x_ptr, o_ptr):
    at = tl.arange(0, 16)
    x = tl.load(x_ptr + at)
    low: tl.constexpr = "{.reg .b16 l, h; mov.b32 {l, h}, $1; mov.b32 $0, {l, l};}"
    high: tl.constexpr = "{.reg .b16 l, h; mov.b32 {l, h}, $1; mov.b32 $0, {h, h};}"
    tl.store(o_ptr + at, tl.inline_asm_elementwise(low, "=r,r", [x], tl.int32, True, 1))
    tl.store(o_ptr + at + 16, tl.inline_asm_elementwise(high, "=r,r", [x], tl.int32, True, 1))


def test_halves_of_words_are_repeated(interpret):
    halves = np.random.default_rng(0).integers(-(2**15), 2**15, (16, 2)).astype(np.int16)
    arguments = {"x_ptr": halves.view("int32")[:, 0], "o_ptr": Result(0)}
    (out,) = interpret(repeat_halves, arguments, [((32,), np.int32)])
    wanted = np.concatenate([halves[:, [0, 0]], halves[:, [1, 1]]])
    np.testing.assert_array_equal(out.view(np.int16).reshape(32, 2), wanted)


def test_other_inline_assembly_is_refused(interpret):
    with pytest.raises(UnsupportedError, match=r"inline assembly \('mov.u32 \$0, 1;'\)"):
        interpret(inline_asm, {"o_ptr": Result(0)}, [((1,), np.float32)])


def test_operations_that_are_missing_are_named():
    with pytest.raises(UnsupportedError, match="has no operation `create_miracle`; run the kernel"):
        Builder().create_miracle()


@pytest.mark.skipif(not HAS_BLOCK_POINTERS, reason="this Triton has no block pointers")
@pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated")
def test_block_pointers(interpret, rng):
    x = matrix(rng, 13, 50)
    arguments = {"x_ptr": x, "o_ptr": Result(0), "m": 13, "n": 50}
    (out,) = interpret(
        block_pointers, arguments, [((13, 50), np.float32)], grid=(2, 1, 1), BM=8, BN=16
    )
    np.testing.assert_array_equal(out, x * 2)
    arguments = {"x_ptr": x[0], "o_ptr": Result(0), "n": 50}
    with pytest.raises(OutOfBounds, match="load from `x_ptr` at element 50, outside its 50"):
        interpret(leaky_block_pointer, arguments, [((64,), np.float32)], N=64)


def test_nans_and_overflow_are_quiet_and_right(interpret):
    nan = np.nan
    x = np.array([1, nan, nan, -4, nan, 5, nan, -3], np.float32)
    (out,) = interpret(no_numbers, {"x_ptr": x, "o_ptr": Result(0)}, [((14,), np.float32)])
    np.testing.assert_array_equal(out[:4], [1, 5, nan, -3])
    assert out[8] == 1
    assert 0 <= out[9] < 4


def test_closures_and_late_helpers(interpret):
    offset = tl.constexpr(40)

    @triton.jit
    def shift(x):
        return x + offset

    @triton.jit
    def kernel(o_ptr):
        tl.store(o_ptr, shift(2) + defined_below(1))

    (out,) = interpret(kernel, {"o_ptr": Result(0)}, [((1,), np.int32)])
    assert out == 42 + 8


@triton.jit
def defined_below(x):
    return x + 7
