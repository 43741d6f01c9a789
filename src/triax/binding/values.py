"""Compile-time values, hashable and compared exactly, and the configs made of them."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import numpy as np

from triax.binding import exact

CONFIG_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
"""The compiler options that a Triton config can set."""


@dataclasses.dataclass(frozen=True)
class Static:
    """A compile-time value with exact equality, so that 1, 1.0 and True differ: see `exact`."""

    value: Any = dataclasses.field(compare=False)
    _key: tuple[Any, ...] = dataclasses.field(init=False)
    _others: list[Any] = dataclasses.field(init=False, compare=False)

    def __post_init__(self) -> None:
        others: list[Any] = []
        plain = type(self.value) in exact.PLAIN
        text = repr(self.value) if plain else exact.spell(self.value, others)
        # `_others` keeps the objects alive whose ids are in the key.
        vars(self).update(_others=others, _key=(text, *map(id, others)))

    def __repr__(self) -> str:
        return repr(self.value)


Values: TypeAlias = tuple[tuple[str, Static], ...]


def pack_values(values: dict[str, Any]) -> Values:
    """A dictionary as a hashable tuple, sorted by name."""
    return tuple((name, Static(values[name])) for name in sorted(values))


def is_constexpr(value: Any) -> bool:
    """Whether a value is one of Triton's `constexpr`s."""
    return type(value).__name__ == "constexpr"


def plain(value: Any) -> Any:
    """Unwraps Triton's `constexpr`, and turns a NumPy scalar into a Python one."""
    value = value.value if is_constexpr(value) else value
    return value.item() if isinstance(value, np.generic) else value


def describe(*values: Values) -> str:
    """Values as readable text, "BLOCK=64, num_warps=4"; functions by their names."""
    texts = {n: getattr(s.value, "__qualname__", s.value) for part in values for n, s in part}
    return ", ".join(f"{name}={text}" for name, text in texts.items()) or "default"


@dataclasses.dataclass(frozen=True)
class Config:
    """One way to compile a kernel: its meta-parameters and the compiler's options.

    `num_warps`, `num_stages`, `num_ctas` and `maxnreg` are Triton's; None takes Triton's default.
    `number` distinguishes configs of a kernel whose texts are equal.
    """

    values: Values = ()
    num_warps: int | None = None
    num_stages: int | None = None
    num_ctas: int | None = None
    maxnreg: int | None = None
    number: int = 1

    def options(self) -> dict[str, int]:
        """The compiler options that this config sets."""
        return {n: v for n in CONFIG_OPTIONS if (v := getattr(self, n)) is not None}

    def __str__(self) -> str:
        options = tuple((n, Static(v)) for n, v in self.options().items())
        text = describe(self.values, options)
        return text if self.number == 1 else f"{text} ({self.number})"
