"""NVIDIA's libdevice in NumPy: the functions behind `tl.extra.libdevice`, on the CPU.

Triton picks the function by the types of the arguments (`__nv_rsqrtf` for float32); here
one entry serves all types. Floats are computed in float64 and rounded once, so that results
differ from a GPU's by the error that libdevice allows itself, a few units in the last
place. Arithmetic with directed rounding (`add_rd`) is missing, and an error says so.
"""

from __future__ import annotations

import fractions
import functools
import math
import re
from collections.abc import Callable

import numpy as np
from scipy import special  # comes with JAX, which needs it

from triax.interpreting.conversions import to_float, to_integer, to_odd
from triax.interpreting.memory import unsigned

Function = Callable[..., np.ndarray]


def find(symbol: str) -> Function | None:
    """Returns the function for a symbol such as ``__nv_rsqrtf``, or None if it is missing."""
    name = symbol.removeprefix("__nv_").removeprefix("fast_")
    for stem in (name, name[:-1], re.sub("ll$", "", name)):  # a suffix tells the type
        if stem in _FLOAT:
            return _in_float64(_FLOAT[stem])
        if stem in _AS_IS:
            return _AS_IS[stem]
    if match := re.fullmatch(r"(?:float|double)2(u?)(int|ll)_r([nzdu])", name):
        unsigned, width, mode = match.groups()
        integer = np.dtype(f"{'u' if unsigned else ''}int{32 if width == 'int' else 64}")
        return lambda x: to_integer(_DIRECTIONS[mode](x), integer)
    return None


def fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Returns ``x * y + z``, rounded once, in the type of the arguments."""
    if x.dtype.itemsize > 4:
        return _fma64(x, y, z).astype(x.dtype)
    # float64 holds the product exactly. The sum is rounded to odd: rounding it again is correct.
    product, z64 = x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64)
    total = product + z64
    part = total - product
    error = (product - (total - part)) + (z64 - part)
    return to_float(to_odd(total, error), x.dtype)


def _exactly(x: float, y: float, z: float) -> float:
    if not (math.isfinite(x) and math.isfinite(y) and math.isfinite(z)):
        return float(np.float64(x) * np.float64(y) + np.float64(z))
    exact = fractions.Fraction(x) * fractions.Fraction(y) + fractions.Fraction(z)
    try:
        # Zero keeps the sign that IEEE 754 gives it.
        return float(exact) if exact else float(np.float64(x) * np.float64(y) + np.float64(z))
    except OverflowError:
        return math.copysign(math.inf, exact)


_fma64 = np.vectorize(_exactly, otypes=[np.float64])


def _in_float64(function: Function) -> Function:
    """Makes `function` compute in float64; integer arguments stay as they are."""

    def call(*args: np.ndarray) -> np.ndarray:
        return function(*(a.astype(np.float64) if a.dtype.kind == "f" else a for a in args))

    return call


def _round_half_away(x: np.ndarray) -> np.ndarray:
    whole = np.trunc(x)
    return whole + np.copysign(np.abs(x - whole) >= 0.5, x)


def _sinpi(x: np.ndarray) -> np.ndarray:
    # Reduced exactly, by symmetry, to where sine is accurate.
    turn = np.fmod(x, 2.0)
    folded = np.where(np.abs(turn) > 0.5, np.copysign(1.0, turn) - turn, turn)
    folded = np.where(np.abs(turn) > 1.5, turn - np.copysign(2.0, turn), folded)
    return np.where(folded == 0, np.copysign(0.0, x), np.sin(np.pi * folded))


def _cospi(x: np.ndarray) -> np.ndarray:
    turn = np.abs(np.fmod(x, 2.0))
    return _sinpi(0.5 - np.where(turn > 1, 2.0 - turn, turn)) + 0.0


def _remainder(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    defined = np.isfinite(x) & ~np.isnan(y) & (y != 0)
    ieee = np.vectorize(math.remainder, otypes=[np.float64])
    return np.where(defined, ieee(np.where(defined, x, 0), np.where(defined, y, 1)), np.nan)


def _norm(*parts: np.ndarray) -> np.ndarray:
    return functools.reduce(np.hypot, parts)


def _reciprocal(function: Function) -> Function:
    return lambda *x: 1 / function(*x)


def _exponent(x: np.ndarray, otherwise: np.ndarray) -> np.ndarray:
    """Returns floor(log2(|x|)); `otherwise` for 0, infinities and NaN."""
    return np.where(np.isfinite(x) & (x != 0), np.frexp(x)[1] - 1, otherwise)


_SAME_IN_NUMPY = (
    "exp exp2 expm1 log log2 log10 log1p cbrt hypot sin cos tan sinh cosh tanh fmod ldexp"
)
_SAME_IN_SCIPY = "exp10 erf erfc erfcx erfinv erfcinv j0 j1 y0 y1"
_INVERSE = "sin cos tan tan2 sinh cosh tanh"
_FLOAT: dict[str, Function] = {
    **{name: getattr(np, name) for name in _SAME_IN_NUMPY.split()},
    **{name: getattr(special, name) for name in _SAME_IN_SCIPY.split()},
    **{f"a{n}": getattr(np, f"arc{n}") for n in _INVERSE.split()},
    **{f"r{n}": _reciprocal(getattr(np, n)) for n in ("sqrt", "cbrt", "hypot")},
    **dict.fromkeys(("norm3d", "norm4d"), _norm),
    **dict.fromkeys(("rnorm3d", "rnorm4d"), _reciprocal(_norm)),
    "frsqrt_rn": _reciprocal(np.sqrt),
    "pow": np.power,
    "powi": lambda x, n: np.power(x, n.astype(np.float64)),
    "sinpi": _sinpi,
    "cospi": _cospi,
    "normcdf": special.ndtr,
    "normcdfinv": special.ndtri,
    "lgamma": special.gammaln,
    "tgamma": special.gamma,
    "jn": special.jv,
    "yn": special.yn,
    "cyl_bessel_i0": special.i0,
    "cyl_bessel_i1": special.i1,
    "fdividef": np.divide,
    "fdim": lambda x, y: np.where(x <= y, 0.0, x - y),
    "remainder": _remainder,
    "logb": lambda x: _exponent(x, np.where(x == 0, -np.inf, np.abs(x))),
    "ilogb": lambda x: _exponent(x, np.where(np.isinf(x), 2**31 - 1, -(2**31))),
    "scalbn": np.ldexp,
    "round": _round_half_away,
}
"""Functions that compute in float64; the caller rounds their results."""


def _viewed(dtype: str) -> Function:
    return lambda x: x.view(dtype)


def _bit_lengths(x: np.ndarray) -> np.ndarray:
    lengths = [value.bit_length() for value in x.reshape(-1).tolist()]
    return np.array(lengths, np.int32).reshape(x.shape)


def _leading_zeros(x: np.ndarray) -> np.ndarray:
    return 8 * x.dtype.itemsize - _bit_lengths(unsigned(x))


def _first_set(x: np.ndarray) -> np.ndarray:
    bits = unsigned(x)
    return _bit_lengths(bits & (~bits + bits.dtype.type(1)))


def _reversed_bits(x: np.ndarray) -> np.ndarray:
    bits = np.unpackbits(x[..., None].view(np.uint8), axis=-1, bitorder="little")
    return np.packbits(bits[..., ::-1], axis=-1, bitorder="little").view(x.dtype)[..., 0]


def _wide(function: Function) -> Function:
    """Makes `function` compute on Python's integers, which do not overflow; the result wraps."""

    def call(*args: np.ndarray) -> np.ndarray:
        exact = np.asarray(function(*(a.astype(object) for a in args)))
        dtype = unsigned(args[0]).dtype
        return (exact & np.iinfo(dtype).max).astype(dtype).view(args[0].dtype)

    return call


def _mul24(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    a, b = ((v << 8) >> 8 for v in (x, y))  # the type's own shift keeps or clears the sign
    return a * b


def _permuted_bytes(x: np.ndarray, y: np.ndarray, selector: np.ndarray) -> np.ndarray:
    octets = np.stack([x, y], axis=-1).view(np.uint8)
    places = selector[..., None] >> np.array([0, 4, 8, 12], selector.dtype) & 7
    return np.take_along_axis(octets, places, axis=-1).view(x.dtype)[..., 0]


_EXACT_IN_NUMPY = "abs fabs floor ceil trunc rint sqrt copysign nextafter isnan isinf signbit"
_SAME_BITS = "int_as_float:f4 uint_as_float:f4 float_as_int:i4 float_as_uint:u4"
_SAME_BITS += " longlong_as_double:f8 double_as_longlong:i8"
_OF_SIGNED_AND_UNSIGNED: dict[str, Function] = {
    "mulhi": lambda x, y: x * y >> 32,
    "mul64hi": lambda x, y: x * y >> 64,
    "sad": lambda x, y, z: abs(x - y) + z,
    "hadd": lambda x, y: x + y >> 1,
    "rhadd": lambda x, y: x + y + 1 >> 1,
}
_ROUNDED_TO_NEAREST: dict[str, Function] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
}
_SAME = [f"{u}{n}2{to}_rn" for u in ("", "u") for n in ("int", "ll") for to in ("float", "double")]
_AS_IS: dict[str, Function] = {
    **{name: getattr(np, name) for name in _EXACT_IN_NUMPY.split()},
    **{name: _viewed(kind) for name, kind in (n.split(":") for n in _SAME_BITS.split())},
    **{u + name: _wide(f) for name, f in _OF_SIGNED_AND_UNSIGNED.items() for u in ("", "u")},
    **{f"{kind}{name}_rn": f for name, f in _ROUNDED_TO_NEAREST.items() for kind in "fd"},
    **dict.fromkeys((*_SAME, "double2float_rn"), lambda x: x),
    **dict.fromkeys(("fma", "fma_rn", "fmaf_rn"), fma),
    **dict.fromkeys(("finitef", "isfinited"), np.isfinite),
    **dict.fromkeys(("mul24", "umul24"), _mul24),
    "llabs": np.abs,
    "nearbyint": np.rint,
    "llrint": lambda x: to_integer(np.rint(x), np.dtype(np.int64)),
    "llround": lambda x: to_integer(_round_half_away(x), np.dtype(np.int64)),
    "saturatef": lambda x: np.fmin(np.fmax(x, x.dtype.type(0)), x.dtype.type(1)),
    "double2loint": lambda x: x.view(np.int64).astype(np.int32),
    "double2hiint": lambda x: (x.view(np.int64) >> 32).astype(np.int32),
    "hiloint2double": lambda high, low: (
        high.astype(np.int64) << 32 | unsigned(low).astype(np.int64)
    ).view(np.float64),
    "clz": _leading_zeros,
    "popc": lambda x: np.bitwise_count(unsigned(x)),
    "ffs": _first_set,
    "brev": _reversed_bits,
    "byte_perm": _permuted_bytes,
}
"""Functions that take their arguments without a conversion to float64."""

_DIRECTIONS: dict[str, Function] = {"n": np.rint, "z": np.trunc, "d": np.floor, "u": np.ceil}
