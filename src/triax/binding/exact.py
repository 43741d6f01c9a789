"""Tells Python values apart where `==` would call them the same.

In Python ``1 == 1.0 == True``, ``0.0 == -0.0`` and ``nan != nan``, also inside containers such as a
dataclass; but a kernel compiled for one of these values must not be used for another.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

PLAIN = frozenset({bool, int, str, bytes, types.NoneType})
"""Types whose values differ in their `repr` if they differ at all."""
NAMED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
_DEEPEST = 16


def spell(value: Any, others: list[Any], depth: int = 0) -> str:
    """Spells a value and all its members as text.

    Objects that a text cannot tell apart are appended to `others`: types, functions, and objects
    compared by identity. Two values are the same if their texts are equal and `others` identical.
    """
    type_: Any = type(value)
    if type_ in PLAIN:
        return repr(value)
    if type_ is float:
        return float.hex(value)
    if isinstance(value, NAMED) or is_jitted(value) or depth > _DEEPEST:
        others.append(value)
        return "_"
    others.append(type_)
    inner = functools.partial(spell, others=others, depth=depth + 1)
    members = [f"{name}={inner(member)}" for name, member in _attributes(value)]
    if isinstance(value, (int, str, bytes)):
        base = next(base for base in (int, str, bytes) if isinstance(value, base))
        members.append(base.__repr__(value))
    elif isinstance(value, (float, complex)):
        members += (value.real.hex(), value.imag.hex())
    elif isinstance(value, (tuple, list)):
        members += map(inner, value)
    elif isinstance(value, dict):
        members += (f"{inner(key)}: {inner(member)}" for key, member in value.items())
    elif isinstance(value, (set, frozenset)):
        spelt: list[tuple[str, list[Any]]] = []
        for member in value:
            unspelt: list[Any] = []
            spelt.append((spell(member, unspelt, depth + 1), unspelt))
        for text, unspelt in sorted(spelt, key=lambda pair: pair[0]):
            members.append(text)
            others += unspelt
    elif isinstance(value, (np.generic, np.ndarray)) and not value.dtype.hasobject:
        content = hashlib.sha256(value.tobytes()).hexdigest()
        members.append(f"{value.dtype.str}{value.shape}{content}")
    elif type_.__eq__ is object.__eq__:
        others.append(value)
    elif not members and type_.__hash__ is not None and type_.__repr__ is not object.__repr__:
        members.append(repr(value))
    elif not members:
        others.append(value)
    return f"({', '.join(members)})"


def is_jitted(value: Any) -> bool:
    """Whether a value is a function for Triton's compiler, whose `hash` would parse its source."""
    return hasattr(type(value), "cache_key")


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(value, "__dict__", {}).items()
    type_: Any = type(value)
    for name, slot in _slots(type_):
        with contextlib.suppress(AttributeError):  # never set
            yield name, slot.__get__(value)


@functools.lru_cache(256)
def _slots(type_: Any) -> tuple[tuple[str, Any], ...]:
    members = [pair for owner in type_.__mro__ for pair in vars(owner).items()]
    return tuple(pair for pair in members if isinstance(pair[1], types.MemberDescriptorType))
