"""Helpers for testing kernels, Triax's own and yours.

Moves are compared bit for bit with `assert_same_bits`; sums against a float64 reference
with `assert_close`, whose tolerance follows from the dtype and the number of terms.
`hostile_values` gives inputs with NaN, infinities and signed zeros, and `poison` fills
freed device memory with NaN, so that what a kernel forgets to write shows.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Unit roundoff of the output's dtype times a small constant: what one rounding of a float32
# accumulator, plus a few operations of the kernel, may cost. The one table for all tests.
TOLERANCES: dict[str, float] = {
    "float64": 1e-14,
    "float32": 2e-6,
    "bfloat16": 1e-2,
    "float16": 2e-3,
    "float8_e4m3fn": 8e-2,
    "float8_e5m2": 1.6e-1,
}


def assert_close(actual: Any, expected: Any, *, terms: int = 1, err_msg: str = "") -> None:
    """Asserts that `actual` is the rounded `expected`, on the maximum and in the mean.

    The tolerance is ``TOLERANCES[dtype] * sqrt(terms)`` relative to the largest finite
    magnitude of `expected`; the root mean square error must be below a third of it. NaNs and
    infinities must stand in the same places.

    Args:
      actual: an array of a floating-point dtype, which picks the tolerance.
      expected: the reference, float64, of the same shape.
      terms: how many values were summed into each element.
      err_msg: put in front of the message.
    """
    dtype = np.dtype(actual.dtype)
    got = np.asarray(actual).astype(np.float64)
    want = np.asarray(expected, dtype=np.float64)
    assert got.shape == want.shape, f"{err_msg} shape {got.shape} is not {want.shape}"
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want), err_msg=err_msg)
    infinite = np.isinf(want)
    np.testing.assert_array_equal(got[infinite], want[infinite], err_msg=err_msg)
    finite = np.isfinite(want)
    if not finite.any():
        return
    scale = max(float(np.max(np.abs(want[finite]))), np.finfo(np.float32).tiny)
    error = np.abs(got[finite] - want[finite]) / scale
    limit = TOLERANCES[dtype.name] * math.sqrt(terms)
    worst, rms = float(error.max()), float(np.sqrt(np.mean(error**2)))
    assert worst <= limit, f"{err_msg} largest error {worst:.3g} of {dtype} is over {limit:.3g}"
    assert rms <= limit / 3, f"{err_msg} RMS error {rms:.3g} of {dtype} is over {limit / 3:.3g}"


def assert_same_bits(actual: Any, expected: Any, err_msg: str = "") -> None:
    """Asserts that two arrays have the same shape, dtype and bits, NaN payloads included."""
    got, want = np.asarray(actual), np.asarray(expected)
    assert got.dtype == want.dtype, f"{err_msg} dtype {got.dtype} is not {want.dtype}"
    assert got.shape == want.shape, f"{err_msg} shape {got.shape} is not {want.shape}"
    got_bits = np.ascontiguousarray(got).reshape(-1).view(np.uint8)
    want_bits = np.ascontiguousarray(want).reshape(-1).view(np.uint8)
    np.testing.assert_array_equal(got_bits, want_bits, err_msg=err_msg)


def hostile_values(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Random values with NaN, infinities and signed zeros among them where the dtype has them."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)
    values = rng.standard_normal(shape).astype(dtype)
    flat = values.reshape(-1)
    special = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0]).astype(dtype)
    count = min(len(special), flat.size // 4)
    if count:
        flat[rng.choice(flat.size, count, replace=False)] = special[:count]
    return values


def poison(num_bytes: int, device: Any | None = None) -> None:
    """Fills `num_bytes` of device memory with NaN and frees it again.

    Buffers that XLA allocates next are likely to hold it, so an element a kernel does not
    write is NaN (0x7FC00000 repeated) rather than a leftover that happens to be right.
    """
    block = jnp.full((num_bytes // 4,), jnp.nan, jnp.float32)
    if device is not None:
        block = jax.device_put(block, device)
    block.block_until_ready()
    block.delete()
