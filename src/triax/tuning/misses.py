"""Finds the known configs that are nearest to a call which none fits, and says what differs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from triax.messages import short
from triax.tuning.key import SIZE_FACTOR, Key
from triax.tuning.store import Record

_MOST_SHOWN = 3


def _entries(field: str) -> Callable[[Key, Key], str]:
    """A function that lists the entries of a dict field in which a key differs from another."""

    def text(key: Key, other: Key) -> str:
        mine, others = getattr(key, field), getattr(other, field)
        return ", ".join(f"{n}={v}" for n, v in mine.items() if others.get(n) != v) or "none"

    return text


# The fields that may differ, each with a prefix and its value in a key compared with another, or ""
# if the value would say nothing. Fields that a user can act on come first.
_SAID: dict[str, tuple[str, Callable[[Key, Key], str]]] = {
    "triton": ("Triton ", lambda key, _: key.triton),
    "gpu": ("", lambda key, _: key.gpu or "a GPU without a name"),
    "compute_capability": ("compute capability ", lambda key, _: str(key.compute_capability)),
    "source": ("another source of the kernel or its helpers", lambda *_: ""),
    "candidates": ("other configs to choose from", lambda *_: ""),
    "options": ("options ", _entries("options")),
    "dtypes": ("dtypes ", _entries("dtypes")),
    "arguments": ("", _entries("arguments")),
    "moved_bytes": ("bytes moved: ", lambda key, _: str(key.moved_bytes)),
}


class Near(NamedTuple):
    """A known record, the name of its store, and the fields in which its key differs."""

    fields: tuple[str, ...]
    record: Record
    place: str


def nearest(key: Key, known: Iterable[tuple[Record, str]]) -> list[Near]:
    """Returns the `known` records of a key's kernel that have another key, the nearest first.

    The records come with the names of their stores.
    """
    near = [Near(_differing(key, record.key), record, place) for record, place in known]
    near = [one for one in near if one.fields and one.record.key.kernel == key.kernel]
    order = [*_SAID].index

    def distance(one: Near) -> tuple[int, list[int], float]:
        ratio = key.ratio(one.record.key.moved_bytes)
        return len(one.fields), [*map(order, one.fields)], ratio

    return sorted(near, key=distance)


def of_the_card(key: Key, near: Iterable[Near]) -> list[Near]:
    """Returns those that were measured on a key's GPU, or, if it names none, on its architecture.

    What was best there is a better guess than the first config, whatever else differs.
    """
    card = key.compute_capability
    return [
        one
        for one in near
        if one.record.key.compute_capability == card and key.gpu in ("", one.record.key.gpu)
    ]


def described(key: Key, near: Sequence[Near]) -> str:
    """Says what differs in the first of some records, and in those that differ alike.

    The text is such as "known for Triton 3.6.0, this is 3.9.0 (package norms)", or "" if there are
    none.
    """
    if not near:
        return ""
    fields, first = near[0].fields, near[0].record.key
    alike = [(one.record.key, one.place) for one in near if one.fields == fields]
    texts = []
    for name in fields:
        before, value = _SAID[name]
        theirs = _listed(_quoted(value(other, key)) for other, _ in alike)
        ours = _quoted(value(key, first))
        texts.append(before + theirs + (f", this is {ours}" if ours else ""))
    where = _listed(place for _, place in alike)
    return f"known for {'; '.join(texts)} ({where})"


def _differing(key: Key, other: Key) -> tuple[str, ...]:
    if key.ratio(other.moved_bytes) <= SIZE_FACTOR:
        key = dataclasses.replace(key, moved_bytes=other.moved_bytes)
    return tuple(name for name in _SAID if getattr(other, name) != getattr(key, name))


def _quoted(text: str) -> str:
    """A text from an untrusted file, on one line and not too long."""
    return short(text)[1:-1]


def _listed(texts: Iterable[str]) -> str:
    """The first few distinct texts."""
    unique = [*dict.fromkeys(texts)]
    return ", ".join(unique[:_MOST_SHOWN] + ["…"] * (len(unique) > _MOST_SHOWN))
