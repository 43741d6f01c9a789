"""`triton.language.extra`: libdevice by all its names, and the helpers for CUDA."""

import ast
import dataclasses
import fractions
import inspect
import math
import re
import statistics

import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl
from triton.language.extra import cuda, libdevice
from triton.language.extra.cuda import libdevice as cuda_libdevice
from triton.language.extra.cuda.libdevice import tanh as cuda_tanh

from triax.binding.launch import Result
from triax.binding.values import pack_values
from triax.errors import UnsupportedError
from triax.interpreting import libdevice as table


@triton.jit
def by_every_name(x_ptr, o_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=1.0)
    tl.store(o_ptr + at, libdevice.rsqrt(x), mask=at < n)
    tl.store(o_ptr + n + at, cuda_libdevice.asin(x), mask=at < n)
    tl.store(o_ptr + 2 * n + at, tl.extra.cuda.libdevice.erf(x), mask=at < n)
    tl.store(o_ptr + 3 * n + at, cuda.libdevice.log1p(x), mask=at < n)
    tl.store(o_ptr + 4 * n + at, cuda_tanh(x), mask=at < n)
    tl.store(o_ptr + 5 * n + at, tl.extra.libdevice.pow(x, 3), mask=at < n)
    tl.store(o_ptr + 6 * n + at, libdevice.fma(x, x, x), mask=at < n)
    tl.store(o_ptr + 7 * n + at, libdevice.fast_expf(x), mask=at < n)
    tl.store(o_ptr + 8 * n + at, libdevice.float2int_rn(x * 8), mask=at < n)


@triton.jit
def directed(o_ptr):
    tl.store(o_ptr, libdevice.add_rd(1.0, 2.0))


@triton.jit
def not_for_cuda(o_ptr):
    tl.store(o_ptr, libdevice.fast_tanhf(1.0))


@triton.jit
def helpers(o_ptr, t_ptr):
    tl.store(o_ptr, tl.extra.cuda.num_warps())
    tl.store(o_ptr + 1, cuda.num_threads())
    tl.store(o_ptr + 2, tl.extra.cuda.smid())
    start = tl.extra.cuda.globaltimer()
    tl.extra.cuda.gdc_wait()
    cuda.gdc_launch_dependents()
    tl.store(t_ptr, start)
    tl.store(t_ptr + 1, cuda.globaltimer())


# As a package, `tl.extra` gets its libdevice only where somebody imports that.
assert tl.extra.libdevice is libdevice


def test_the_names_a_module_may_use(interpret, rng):
    n = 5
    x = rng.uniform(0.1, 0.9, n).astype(np.float32)
    (out,) = interpret(
        by_every_name, {"x_ptr": x, "o_ptr": Result(0), "n": n}, [((9, n), np.float32)], BLOCK=8
    )
    wide = x.astype(np.float64)
    for row, reference in zip(
        out,
        [
            wide**-0.5,
            np.arcsin(wide),
            np.vectorize(math.erf)(wide),
            np.log1p(wide),
            np.tanh(wide),
            wide**3,
            wide * wide + wide,
            np.exp(wide),
            np.rint(x * 8),
        ],
        strict=True,
    ):
        np.testing.assert_array_equal(row, reference.astype(np.float32))


@pytest.mark.parametrize(
    ("kernel", "text"),
    [
        (directed, "does not have `__nv_fadd_rd` of the GPU library 'libdevice'"),
        (not_for_cuda, "does not have `fast_tanhf`"),
    ],
)
def test_what_is_missing_is_named(interpret, kernel, text):
    if kernel is not_for_cuda and not hasattr(libdevice, "fast_tanhf"):
        pytest.skip("this Triton has no `fast_tanhf`")
    with pytest.raises(UnsupportedError, match=text):
        interpret(kernel, {"o_ptr": Result(0)}, [((1,), np.float32)])


def test_helpers_tell_of_the_launch(launch_of):
    from triax.interpreting.run import run

    launch, operands = launch_of(
        helpers,
        {"o_ptr": Result(0), "t_ptr": Result(1)},
        [((3,), np.int32), ((2,), np.int64)],
    )
    candidate = dataclasses.replace(launch.candidate, options=pack_values({"num_warps": 8}))
    facts, times = run(dataclasses.replace(launch, candidate=candidate), operands)
    np.testing.assert_array_equal(facts, [8, 256, 0])
    assert 0 < times[0] <= times[1]


def test_all_of_triton_s_symbols_are_known():
    """Missing are only those that round in a given direction, and one reciprocal by table."""
    symbols = {
        node.value
        for node in ast.walk(ast.parse(inspect.getsource(cuda_libdevice)))
        if isinstance(node, ast.Constant) and str(node.value).startswith("__nv_")
    }
    missing = {symbol for symbol in symbols if table.find(symbol) is None}
    directed = {s for s in missing if re.search(r"_r[zdu]$", s)}
    assert missing - directed == {"__nv_rcp64h"}
    assert len(symbols - missing) > 200


def one(symbol, *values):
    """The function's value as a Python number; Python floats are float64, integers int32."""
    kinds = {float: np.float64, int: np.int32}
    arrays = [np.array([v], kinds.get(type(v), type(v))) for v in values]
    with np.errstate(all="ignore"):
        return table.find(symbol)(*arrays)[0].item()


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("symbol", "values", "expected"),
    [
        ("rsqrt", (4.0,), 0.5),
        ("exp10", (3.0,), 1000.0),
        ("cbrt", (-27.0,), -3.0),
        ("rcbrt", (8.0,), 0.5),
        ("rhypot", (3.0, 4.0), 0.2),
        ("norm4d", (2.0, 4.0, 5.0, 6.0), 9.0),
        ("rnorm3d", (2.0, 3.0, 6.0), 1 / 7),
        ("sinpi", (1.0,), 0.0),
        ("sinpi", (2.5,), 1.0),
        ("sinpi", (-0.5,), -1.0),
        ("sinpi", (1.75,), -math.sqrt(0.5)),
        ("sinpi", (1e300,), 0.0),
        ("cospi", (0.5,), 0.0),
        ("cospi", (-1.0,), -1.0),
        ("cospi", (1.25,), -math.sqrt(0.5)),
        ("cospi", (2.0,), 1.0),
        ("erfcx", (1.0,), math.e * math.erfc(1)),
        ("erfinv", (math.erf(0.5),), 0.5),
        ("erfcinv", (math.erfc(0.5),), 0.5),
        ("normcdf", (0.3,), statistics.NormalDist().cdf(0.3)),
        ("normcdfinv", (statistics.NormalDist().cdf(0.3),), 0.3),
        ("lgamma", (-1.5,), math.lgamma(-1.5)),
        ("tgamma", (-1.5,), math.gamma(-1.5)),
        ("jn", (2, 1.5), 0.2320876721442147),
        ("yn", (2, 1.5), -0.9321937597629739),
        ("cyl_bessel_i1", (1.5,), 0.9816664285779076),
        ("fdim", (3.0, 1.0), 2.0),
        ("fdim", (1.0, 3.0), 0.0),
        ("fdim", (NAN, 3.0), NAN),
        ("fmod", (-5.5, 3.0), -2.5),
        ("remainder", (5.0, 3.0), -1.0),
        ("remainder", (-7.5, 5.0), 2.5),
        ("remainder", (INF, 3.0), NAN),
        ("remainder", (3.0, INF), 3.0),
        ("logb", (10.0,), 3.0),
        ("logb", (0.0,), -INF),
        ("logb", (-INF,), INF),
        ("ilogb", (0.1,), -4),
        ("ilogb", (5e-324,), -1074),
        ("ilogb", (0.0,), -(2**31)),
        ("ilogb", (INF,), 2**31 - 1),
        ("ldexp", (1.5, 4), 24.0),
        ("pow", (-8.0, 1 / 3), NAN),
        ("powi", (2.0, -3), 0.125),
        ("round", (2.5,), 3.0),
        ("round", (-2.5,), -3.0),
        ("round", (0.49999999999999994,), 0.0),
        ("rint", (2.5,), 2.0),
        ("llrint", (2.5,), 2),
        ("llround", (-2.5,), -3),
        ("copysign", (2.0, -0.0), -2.0),
        ("nextafter", (1.0, 2.0), 1 + 2**-52),
        ("saturatef", (NAN,), 0.0),
        ("saturatef", (1.5,), 1.0),
        ("double2int_rn", (2.5,), 2),
        ("double2int_rz", (-2.7,), -2),
        ("double2int_rd", (-2.1,), -3),
        ("double2int_ru", (2.1,), 3),
        ("double2int_rn", (1e10,), 2**31 - 1),
        ("double2int_rn", (NAN,), -(2**31)),  # of float32 it is 0
        ("double2uint_rn", (-1.0,), 0),
        ("double2uint_rn", (3e9,), 3 * 10**9),
        ("double2ll_rn", (-1e19,), -(2**63)),
        ("double2ll_rn", (NAN,), -(2**63)),
        ("double2ull_rn", (1.5e19,), 15 * 10**18),
        ("hiloint2double", (0x3FF80000, 0), 1.5),
        ("double2hiint", (1.5,), 0x3FF80000),
        ("double2loint", (1.5,), 0),
        ("double_as_longlong", (1.5,), 0x3FF8 << 48),
        ("clz", (1,), 31),
        ("clz", (0,), 32),
        ("clz", (-1,), 0),
        ("popc", (-1,), 32),
        ("ffs", (0,), 0),
        ("ffs", (-8,), 4),
        ("brev", (1,), -(2**31)),
        ("brev", (0b1011,), -0x30000000),
        ("byte_perm", (0x33221100, 0x77665544, 0x7531), 0x77553311),
        ("mul24", (-3, 5), -15),
        ("mul24", (1 << 23, 2), -(1 << 24)),
        ("mulhi", (-(2**31), 4), -2),
        ("sad", (-5, 7, 1), 13),
        ("hadd", (2**31 - 1, 2**31 - 3), 2**31 - 2),
        ("rhadd", (-3, -4), -3),
        ("isnan", (NAN,), True),
        ("isinfd", (-INF,), True),
        ("isfinited", (INF,), False),
        ("signbitd", (-0.0,), True),
    ],
)
def test_values(symbol, values, expected):
    got = one("__nv_" + symbol, *values)
    assert got == pytest.approx(expected, rel=1e-14, abs=1e-300, nan_ok=True)
    if expected == 0 and isinstance(expected, float):
        assert got == 0


def test_64_bits_wide():
    def call(symbol, kind, *values):
        return table.find(symbol)(*(np.array([v], kind) for v in values))[0].item()

    assert call("__nv_mul64hi", np.int64, -(2**63), 4) == -2
    assert call("__nv_umul64hi", np.uint64, 2**63, 4) == 2
    assert call("__nv_clzll", np.int64, 1) == 63
    assert call("__nv_popcll", np.int64, -1) == 64
    assert call("__nv_ffsll", np.int64, 1 << 40) == 41
    assert call("__nv_brevll", np.int64, 2) == 1 << 62


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_fma_rounds_once(rng, dtype):
    x, y = rng.standard_normal((2, 2000)).astype(dtype)
    exact = [
        fractions.Fraction(float(a)) * fractions.Fraction(float(b))
        for a, b in zip(x, y, strict=True)
    ]
    # Against the rounded product what is left is its error; far from it, a tie may lurk.
    for z in (-(x * y), (x * y) * dtype(2**13), rng.standard_normal(2000).astype(dtype)):
        got = table.fma(x, y, z)
        for product, addend, value in zip(exact, z, got, strict=True):
            assert abs(error(product + fractions.Fraction(float(addend)), value)) <= 1
    for special in (
        (INF, 1, 1),
        (INF, 0, 1),
        (1, 1, -1),
        (NAN, 1, 1),
        (-0.0, 1, 0),
        (-0.0, 1, -0.0),
    ):
        arguments = [np.array([v], dtype) for v in special]
        with np.errstate(all="ignore"):
            got = table.fma(*arguments)
            np.testing.assert_array_equal(got, arguments[0] * arguments[1] + arguments[2])
            assert np.signbit(got) == np.signbit(arguments[0] * arguments[1] + arguments[2])


def error(exact, value):
    """How far `value` is from `exact`, in halves of the gap to its neighbour on that side."""
    toward = value.dtype.type(math.inf if exact > fractions.Fraction(float(value)) else -math.inf)
    gap = abs(
        fractions.Fraction(float(np.nextafter(value, toward))) - fractions.Fraction(float(value))
    )
    return (exact - fractions.Fraction(float(value))) * 2 / gap


def test_fma_of_bfloat16_at_a_tie():
    """The addend is less than float32 holds."""
    x, y, z = (np.array([v]).astype(ml_dtypes.bfloat16) for v in (1.015625, 1.25, 2.0**-40))
    assert table.fma(x, y, z) == ml_dtypes.bfloat16(1.2734375)


def test_fma_of_float32_at_a_tie():
    """Rounded to float64 first, the sum would lie between two floats and go to the wrong one."""
    x = np.array([1 + 2.0**-12], np.float32)
    y = np.array([2.0**-24 * (1 - 2.0**-12)], np.float32)  # product: 2**-24 * (1 - 2**-24)
    z = np.array([1.0], np.float32)
    assert table.fma(x, y, z)[0] == 1.0
    tiny = np.array([2.0**-100], np.float32)
    half = np.array([2.0**-24], np.float32)
    one32 = np.array([1.0], np.float32)
    assert table.fma(half, one32, one32)[0] == 1.0
    above = table.fma(np.array([1 + 2.0**-23], np.float32), half, one32)
    assert above[0] == np.float32(1 + 2.0**-23)
    assert table.fma(tiny, tiny, one32)[0] == 1.0
