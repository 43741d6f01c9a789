"""NVIDIA's libdevice in NumPy: what `tl.extra.libdevice` calls on a GPU, computed on the CPU.

Triton picks the function by the types of the arguments (`__nv_rsqrtf` for float32); here
one entry serves all types. Floats are computed in float64 and rounded once, so that results
differ from a GPU's by the error that libdevice allows itself, a few units in the last
place. What must round in a given direction (`add_rd`) is missing, and said to be.
"""

from __future__ import annotations

import fractions
import functools
import math
import re
from collections.abc import Callable

import numpy as np
from scipy import special  # comes with JAX, which needs it

from triax.interpreting.conversions import to_integer

Function = Callable[..., np.ndarray]


def find(symbol: str) -> Function | None:
    """The function behind a symbol such as ``__nv_rsqrtf``, or None where it is missing."""
    name = symbol.removeprefix("__nv_").removeprefix("fast_")
    for stem in (name, name[:-1], re.sub("ll$", "", name)):  # a suffix tells the type
        if stem in _FLOAT:
            return _in_float64(_FLOAT[stem])
        if stem in _AS_IS:
            return _AS_IS[stem]
    if match := re.fullmatch(r"(?:float|double)2(u?)(int|ll)_r([nzdu])", name):
        unsigned, width, mode = match.groups()
        kind = np.dtype(f"{'u' if unsigned else ''}int{32 if width == 'int' else 64}")
        return lambda x: to_integer(_DIRECTIONS[mode](x), kind)
    return None


def fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """``x * y + z``, rounded once, in the type of the arguments."""
    if x.dtype.itemsize > 4:
        return _fma64(x, y, z).astype(x.dtype)
    # float64 holds the product; a sum rounded to odd rounds to the right neighbour again.
    product, z64 = x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64)
    total = product + z64
    part = total - product
    error = (product - (total - part)) + (z64 - part)
    inexact = np.isfinite(total) & (error != 0) & (total.view(np.int64) & 1 == 0)
    total = np.where(inexact, np.nextafter(total, np.copysign(np.inf, error)), total)
    return total.astype(x.dtype)


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
    """`function` in float64; integers among the arguments stay as they are."""

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


def _exponent(x: np.ndarray, otherwise: np.ndarray) -> np.ndarray:
    """The exponent of the power of two below `x`; `otherwise` for 0, infinities and NaN."""
    return np.where(np.isfinite(x) & (x != 0), np.frexp(x)[1] - 1, otherwise)


_SAME_IN_NUMPY = "exp exp2 expm1 log log2 log10 log1p cbrt hypot sin cos tan sinh cosh tanh fmod"
_SAME_IN_SCIPY = "exp10 erf erfc erfcx erfinv erfcinv j0 j1 y0 y1"
_FLOAT: dict[str, Function] = {
    **{name: getattr(np, name) for name in (*_SAME_IN_NUMPY.split(), "ldexp")},
    **{name: getattr(special, name) for name in _SAME_IN_SCIPY.split()},
    **{f"a{n}": getattr(np, f"arc{n}") for n in ("sin", "cos", "tan", "tan2")},
    **{f"a{n}h": getattr(np, f"arc{n}h") for n in ("sin", "cos", "tan")},
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "frsqrt_rn": lambda x: 1 / np.sqrt(x),
    "pow": np.power,
    "powi": lambda x, n: np.power(x, n.astype(np.float64)),
    "rcbrt": lambda x: 1 / np.cbrt(x),
    "rhypot": lambda x, y: 1 / np.hypot(x, y),
    "norm3d": _norm,
    "norm4d": _norm,
    "rnorm3d": lambda *x: 1 / _norm(*x),
    "rnorm4d": lambda *x: 1 / _norm(*x),
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
"""Functions of float64, whose results are rounded to the type wanted."""


def _bits(kind: str) -> Function:
    return lambda x: x.view(np.dtype(kind))


def _unsigned(x: np.ndarray) -> np.ndarray:
    return x.view(np.dtype(f"u{x.dtype.itemsize}"))


def _bit_lengths(x: np.ndarray) -> np.ndarray:
    lengths = [value.bit_length() for value in x.reshape(-1).tolist()]
    return np.array(lengths, np.int32).reshape(x.shape)


def _leading_zeros(x: np.ndarray) -> np.ndarray:
    return 8 * x.dtype.itemsize - _bit_lengths(_unsigned(x))


def _first_set(x: np.ndarray) -> np.ndarray:
    bits = _unsigned(x)
    return _bit_lengths(bits & (~bits + bits.dtype.type(1)))


def _reversed_bits(x: np.ndarray) -> np.ndarray:
    bits = np.unpackbits(x[..., None].view(np.uint8), axis=-1, bitorder="little")
    return np.packbits(bits[..., ::-1], axis=-1, bitorder="little").view(x.dtype)[..., 0]


def _wide(function: Function) -> Function:
    """`function` on Python's integers, which do not overflow; the result wraps."""

    def call(*args: np.ndarray) -> np.ndarray:
        exact = np.asarray(function(*(a.astype(object) for a in args)))
        mask = 2 ** (8 * args[0].dtype.itemsize) - 1
        kind = np.dtype(f"u{args[0].dtype.itemsize}")
        return (exact & mask).astype(kind).view(args[0].dtype)

    return call


def _mul24(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    a, b = ((v << 8) >> 8 for v in (x, y))  # the type's own shift keeps or clears the sign
    return a * b


def _permuted_bytes(x: np.ndarray, y: np.ndarray, selector: np.ndarray) -> np.ndarray:
    octets = np.stack([x, y], axis=-1).view(np.uint8)
    places = selector[..., None] >> np.array([0, 4, 8, 12], selector.dtype) & 7
    return np.take_along_axis(octets, places, axis=-1).view(x.dtype)[..., 0]


_EXACT_IN_NUMPY = "abs fabs floor ceil trunc rint sqrt copysign nextafter isnan isinf signbit"
_AS_IS: dict[str, Function] = {
    **{name: getattr(np, name) for name in _EXACT_IN_NUMPY.split()},
    "llabs": np.abs,
    "nearbyint": np.rint,
    "llrint": lambda x: to_integer(np.rint(x), np.dtype(np.int64)),
    "llround": lambda x: to_integer(_round_half_away(x), np.dtype(np.int64)),
    "saturatef": lambda x: np.fmin(np.fmax(x, x.dtype.type(0)), x.dtype.type(1)),
    "fma": fma,
    "finitef": np.isfinite,
    "isfinited": np.isfinite,
    "int_as_float": _bits("f4"),
    "uint_as_float": _bits("f4"),
    "float_as_int": _bits("i4"),
    "float_as_uint": _bits("u4"),
    "longlong_as_double": _bits("f8"),
    "double_as_longlong": _bits("i8"),
    "double2loint": lambda x: x.view(np.int64).astype(np.int32),
    "double2hiint": lambda x: (x.view(np.int64) >> 32).astype(np.int32),
    "hiloint2double": lambda high, low: (
        high.astype(np.int64) << 32 | _unsigned(low).astype(np.int64)
    ).view(np.float64),
    "clz": _leading_zeros,
    "popc": lambda x: np.bitwise_count(_unsigned(x)),
    "ffs": _first_set,
    "brev": _reversed_bits,
    "byte_perm": _permuted_bytes,
    "mul24": _mul24,
    "umul24": _mul24,
}
"""Functions of the arguments as they come."""

_OF_SIGNED_AND_UNSIGNED: dict[str, Function] = {
    "mulhi": lambda x, y: x * y >> 32,
    "mul64hi": lambda x, y: x * y >> 64,
    "sad": lambda x, y, z: abs(x - y) + z,
    "hadd": lambda x, y: x + y >> 1,
    "rhadd": lambda x, y: x + y + 1 >> 1,
}
_AS_IS |= {f"{u}{n}": _wide(f) for n, f in _OF_SIGNED_AND_UNSIGNED.items() for u in ("", "u")}
_ROUNDED_TO_NEAREST: dict[str, Function] = {
    "add_rn": np.add,
    "sub_rn": np.subtract,
    "mul_rn": np.multiply,
    "div_rn": np.divide,
    "rcp_rn": np.reciprocal,
    "sqrt_rn": np.sqrt,
}
_AS_IS |= {f"{kind}{n}": f for n, f in _ROUNDED_TO_NEAREST.items() for kind in "fd"}
_AS_IS |= {"fma_rn": fma, "fmaf_rn": fma, "double2float_rn": lambda x: x}
_AS_IS |= {
    f"{source}2{target}_rn": lambda x: x
    for source in ("int", "uint", "ll", "ull")
    for target in ("float", "double")
}
_DIRECTIONS: dict[str, Function] = {"n": np.rint, "z": np.trunc, "d": np.floor, "u": np.ceil}
