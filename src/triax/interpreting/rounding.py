"""Sets the CPU's arithmetic to IEEE 754's, which is how GPUs compute."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

_STANDARD = ctypes.c_void_p(-1)  # FE_DFL_ENV
_MOST_BYTES = 64  # larger than any `fenv_t`


@contextlib.contextmanager
def standard() -> Iterator[None]:
    """A context with subnormal numbers, which XLA's CPU threads flush to zero."""
    libm, before = ctypes.CDLL(None), ctypes.create_string_buffer(_MOST_BYTES)
    libm.fegetenv(before)
    libm.fesetenv(_STANDARD)
    try:
        yield
    finally:
        libm.fesetenv(before)
