"""Helpers for testing kernels, Triax's own and yours.

Moves are compared bit for bit with `assert_same_bits`; sums against a float64 reference
with `assert_close`, whose tolerance follows from the dtype and the number of terms.
`hostile_values` gives inputs with NaN, infinities and signed zeros, and `poison` fills freed device
memory with NaN, which reveals elements that a kernel forgets to write. `checked` makes the
interpreter look for races between programs, and for uninitialised reads; `sanitized` compiles
kernels with one of Triton's sanitizers, for a GPU.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from triax import messages, settings
from triax.compat import triton_private, versions
from triax.errors import ArgumentTypeError, ArgumentValueError

__all__ = [
    "TOLERANCES",
    "assert_close",
    "assert_same_bits",
    "checked",
    "hostile_values",
    "poison",
    "sanitized",
]

TOLERANCES: dict[str, float] = {
    "float64": 1e-14,
    "float32": 2e-6,
    "bfloat16": 1e-2,
    "float16": 2e-3,
    "float8_e4m3fn": 8e-2,
    "float8_e5m2": 1.6e-1,
}
"""The tolerance of each dtype of floats, by its name.

It is the unit roundoff times a small constant, which allows for one rounding of a float32
accumulator and a few operations of the kernel.
"""


def assert_close(actual: Any, expected: Any, *, terms: int = 1, err_msg: str = "") -> None:
    """Asserts that `actual` is `expected` up to rounding, by largest and by RMS error.

    The tolerance is ``TOLERANCES[dtype] * sqrt(terms)`` relative to the largest finite
    magnitude of `expected`; the root mean square error must be at most a third of it. NaNs and
    infinities must be in the same places, and zeros must be zeros if only zeros are expected.

    Args:
      actual: an array of a floating-point dtype, which picks the tolerance.
      expected: the reference, float64, of the same shape.
      terms: how many values were summed into each element.
      err_msg: put in front of the message.

    Raises:
      AssertionError: the arrays differ.
      ArgumentTypeError, ArgumentValueError: `actual` is not an array of floats, an array is traced,
        or `terms` is not an int of at least 0.
    """
    dtype = getattr(actual, "dtype", None)
    if dtype is None or np.dtype(dtype).name not in TOLERANCES:
        raise ArgumentTypeError(
            f"Argument `actual` must be an array of one of {', '.join(TOLERANCES)}; got "
            f"{messages.shown(actual)}. Compare other dtypes with `assert_same_bits`."
        )
    if isinstance(terms, bool) or not isinstance(terms, (int, np.integer)) or terms < 0:
        raise ArgumentValueError(
            "Argument `terms` must be an int of at least 0, how many values were summed into each "
            f"element; got {messages.shown(terms)}."
        )
    for argument, value in (("actual", actual), ("expected", expected)):
        if isinstance(value, jax.core.Tracer):
            raise ArgumentTypeError(
                f"Argument `{argument}` must have values; got {messages.shown(value)}. Compare "
                "outside of `jax.jit`, `vmap` and `grad`."
            )
    dtype = np.dtype(dtype)
    got = np.asarray(actual).astype(np.float64)
    want = np.asarray(expected, dtype=np.float64)
    assert got.shape == want.shape, f"{err_msg} shape {got.shape} is not {want.shape}"
    digits = 17 if dtype.itemsize == 8 else 9

    def place(errors: np.ndarray) -> str:
        at = np.unravel_index(int(errors.argmax()), errors.shape)
        return f"at {tuple(map(int, at))} it is {got[at]:.{digits}g}, not {want[at]:.{digits}g}"

    other = (np.isnan(got) != np.isnan(want)) | (np.isinf(want) & (got != want))
    assert not other.any(), f"{err_msg} {np.sum(other)} NaNs or infinities differ: {place(other)}"
    finite = np.isfinite(want)
    if not finite.any():
        return
    scale = max(float(np.max(np.abs(want[finite]))), np.finfo(np.float32).tiny)
    error = np.where(finite, np.abs(got - np.where(finite, want, 0)), 0) / scale
    limit = TOLERANCES[dtype.name] * math.sqrt(terms)
    worst, rms = float(error.max()), float(np.sqrt(np.mean(error[finite] ** 2)))
    where = f"{place(error)}; errors are relative to the largest magnitude expected, {scale:.3g}"
    assert worst <= limit, f"{err_msg} largest error {worst:.3g} of {dtype} > {limit:.3g}: {where}"
    assert rms <= limit / 3, f"{err_msg} RMS error {rms:.3g} of {dtype} > {limit / 3:.3g}: {where}"


def assert_same_bits(actual: Any, expected: Any, err_msg: str = "") -> None:
    """Asserts that two arrays have the same shape, dtype and bits, NaN payloads included."""
    got, want = np.asarray(actual), np.asarray(expected)
    assert got.dtype == want.dtype, f"{err_msg} dtype {got.dtype} is not {want.dtype}"
    assert got.shape == want.shape, f"{err_msg} shape {got.shape} is not {want.shape}"
    got_bits = np.ascontiguousarray(got).reshape(-1).view(np.uint8)
    want_bits = np.ascontiguousarray(want).reshape(-1).view(np.uint8)
    np.testing.assert_array_equal(got_bits, want_bits, err_msg=err_msg)


def hostile_values(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Random values, with NaN, infinities and signed zeros among them if the dtype has them."""
    if not isinstance(rng, np.random.Generator):
        raise ArgumentTypeError(
            f"Argument `rng` must be a NumPy generator; got {messages.shown(rng)}. Use "
            "np.random.default_rng(0)."
        )
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


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Checks interpreted kernels in the block for errors that otherwise show only on a GPU.

        with triax.testing.checked():
            y = op(x, implementation="interpret")

    The interpreter runs programs one after another, but a GPU runs them at the same time. In the
    block it is an error if the order of two programs matters but is not determined (a race), or if
    an output is loaded, or updated with an atomic, before it is written.

    A race is two programs that access one element, one with a plain store that changes it, the
    other with a load, a store or an atomic. A store of the bits that are already there changes
    nothing, so programs may store equal values. Atomics do not race with each other, nor with plain
    loads, and they order programs: with the semantics "acquire" and "release" (Triton's default is
    both), accesses guarded by a lock or a counter are not a race. Two lanes of one store that write
    different values to one element are also a race. Accesses of one program to one element count as
    ordered.

    A function that was traced outside the block is traced again inside, and vice versa. Checking
    takes 24 bytes for each element that a kernel may write. Kernels on a GPU are not checked.

    Raises:
      DataRace, UninitializedRead: (of `triax.errors`) from the call of the kernel; under
        `jit` JAX raises its own exception with the same text.
    """
    with settings.checked_runs(True):
        yield


@contextlib.contextmanager
def sanitized(sanitizer: settings.Sanitizer) -> Iterator[None]:
    """Compiles kernels in the block with one of Triton's sanitizers, on a GPU.

        with triax.testing.sanitized("consan"):
            jax.block_until_ready(op(x))

    `"consan"` (concurrency) follows every access to shared memory and every barrier: a block that
    another warp, TMA or a tensor core may still be writing, a barrier that is not initialised, a
    deadlock. A finding is a device assertion: its text is printed to stderr, the call fails, and
    the process can use the GPU no longer. So run it in a process of its own.

    `"fpsan"` (floating point) computes with integers in place of floats: sums and products are
    exact, modulo a power of two, and `exp` and its like are functions that keep some identities.
    The results have no meaning as numbers, but two kernels of one formula have the same bits,
    whatever order they sum in: compare them with `assert_same_bits`. A wrong or missing operand, or
    a value that is rounded in another place, changes the bits.

    A function that was traced outside the block is traced again inside, and vice versa. Kernels
    with several configs use the first that compiles; nothing is measured. A sanitized kernel is
    slow and needs more memory, some more shared memory too. XLA's own operations are not sanitized.

    Args:
      sanitizer: "consan" or "fpsan".

    Raises:
      ArgumentValueError: `sanitizer` is neither.
      MissingDependencyError, UnsupportedError: there is no Triton, or one older than 3.9. Also
        (UnsupportedError) from the call of a kernel that the interpreter runs.
    """
    messages.check_choice("sanitizer", sanitizer, get_args(settings.Sanitizer))
    what = "`triax.testing.sanitized`"
    triton_private.require(versions.SANITIZERS, what, "Upgrade Triton, or use `checked`.")
    with settings.sanitizer(sanitizer):
        yield


def poison(num_bytes: int, device: Any | None = None) -> None:
    """Fills `num_bytes` of device memory with NaN and frees it again.

    Buffers that XLA allocates next are likely to reuse it, so an element that a kernel does not
    write is NaN (0x7FC00000 repeated) instead of a leftover that happens to be right.
    """
    if isinstance(num_bytes, bool) or not isinstance(num_bytes, (int, np.integer)) or num_bytes < 0:
        raise ArgumentTypeError(
            f"Argument `num_bytes` must be an int of at least 0; got {messages.shown(num_bytes)}."
        )
    block = jax.device_put(jnp.full((num_bytes // 4,), jnp.nan, jnp.float32), device)
    block.block_until_ready()
    block.delete()
