"""Compile-time values, hashable and compared exactly, and the configs made of them."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

CONFIG_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
"""The compiler options that a Triton config can set."""


class Static:
    """A compile-time value that equals only itself.

    In Python ``1 == 1.0 == True``, ``0.0 == -0.0`` and ``nan != nan``, but a kernel compiled for
    one of these must not be used for another.
    """

    __slots__ = ("_key", "value")

    def __init__(self, value: Any):
        self.value = value
        self._key = _identity(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return repr(self.value)


def _identity(value: Any) -> Any:
    if isinstance(value, float):
        return (float, value.hex())
    if isinstance(value, tuple):
        return (type(value), tuple(_identity(v) for v in value))
    if hasattr(type(value), "cache_key"):  # a jitted function, whose own hash parses its source
        return (type(value), id(value))
    return (type(value), value)


Values: TypeAlias = tuple[tuple[str, Static], ...]


def pack_values(values: dict[str, Any]) -> Values:
    """A dictionary as a hashable tuple, sorted by name."""
    return tuple((name, Static(values[name])) for name in sorted(values))


def unpack_values(values: Values) -> dict[str, Any]:
    """The inverse of `pack_values`."""
    return {name: static.value for name, static in values}


def describe(values: dict[str, Any]) -> str:
    """Values as people read them: "BLOCK=64, num_warps=4"; a function by its name alone."""
    texts = (f"{name}={getattr(value, '__qualname__', value)}" for name, value in values.items())
    return ", ".join(texts) or "default"


@dataclasses.dataclass(frozen=True)
class Config:
    """One way to compile a kernel: its meta-parameters and the compiler's options.

    `num_warps`, `num_stages`, `num_ctas` and `maxnreg` are Triton's; None leaves
    the choice to Triton's default.
    """

    values: Values = ()
    num_warps: int | None = None
    num_stages: int | None = None
    num_ctas: int | None = None
    maxnreg: int | None = None

    def options(self) -> dict[str, int]:
        """The compiler options that this config sets."""
        return {n: v for n in CONFIG_OPTIONS if (v := getattr(self, n)) is not None}

    def __str__(self) -> str:
        return describe({**unpack_values(self.values), **self.options()})
