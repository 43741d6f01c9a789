"""The CPU's arithmetic as IEEE 754 has it, which is how GPUs compute."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

_STANDARD = ctypes.c_void_p(-1)  # FE_DFL_ENV
_MOST_BYTES = 64  # more than an `fenv_t` has


@contextlib.contextmanager
def standard() -> Iterator[None]:
    """Computes with subnormal numbers, which XLA's threads on CPUs take for zeros."""
    libm, before = ctypes.CDLL(None), ctypes.create_string_buffer(_MOST_BYTES)
    libm.fegetenv(before)
    libm.fesetenv(_STANDARD)
    try:
        yield
    finally:
        libm.fesetenv(before)
