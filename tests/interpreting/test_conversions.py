"""Conversions between formats: what GPUs do where NumPy does otherwise, or C leaves it open."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from triax.binding.launch import Result
from triax.errors import UnsupportedError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
FLOAT8 = [(tl.float8e4nv, E4M3), (tl.float8e5, E5M2)]
FLOATS = [np.float32, np.float64, np.float16, BFLOAT16]
INTEGERS = {
    np.dtype(f"{u}int{n}"): getattr(tl, f"{u}int{n}") for n in (8, 16, 32, 64) for u in ("", "u")
}
NAN, INF = math.nan, math.inf
HOSTILE = [0, -0.0, 1.9, -1.9, 127.5, 200, 255.9, 300, -129, 40000, 65535, 70000, -7e4, 3e9, -3e9]
HOSTILE += [2**31 - 1, 2**31, 2**32, 1e19, -1e19, 2**63, 2**64, INF, -INF, NAN]


@triton.jit
def convert(x_ptr, o_ptr, n, N: tl.constexpr, DTYPE: tl.constexpr, ROUNDING: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(o_ptr + at, x.to(DTYPE, fp_downcast_rounding=ROUNDING), mask=at < n)


@triton.jit
def constant(o_ptr, VALUE: tl.constexpr, DTYPE: tl.constexpr):
    tl.store(o_ptr + tl.arange(0, 4), tl.full([4], VALUE, DTYPE))


@triton.jit
def float8_arithmetic(x_ptr, o_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    tl.store(o_ptr + at, tl.abs(x))
    tl.store(o_ptr + N + at, tl.where(at < 2, x, 0.0))
    tl.store(o_ptr + 2 * N + at, tl.maximum(x.to(tl.float32), 0.0))


def converted(interpret, x, target, dtype, rounding=None):
    arguments = {"x_ptr": x, "o_ptr": Result(0), "n": x.size}
    size = 1 << (x.size - 1).bit_length()
    constants = {"N": size, "DTYPE": target, "ROUNDING": rounding}
    return interpret(convert, arguments, [(x.shape, dtype)], **constants)[0]


def cvt_rzi(x, source, dtype):
    """`cvt.rzi` of PTX; to 8 bits, the lower half of the result of 16."""
    bits = max(16, 8 * dtype.itemsize)
    if math.isnan(x):
        whole = 1 << (bits - 1) if 8 in (source.itemsize, dtype.itemsize) else 0
    else:
        low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
        low, high = (0, (1 << bits) - 1) if dtype.kind == "u" else (low, high)
        whole = low if x <= low else high if x >= high else math.trunc(x)
    return whole % (1 << 8 * dtype.itemsize)


@pytest.mark.parametrize("source", FLOATS, ids=str)
def test_floats_to_integers_saturate_as_on_a_gpu(interpret, source):
    with np.errstate(all="ignore"):
        x = np.array(HOSTILE, np.float64).astype(source)
    for dtype, target in INTEGERS.items():
        bits = [cvt_rzi(float(v), x.dtype, dtype) for v in x]
        expected = np.array(bits, f"u{dtype.itemsize}").view(dtype)
        got = converted(interpret, x, target, dtype)
        np.testing.assert_array_equal(got, expected, str(dtype))


def rounded(value, bits):
    """An exact number with a significand of `bits`, to the nearest even."""
    exact = Fraction(value)
    unit = Fraction(2) ** (math.frexp(exact)[1] - bits)
    unit *= 2 if abs(exact) >= unit * (1 << bits) else 1
    return float(round(exact / unit) * unit)


@pytest.mark.parametrize(
    "x",
    [
        np.array([2**24 + 2**16 + 1, -(2**30) - 2**22 - 1, 2**31 - 1], np.int32),
        np.array([2**60 + 2**52 + 1, -(2**62) - 2**54 - 1, 2**40 + 2**32], np.int64),
        np.array([2**63 + 2**55 + 1, 2**64 - 1], np.uint64),
        np.array([1 + 2**-8 + 2**-40, -1 - 2**-7 - 2**-8, 1 + 2**-7 + 2**-8 - 2**-50]),
    ],
    ids=lambda x: str(x.dtype),
)
def test_conversions_to_bfloat16_round_once(interpret, x):
    expected = [rounded(v, 8) for v in x.tolist()]
    got = converted(interpret, x, tl.bfloat16, BFLOAT16)
    np.testing.assert_array_equal(got.astype(np.float64), expected)
    assert (x.astype(np.float32).astype(BFLOAT16) != got).any()  # by way of float32, another result


@given(values=st.lists(st.floats(width=32), min_size=1, max_size=16))
@settings(max_examples=100)
def test_any_float_to_bfloat16(interpret, values):
    x = np.array(values, np.float32)
    got = converted(interpret, x, tl.bfloat16, BFLOAT16)
    with np.errstate(over="ignore"):
        expected = x.astype(BFLOAT16)
    np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize(("target", "dtype"), FLOAT8)
@pytest.mark.parametrize("source", [np.float32, np.float16, BFLOAT16], ids=str)
def test_conversion_to_float8_rounds_and_saturates(interpret, rng, target, dtype, source):
    x = np.concatenate([rng.normal(size=290), [0, -0.0, 1e9, -1e9, np.inf, -np.inf, np.nan, 1e-3]])
    with np.errstate(over="ignore"):
        x = x.astype(source)
    got = converted(interpret, x, target, dtype)
    limit = float(ml_dtypes.finfo(dtype).max)
    expected = np.clip(x.astype(np.float32), -limit, limit).astype(dtype)
    np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("source", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize(("target", "dtype"), [(tl.float32, np.float32), (tl.bfloat16, BFLOAT16)])
def test_conversion_from_float8_is_exact(interpret, source, target, dtype):
    x = np.arange(256, dtype=np.uint8).view(source)
    got = converted(interpret, x, target, dtype)
    np.testing.assert_array_equal(got.astype(np.float32), x.astype(np.float32))


@pytest.mark.parametrize(
    ("target", "dtype", "largest"),
    [(tl.float16, np.float16, 65504), (tl.float8e5, E5M2, 57344), (tl.bfloat16, BFLOAT16, None)],
    ids=str,
)
def test_rounding_toward_zero(interpret, rng, target, dtype, largest):
    x = np.concatenate([rng.normal(size=20) * 10, [7e4, -7e4, INF, -INF, NAN, 1e-8, -1e-8, -0.0]])
    x = x.astype(np.float32)
    got = converted(interpret, x, target, dtype, "rtz").astype(np.float64)
    values = np.arange(1 << 8 * np.dtype(dtype).itemsize, dtype=f"u{np.dtype(dtype).itemsize}")
    with np.errstate(invalid="ignore"):  # signalling NaNs
        values = values.view(dtype).astype(np.float64)
    values = np.unique(np.abs(values[np.isfinite(values)]))
    below = values[np.searchsorted(values, np.abs(x), side="right") - 1]
    np.testing.assert_array_equal(got, np.where(np.isfinite(x), np.copysign(below, x), x))
    assert largest is None or got[20:22].tolist() == [largest, -largest]


@pytest.mark.parametrize(
    ("value", "target", "expected"),
    [(300, tl.int8, 44), (2**31, tl.int32, -(2**31)), (2**32, tl.int32, 0), (300, tl.uint8, 44)],
)
def test_constants_wrap(agree, value, target, expected):
    dtype = next(d for d, t in INTEGERS.items() if t == target)
    (out,) = agree(constant, {"o_ptr": Result(0)}, [((4,), dtype)], VALUE=value, DTYPE=target)
    assert out.tolist() == [expected] * 4


def test_float8_is_not_its_bytes(agree):
    x = np.array([1.5, -2, -448, 0.25], E4M3)
    (out,) = agree(float8_arithmetic, {"x_ptr": x, "o_ptr": Result(0)}, [((3, 4), np.float32)], N=4)
    assert out.tolist() == [[1.5, 2, 448, 0.25], [1.5, -2, 0, 0], [1.5, 0, 0, 0.25]]


def test_a_format_without_a_conversion_is_refused(interpret):
    with pytest.raises(UnsupportedError, match=r"cannot convert `tl.float8e4b15`; run the kernel"):
        converted(interpret, np.ones(4, np.float32), tl.float8e4b15, np.uint8)
