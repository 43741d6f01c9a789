"""Dataclasses as readable JSON, and back with every type checked.

The types of the fields decide the format. Strings, ints, floats and None stay as they are, a tuple
of any length is a list, and a tuple of (name, value) pairs is an object, sorted by name. Input may
come from anywhere, so anything wrong with it is a `ValueError`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from typing import Any

_hints = typing.get_type_hints


def dumps(value: Any) -> str:
    """A dataclass as JSON."""
    return json.dumps(_encoded(type(value), value), indent=1) + "\n"


def parse(text: str) -> Any:
    """`json.loads`, but nesting that is too deep is a `ValueError` like other mistakes."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def build(kind: Any, value: Any, name: str = "it") -> Any:
    """Parsed JSON as an instance of `kind`: a dataclass, or the type of one of its fields.

    Raises:
      ValueError: something in `value` has another type; the message says where.
    """
    if dataclasses.is_dataclass(kind):
        return _build_fields(kind, _of_type(dict, value, name), name)
    if isinstance(kind, types.UnionType):  # a type, or None
        (present,) = (member for member in kind.__args__ if member is not type(None))
        return None if value is None else build(present, value, name)
    if (paired := _paired(kind)) is not None:
        pairs = _of_type(dict, value, name).items()
        checked = (
            (build(str, key, f"a name in {name}"), build(paired, item, f"{name}[{key!r:.80}]"))
            for key, item in pairs
        )
        return tuple(sorted(checked))
    if typing.get_origin(kind) is tuple:
        (item_kind, _) = typing.get_args(kind)
        items = enumerate(_of_type(list, value, name))
        return tuple(build(item_kind, item, f"{name}[{index}]") for index, item in items)
    if kind is float and type(value) is int:
        value = float(value) if abs(value) < 1 << 1023 else math.inf
    _of_type(kind, value, name)
    if kind is float and not math.isfinite(value):
        raise ValueError(f"{name} is {value}")
    if kind is str:
        value.encode()  # half a surrogate pair could not be printed
    return value


def _build_fields(kind: Any, value: dict[str, Any], name: str) -> Any:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if unknown := value.keys() - fields:
        raise ValueError(f"{name} has an unknown field {min(unknown)!r:.80}")
    needed = [n for n, field in fields.items() if field.default is dataclasses.MISSING]
    if missing := [n for n in needed if n not in value]:
        raise ValueError(f"{name} lacks {', '.join(missing)}")
    hints = _hints(kind)
    return kind(**{n: build(hints[n], item, n) for n, item in value.items()})


def _encoded(kind: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(kind):
        return {n: _encoded(hint, getattr(value, n)) for n, hint in _hints(kind).items()}
    if _paired(kind) is not None:
        return dict(value)
    if typing.get_origin(kind) is tuple:
        return [_encoded(typing.get_args(kind)[0], item) for item in value]
    return value


def _paired(kind: Any) -> Any:
    """The type T of a `tuple[tuple[str, T], ...]`, or None."""
    if typing.get_origin(kind) is not tuple:
        return None
    item = typing.get_args(kind)[0]
    return typing.get_args(item)[1] if typing.get_origin(item) is tuple else None


def _of_type(kind: type, value: Any, name: str) -> Any:
    if type(value) is not kind:  # a bool is an int to isinstance
        raise ValueError(f"{name} must be {_WORDS[kind]}; got {type(value).__name__}")
    return value


_WORDS = {
    bool: "true or false",
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "an int",
    float: "a number",
}
