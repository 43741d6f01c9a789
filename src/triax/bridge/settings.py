"""What the environment may say to Triax, validated in one place.

Each setting is read when it is needed, so that a test or a program may set it
late. A value that cannot be is a `SettingError` that lists what can.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from triax.bridge.errors import ArgumentValueError, SettingError

TUNING_MODES = ("auto", "cached", "strict", "off", "runtime")

_tuning_mode: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "triax_tuning_mode", default=None
)


def tuning_mode() -> str:
    """The mode of the innermost `tuning` block, else ``TRIAX_AUTOTUNE``, else "auto"."""
    if (mode := _tuning_mode.get()) is not None:
        return mode
    mode = os.environ.get("TRIAX_AUTOTUNE", "auto")
    if mode not in TUNING_MODES:
        raise SettingError(
            f"TRIAX_AUTOTUNE must be one of {', '.join(TUNING_MODES)}; got {mode!r}."
        )
    return mode


def check_tuning_mode(mode: object, argument: str = "mode") -> str:
    """Returns `mode` if it is one, else raises `ArgumentValueError`."""
    if mode not in TUNING_MODES:
        raise ArgumentValueError(
            f"Argument `{argument}` must be one of {', '.join(TUNING_MODES)}; got {mode!r}."
        )
    return str(mode)


@contextlib.contextmanager
def tuning(mode: str) -> Iterator[None]:
    """Sets the tuning mode for the calls traced inside the block.

    The mode is read when a function is traced, like any other static choice: a
    function that is already compiled keeps the mode it was traced under.

    Args:
      mode: "auto", "cached", "strict", "off" or "runtime".

    Raises:
      ArgumentValueError: `mode` is none of these.
    """
    token = _tuning_mode.set(check_tuning_mode(mode))
    try:
        yield
    finally:
        _tuning_mode.reset(token)


def enforce_autotuning() -> bool:
    """``TRIAX_ENFORCE_AUTOTUNING``: fail rather than fall back to one fixed config."""
    value = os.environ.get("TRIAX_ENFORCE_AUTOTUNING", "0")
    if value not in ("0", "1"):
        raise SettingError(f"TRIAX_ENFORCE_AUTOTUNING must be 0 or 1; got {value!r}.")
    return value == "1"


def cuda_arch() -> int | None:
    """``TRIAX_CUDA_ARCH`` as a compute capability (90 for "90", "9.0", "sm_90"), or None."""
    value = os.environ.get("TRIAX_CUDA_ARCH", "").strip()
    if not value:
        return None
    match = re.fullmatch(r"(?:sm_?)?(\d{1,2})\.?(\d)a?", value)
    if match is None:
        raise SettingError(
            "TRIAX_CUDA_ARCH must be a CUDA compute capability such as 90, 9.0 or sm_90; "
            f"got {value!r}."
        )
    return int(match.group(1)) * 10 + int(match.group(2))


def cache_folder() -> Path:
    """Where tuned configs are kept: ``TRIAX_CACHE_DIR``, else triax/ in the user's cache folder."""
    if folder := os.environ.get("TRIAX_CACHE_DIR"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "triax"


def cache_path() -> list[Path]:
    """Read-only stores of tuned configs: ``TRIAX_CACHE_PATH``, separated as in PATH."""
    return [Path(p) for p in os.environ.get("TRIAX_CACHE_PATH", "").split(os.pathsep) if p]


def tuning_bytes() -> int | None:
    """``TRIAX_TUNING_BYTES``: the most GPU memory that measuring may take, or None."""
    return _number("TRIAX_TUNING_BYTES", int, None)


def tuning_timeout_s() -> float:
    """``TRIAX_TUNING_TIMEOUT``: seconds that one run, or one compilation, of a config may take."""
    return _number("TRIAX_TUNING_TIMEOUT", float, 10.0)


def _number(name: str, kind: type, default: Any) -> Any:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        value = kind(text)
    except ValueError:
        value = -1
    if not value > 0:
        raise SettingError(f"{name} must be a positive number; got {text!r}.")
    return value
