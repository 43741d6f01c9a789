"""`tl.dot` and `tl.dot_scaled`."""

import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl

from triax.binding.launch import Result

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
FORMATS = {"e4m3": E4M3, "e5m2": E5M2, "bf16": BFLOAT16, "fp16": np.dtype(np.float16)}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
M, N, K = 32, 16, 64


@triton.jit
def dot(x_ptr, y_ptr, o_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, D: tl.constexpr):
    i, j, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(x_ptr + i[:, None] * K + k[None, :])
    y = tl.load(y_ptr + k[:, None] * N + j[None, :])
    tl.store(o_ptr + i[:, None] * N + j[None, :], tl.dot(x, y, out_dtype=D))


@triton.jit
def scaled(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, o_ptr,
    A: tl.constexpr, B: tl.constexpr, HAS_SCALE: tl.constexpr,
    AM: tl.constexpr, AK: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, S: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    i, j, s = tl.arange(0, M), tl.arange(0, N), tl.arange(0, S)
    a = tl.load(a_ptr + tl.arange(0, AM)[:, None] * AK + tl.arange(0, AK)[None, :])
    b = tl.load(b_ptr + tl.arange(0, BK)[:, None] * BN + tl.arange(0, BN)[None, :])
    a_scale = tl.load(a_scale_ptr + i[:, None] * S + s[None, :])
    b_scale = None
    if HAS_SCALE:
        b_scale = tl.load(b_scale_ptr + j[:, None] * S + s[None, :])
    d = tl.full([M, N], 1.0, tl.float32)
    d = tl.dot_scaled(a, a_scale, A, b, b_scale, B, d, lhs_k_pack=DEPTH, rhs_k_pack=DEPTH)
    tl.store(o_ptr + i[:, None] * N + j[None, :], d)


@pytest.mark.parametrize(
    ("dtype", "target", "out"),
    [(np.int8, tl.int32, np.int32), (np.float64, tl.float64, np.float64)],
)
def test_dot_in_other_types(agree, rng, dtype, target, out):
    x, y = (rng.integers(-100, 100, (32, 32)).astype(dtype) for _ in range(2))
    arguments = {"x_ptr": x, "y_ptr": y, "o_ptr": Result(0)}
    (got,) = agree(dot, arguments, [((32, 32), out)], M=32, N=32, K=32, D=target)
    np.testing.assert_array_equal(got, x.astype(out) @ y.astype(out))


def operand(rng, format, shape, packed):
    """Random values in a format, as an array and as numbers."""
    if format != "e2m1":
        values = rng.normal(size=shape).astype(FORMATS[format])
        return values, values.astype(np.float64)
    nibbles = rng.integers(0, 16, shape).astype(np.uint8)
    first, second = (np.take(nibbles, range(n, shape[packed], 2), packed) for n in (0, 1))
    return first | second << 4, E2M1[nibbles]


@pytest.mark.parametrize(
    ("a", "b", "has_scale", "packs_depth"),
    [
        ("e4m3", "e5m2", True, True),
        ("e2m1", "e2m1", True, True),
        ("e2m1", "bf16", False, True),
        ("fp16", "e2m1", True, True),
        ("e2m1", "e2m1", True, False),
    ],
)
def test_dot_scaled(interpret, agree, rng, a, b, has_scale, packs_depth):
    x, wide_x = operand(rng, a, (M, K), 1 if packs_depth else 0)
    y, wide_y = operand(rng, b, (K, N), 0 if packs_depth else 1)
    x_scale, y_scale = (rng.integers(120, 134, (n, K // 32)).astype(np.uint8) for n in (M, N))
    x_scale[:2, 0] = 255, 0  # NaN, 2**-127
    factors, y_factors = (np.repeat(2.0 ** (s - 127.0), 32, 1) for s in (x_scale, y_scale))
    factors[0, :32] = np.nan
    expected = 1 + (wide_x * factors) @ (wide_y * (y_factors.T if has_scale else 1))
    arguments = {
        "a_ptr": x,
        "a_scale_ptr": x_scale,
        "b_ptr": y,
        "b_scale_ptr": y_scale,
        "o_ptr": Result(0),
    }
    call = agree if packs_depth else interpret  # the other compiles for few GPUs
    (got,) = call(
        scaled, arguments, [((M, N), np.float32)], A=a, B=b, HAS_SCALE=has_scale, DEPTH=packs_depth,
        AM=x.shape[0], AK=x.shape[1], BK=y.shape[0], BN=y.shape[1], M=M, N=N, S=K // 32,
    )  # fmt: skip
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-3)
