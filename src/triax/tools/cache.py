"""The actions of `triax cache` on the stores of tuned configs; each returns an exit status.

Files are trusted only after `Store.read` has checked them: a file that is not a valid record is not
deleted.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TypeGuard

from triax.messages import counted
from triax.tuning import store
from triax.tuning.store import Record

NOTHING_YET = (
    "kernels with several configs are measured when they are first compiled on a GPU, or by "
    "`triax tune FILE:FUNCTION` or `triax tune package.module:FUNCTION`"
)


def list_configs() -> int:
    """Prints one line per config."""
    status = count = total = 0
    for place in store.stores():
        try:
            records = list(place.records())
        except OSError as error:
            _complain(f"{place.name} cannot be read: {error}")
            status = 1
            continue
        for path, record in records:
            if isinstance(record, Exception):
                print(f"{path.stem:44}  (not usable: {record})  {place.name}")
                continue
            size = len(record.to_json())
            count, total = count + 1, total + size
            best = next((t.median_ms for t in record.timings if t.config == record.config), None)
            time = "" if best is None else f"{best:.4f} ms"
            where = f"[{record.key.gpu}, Triton {record.key.triton}, {place.name}]"
            line = f"{path.stem:44}  {record.date[:10]}  {size / 1e3:5.1f} kB  {time:>12}"
            print(f"{line}  {record.config}  {where}")
    if count:
        print(f"{counted(count, 'config')}, {total / 1e3:.1f} kB")
    elif not status:
        print(f"no tuned configs yet: {NOTHING_YET}")
    return status


def show(name: str) -> int:
    """Prints the records of a kernel, or of a file by its name without the suffix."""
    shown, status = 0, 0
    for place in store.stores():
        for path, record in place.records():
            if _is_named(record, path, name):
                shown += 1
                print(f"{path}\n{record.to_json()}")
            elif path.stem == name:
                shown, status = shown + 1, 1
                _complain(f"{path} is not usable: {record}")
    return status if shown else _nothing_named(name)


def clear(name: str | None) -> int:
    """Deletes records from the user's store, by name; for None all of them, with the leftovers."""
    place = store.user_store()
    records = list(place.records())
    paths = [path for path, record in records if _is_named(record, path, name)]
    if name is not None and not paths:
        return _nothing_named(name)
    count = len(paths)
    if name is None:
        paths += place.leftovers()
    for path in paths:
        path.unlink(missing_ok=True)
    print(f"deleted {counted(count, 'config')} from {place.folder}")
    if name is None and len(records) > count:
        _complain(f"left {len(records) - count} files there that hold no config of this version")
    return 0


def _is_named(record: Record | Exception, path: Path, name: str | None) -> TypeGuard[Record]:
    """Whether a record is usable and has this name; None stands for every name."""
    return isinstance(record, Record) and name in (None, path.stem, record.key.kernel)


def _nothing_named(name: str) -> int:
    _complain(f"no tuned config named {name!r}; `triax cache list` shows the names")
    return 1


def _complain(text: str) -> None:
    print(f"triax: {text}", file=sys.stderr)
