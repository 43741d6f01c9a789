"""Replaces attributes in Triton for a while, and restores them.

Compiling and interpreting both patch Triton's modules and classes. Ctrl-C, or another signal, can
raise an exception at any instruction of either, even in a clean-up. So old values are recorded
before anything is changed. `undo` can be interrupted too; the next `undo` continues where it
stopped.

The process has one list of changes, guarded by `triax.compat.triton_lock`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

ABSENT = object()
"""Stands for the value of an attribute that does not exist."""


class Change(NamedTuple):
    """A new `value` for `holder.name`, or for `holder[name]` of a dictionary."""

    holder: Any
    name: str
    value: Any


Changes: TypeAlias = list[tuple[Any, dict[str, Any]]]
"""For each holder, the new values of its attributes by name. See `grouped`."""

_to_undo: list[Callable[[], Changes]] = []


def grouped(changes: Iterable[Change]) -> Changes:
    """Groups changes by their holders."""
    by_holder: dict[int, tuple[Any, dict[str, Any]]] = {}
    for holder, name, value in changes:
        by_holder.setdefault(id(holder), (holder, {}))[1][name] = value
    return list(by_holder.values())


def replace(changes: Changes) -> None:
    """Makes the changes, until `undo`."""
    old = [
        (holder, {name: now.get(name, ABSENT) for name in values})
        for holder, values in changes
        for now in [holder if isinstance(holder, dict) else vars(holder)]
    ]
    _to_undo.append(lambda: old)
    _make(changes)


def watch(holders: Iterable[Any]) -> Callable[[], Changes]:
    """Makes `undo` also revert changes that other code makes to `holders` from now on.

    Returns a function that lists these changes so far.
    """
    before = [(holder, dict(vars(holder))) for holder in holders]
    _to_undo.append(lambda: [(h, _difference(dict(vars(h)), old)) for h, old in before])
    return lambda: [(h, _difference(old, dict(vars(h)))) for h, old in before]


def undo() -> None:
    """Restores everything that was replaced, or changed in a holder that is watched."""
    while _to_undo:
        _make(_to_undo[-1]())
        _to_undo.pop()


def _difference(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Returns the values that turn the attributes `old` into `new`."""
    names = {**old, **new}
    changed = [name for name in names if old.get(name, ABSENT) is not new.get(name, ABSENT)]
    return {name: new.get(name, ABSENT) for name in changed}


def _make(changes: Changes) -> None:
    for holder, values in changes:
        is_dict = isinstance(holder, dict)
        now: Any = holder if is_dict else vars(holder)
        if (is_dict or isinstance(holder, types.ModuleType)) and ABSENT not in values.values():
            now.update(values)  # in one go: an interpreted launch replaces hundreds
            continue
        for name, value in values.items():
            if value is ABSENT and name not in now:
                continue
            if is_dict:
                holder.pop(name) if value is ABSENT else holder.update({name: value})
            elif value is ABSENT:
                delattr(holder, name)
            else:
                setattr(holder, name, value)
