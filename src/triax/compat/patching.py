"""Replaces attributes in Triton for a while, and undoes it.

Compiling and interpreting both patch Triton's modules and classes. A signal's exception may end
either at any instruction, even while it cleans up, so the old value is recorded before anything is
changed. `undo` can be interrupted too; the next call continues where it stopped.

There is one list for the process, guarded by `triax.compat.triton_lock`.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable
from typing import Any

ABSENT = object()
"""The value of an attribute that is not there."""


@dataclasses.dataclass(frozen=True)
class Change:
    """`holder.name` is to be `value`; of a dictionary, `holder[name]`."""

    holder: Any
    name: str
    value: Any


_originals: list[tuple[Any, dict[str, Any]]] = []
_snapshots: list[tuple[Any, dict[str, Any]]] = []


def replace(changes: Iterable[Change]) -> None:
    """Makes the changes; `undo` takes them back."""
    for change in changes:
        replace_all(change.holder, {change.name: change.value})


def replace_all(holder: Any, values: dict[str, Any]) -> None:
    """Makes `values` the attributes of those names; `undo` takes them back."""
    attributes = _attributes(holder)
    _originals.append((holder, {name: attributes.get(name, ABSENT) for name in values}))
    _assign(holder, values)


def watch(holders: Iterable[Any]) -> None:
    """Makes `undo` also revert what others change in `holders` from now on."""
    for holder in holders:
        _snapshots.append((holder, dict(_attributes(holder))))


def watched_changes() -> list[Change]:
    """What others have changed in the holders that are watched."""
    return [
        Change(holder, name, _attributes(holder).get(name, ABSENT))
        for holder, old in _snapshots
        for name in _differences(holder, old)
    ]


def undo() -> None:
    """Restores everything that was replaced, or changed in a holder that is watched."""
    while _snapshots:
        holder, old = _snapshots[-1]
        _assign(holder, {name: old.get(name, ABSENT) for name in _differences(holder, old)})
        _snapshots.pop()
    while _originals:
        _assign(*_originals[-1])
        _originals.pop()


def _differences(holder: Any, old: dict[str, Any]) -> list[str]:
    new = dict(_attributes(holder))
    return [n for n in new.keys() | old.keys() if new.get(n, ABSENT) is not old.get(n, ABSENT)]


def _attributes(holder: Any) -> Any:
    return holder if isinstance(holder, dict) else vars(holder)


def _assign(holder: Any, values: dict[str, Any]) -> None:
    attributes = _attributes(holder)
    if isinstance(holder, (dict, types.ModuleType)) and ABSENT not in values.values():
        attributes.update(values)  # at once: an interpreted launch replaces hundreds
        return
    for name, value in values.items():
        is_there = name in attributes
        if isinstance(holder, dict):
            if value is not ABSENT:
                holder[name] = value
            elif is_there:
                del holder[name]
        elif value is not ABSENT:
            setattr(holder, name, value)
        elif is_there:
            delattr(holder, name)
