"""Builds dataclasses from JSON, and checks every type.

Fields are strings, ints, floats, None, tuples of one type, dicts by name, and dataclasses. The
input is untrusted, so every mistake in it is a `ValueError`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from typing import Any

_WORDS = {dict: "an object", list: "a list", str: "a string", int: "an int", float: "a number"}
_WORDS[bool] = "true or false"


def parse(text: str) -> Any:
    """Parses JSON. Nesting that is too deep is a `ValueError`, like other mistakes."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def build(type_: Any, value: Any, name: str = "it") -> Any:
    """Builds an instance of `type_`, a dataclass or the type of a field, from parsed JSON.

    Raises:
      ValueError: something in `value` has another type; the message says where.
    """
    if isinstance(type_, types.UnionType):  # a type, or None
        return None if value is None else build(type_.__args__[0], value, name)
    container, items = typing.get_origin(type_), typing.get_args(type_)
    if type_ is float and type(value) is int:
        value = float(value) if abs(value) < 1 << 1023 else math.inf
    plain = dict if dataclasses.is_dataclass(type_) else container or type_
    actual, plain = type(value), list if plain is tuple else plain
    if actual is not plain:  # a bool is an int to isinstance
        raise ValueError(f"{name} must be {_WORDS[plain]}; got {actual.__name__}")
    if dataclasses.is_dataclass(type_):
        fields = {field.name: field for field in dataclasses.fields(type_)}
        if unknown := value.keys() - fields:
            raise ValueError(f"{name} has an unknown field {min(unknown)!r:.80}")
        needed = [n for n, field in fields.items() if field.default is dataclasses.MISSING]
        if missing := [n for n in needed if n not in value]:
            raise ValueError(f"{name} lacks {', '.join(missing)}")
        hints = typing.get_type_hints(type_)
        return typing.cast(Any, type_)(**{n: build(hints[n], v, n) for n, v in value.items()})
    if container is dict:
        named = {build(str, key, f"a name in {name}"): item for key, item in value.items()}
        return {key: build(items[1], item, f"{name}[{key!r:.80}]") for key, item in named.items()}
    if container is tuple:
        return tuple(build(items[0], item, f"{name}[{i}]") for i, item in enumerate(value))
    if type_ is float and not math.isfinite(value):
        raise ValueError(f"{name} is {value}")
    if type_ is str:
        value.encode()  # raises for half a surrogate pair, which could not be printed
    return value
