"""Replaces attributes in Triton for a while, and undoes it.

Compiling and interpreting both patch Triton's modules and classes. A signal's exception may end
either at any instruction, even while it cleans up, so the old value is recorded before anything is
changed. `undo` can be interrupted too; the next call continues where it stopped.

There is one list for the process, guarded by `triax.compat.triton_lock`.
"""

from __future__ import annotations

import dataclasses
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


_originals: list[Change] = []
_snapshots: list[tuple[Any, dict[str, Any]]] = []


def replace(changes: Iterable[Change]) -> None:
    """Makes the changes; `undo` takes them back."""
    for change in changes:
        old = _attributes(change.holder).get(change.name, ABSENT)
        _originals.append(dataclasses.replace(change, value=old))
        _assign(change)


def watch(holders: Iterable[Any]) -> None:
    """Makes `undo` also revert what others change in `holders` from now on."""
    for holder in holders:
        _snapshots.append((holder, dict(_attributes(holder))))


def watched_changes() -> list[Change]:
    """What others have changed in the holders that are watched."""
    return [change for holder, old in _snapshots for change in _differences(holder, old)]


def undo() -> None:
    """Restores everything that was replaced, or changed in a holder that is watched."""
    while _snapshots:
        holder, old = _snapshots[-1]
        for change in _differences(holder, old):
            _assign(dataclasses.replace(change, value=old.get(change.name, ABSENT)))
        _snapshots.pop()
    while _originals:
        _assign(_originals[-1])
        _originals.pop()


def _differences(holder: Any, old: dict[str, Any]) -> list[Change]:
    new = dict(_attributes(holder))
    return [
        Change(holder, name, new.get(name, ABSENT))
        for name in new.keys() | old.keys()
        if new.get(name, ABSENT) is not old.get(name, ABSENT)
    ]


def _attributes(holder: Any) -> Any:
    return holder if isinstance(holder, dict) else vars(holder)


def _assign(change: Change) -> None:
    is_there = change.name in _attributes(change.holder)
    if isinstance(change.holder, dict):
        if change.value is not ABSENT:
            change.holder[change.name] = change.value
        elif is_there:
            del change.holder[change.name]
    elif change.value is not ABSENT:
        setattr(change.holder, change.name, change.value)
    elif is_there:
        delattr(change.holder, change.name)
