"""Numbers with bounds on their errors: what each element of a result may be.

Running error analysis (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section
3.3): beside each number in float64 stands the most that an implementation's may be away from it.
A sum of n products in any order is off by gamma_n times the sum of their magnitudes, where
``gamma_n = n * u / (1 - n * u)`` (section 3.1); a rounding adds u times the result. Platforms may
take subnormal numbers for zeros, which adds multiples of the smallest normal number. There is no
other tolerance: where the exact result is zero by definition, so is the bound.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import ml_dtypes
import numpy as np

from triax.testing import assert_close

Array = np.ndarray[Any, Any]
U32 = 2.0**-24
TINY = 2.0**-126
"""The smallest normal number of float32 and bfloat16."""
_LARGEST = 2.0**126  # sums beyond may overflow on their way


@functools.cache
def unit(dtype: Any) -> float:
    """The unit roundoff."""
    return float(ml_dtypes.finfo(np.dtype(dtype)).eps) / 2


@functools.cache
def _lost(dtype: Any) -> float:
    """The most that is lost to underflow in one rounding: GPUs and CPUs keep the subnormals of
    float16 and of 8 bits when they round to them, but may flush float32's."""
    info = ml_dtypes.finfo(np.dtype(dtype))
    return float(info.smallest_subnormal) if float(info.smallest_normal) > TINY else TINY


def gamma(n: int, u: float) -> float:
    """Higham's (3.4): of n roundings, in whatever order."""
    return n * u / (1 - n * u)


def sum_unit(path: str, dtype: Any) -> float:
    """What stands for u in sums of products of a dtype.

    Tensor cores cut off what others round, and align products first (Fasi, Higham, Mikaitis and
    Pranesh, Numerical behavior of NVIDIA tensor cores, PeerJ Computer Science 7, 2021): twice two
    more. Of 8-bit floats Hopper's keep about 14 bits.
    """
    size = np.dtype(dtype).itemsize
    if path != "triton" or size >= 4 or np.dtype(dtype).kind in "iu":
        return U32
    return 4 * U32 if size == 2 else 2.0**-13


@dataclasses.dataclass
class Near:
    """Numbers in float64 and the most that results may be away from them; () is of exact ones."""

    value: Array
    error: Array = dataclasses.field(default_factory=lambda: np.zeros(()))

    def __getitem__(self, index: Any) -> Near:
        return Near(self.value[index], self.error[index] if self.error.ndim else self.error)

    def __mul__(self, other: Near) -> Near:
        """A product in float32."""
        value, a, b = self.value * other.value, abs(self.value), abs(other.value)
        error = a * other.error + self.error * (b + other.error)
        return _rounded(value, error, U32, TINY)

    def __add__(self, other: Near) -> Near:
        """A sum in float32."""
        return _rounded(self.value + other.value, self.error + other.error, U32, TINY)

    @property
    def T(self) -> Near:
        return Near(self.value.T, self.error.T)


def exact(array: Any) -> Near:
    return Near(np.asarray(array).astype(np.float64))


def _rounded(value: Array, error: Array, u: float, lost: float) -> Near:
    some = (value != 0) | (error != 0)
    return Near(value, np.where(some, error + u * (abs(value) + error) + lost, 0))


def rounded(x: Near, dtype: Any) -> Near:
    """Rounded to a dtype; what may overflow there may be anything in what is made of it."""
    found = _rounded(x.value, x.error, unit(dtype), _lost(dtype))
    most = float(ml_dtypes.finfo(np.dtype(dtype)).max)
    over = np.isfinite(x.value) & (abs(x.value) + x.error > most)
    return Near(found.value, np.where(over, np.inf, found.error))


def nudged(value: Array, relative: Any, size: Any = None) -> Near:
    """Numbers that are off by so many units of float32, of their own or of another size."""
    size = abs(value) if size is None else size
    return Near(value, np.where((value != 0) | (size != 0), relative * U32 * size + TINY, 0))


def matmul(a: Near, b: Near, u: float = U32, terms: int | None = None) -> Near:
    """Sums of products; `terms` is how many are added with unit roundoff u, by default all."""
    n = a.value.shape[-1]
    if not n:
        return Near(a.value @ b.value)
    left, right = abs(a.value), abs(b.value)
    size = left @ right
    factor = gamma(n, U32) + (gamma(min(terms or n, n), u) if u != U32 else 0)
    flushed = n * TINY * (1 + _largest(left) + _largest(right))
    error = factor * size + np.where(size == 0, 0, flushed)
    if a.error.ndim:
        error = error + a.error @ (right + b.error)
    if b.error.ndim:
        error = error + left @ b.error
    value = a.value @ b.value
    return Near(value, np.where(np.isfinite(value) & (size > _LARGEST), np.inf, error))


def _largest(sizes: Array) -> float:
    return float(np.max(sizes, initial=0, where=np.isfinite(sizes)))


@dataclasses.dataclass
class Some:
    """A result of which only a part is specified."""

    of: Any
    where: Array


@dataclasses.dataclass
class Numbers:
    """An exact result, of which any NaN will do: hardware and XLA choose other bits for it."""

    of: Array


def fault(name: str, got: Any, want: Any) -> str | None:
    """What is wrong with a result, if anything is. Arrays are wanted bit for bit."""
    got = np.asarray(got)
    where: Array | None = None
    if isinstance(want, Numbers):
        want = want.of
        if got.shape == want.shape:
            where = ~(np.isnan(got.astype(np.float32)) & np.isnan(want.astype(np.float32)))
    if isinstance(want, Some):
        want, where = want.of, want.where
    shape = want.value.shape if isinstance(want, Near) else want.shape
    if got.shape != shape:
        return f"{name} has shape {got.shape}, not {shape}"
    if not isinstance(want, Near):
        if got.dtype != want.dtype:
            return f"{name} is {got.dtype}, not {want.dtype}"
        bad = _bits(got) != _bits(want)
        return _say(name, bad if where is None else bad & where, got, want, None)
    wide, value = got.astype(np.float64), want.value
    error = np.broadcast_to(want.error, value.shape)
    with np.errstate(invalid="ignore"):
        good = abs(wide - value) <= error
        good |= wide == value
        good |= np.isnan(wide) & np.isnan(value)
        most = float(ml_dtypes.finfo(got.dtype).max)
        good |= (wide == np.sign(value) * np.inf) & (abs(value) + error > most * (1 - U32))
        # It may have overflowed on its way, but does not come back from beyond the largest number.
        lost = np.isfinite(value) & ~np.isfinite(error)
        good |= lost & ((abs(value) <= most) | ~np.isfinite(wide))
    return _say(name, ~good if where is None else ~good & where, got, value, error)


def _bits(array: Array) -> Array:
    words = np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
    return words.reshape(array.shape)  # which has one dimension more of a single number


def _say(name: str, bad: Array, got: Array, want: Array, error: Array | None) -> str | None:
    if not bad.any():
        return None
    first = tuple(np.argwhere(bad)[0].tolist())
    within = "" if error is None else f" within {error[first]:.3g}"
    return (
        f"{name}{list(first)} is {got[first]}, not {want[first]}{within}; "
        f"{int(bad.sum())} of {bad.size} are wrong"
    )


def assert_rounded_once(
    actual: Any, expected: Any, *, terms: int = 1, size: float = 0.0, err_msg: str = ""
) -> None:
    """`assert_close`, and every element is the nearest of its dtype to a sum in float32 or wider.

    That is more than the former sees in small dtypes, such as a sum that was rounded before it was
    scaled. `size` is that of the largest term, where it is more than the largest sum.
    """
    assert_close(actual, expected, terms=terms, err_msg=err_msg)
    got, want = (np.asarray(array).astype(np.float64) for array in (actual, expected))
    finite = np.isfinite(got) & np.isfinite(want)
    got, want = got[finite], want[finite]
    kind = ml_dtypes.finfo(actual.dtype)
    power = np.floor(np.log2(np.maximum(np.abs(want), float(kind.smallest_normal))))
    nearest = float(kind.eps) * 2.0**power / 2
    summed = 2e-6 * math.sqrt(terms) * max(size, np.max(np.abs(want), initial=0))
    worst = np.max(np.abs(got - want) - nearest - summed, initial=0)
    assert worst <= 0, (
        f"{err_msg} {worst:.3g} further away than rounding to {actual.dtype} takes it"
    )
