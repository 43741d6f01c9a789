"""The actions of `triax cache` on the stores of tuned configs; each returns an exit status.

Files are trusted only after `store.read` or `Record.from_data` has checked them: what is not a
valid record is neither deleted nor imported.
"""

from __future__ import annotations

import sys
from pathlib import Path

from triax import settings
from triax.errors import ArgumentValueError
from triax.messages import counted, near_misses
from triax.tuning import store, typed_json
from triax.tuning.request import HOW_TO_TUNE
from triax.tuning.store import Record, Store

MAX_EXPORTED_BYTES = 64 << 20
NOTHING_YET = (
    "kernels with several configs are measured when they are first compiled on a GPU, or by "
    f"{HOW_TO_TUNE}"
)


def list_configs() -> int:
    """Prints one line per config."""
    status = count = total = 0
    for place in store.stores():
        try:
            found = list(place.records())
        except OSError as error:
            _complain(f"{place.name} cannot be read: {error}")
            status = 1
            continue
        for path, record in found:
            if record is None:
                print(f"{path.stem:44}  (not usable)  {place.name}")
                continue
            size = len(record.to_json())
            count, total = count + 1, total + size
            best = next((t.median_ms for t in record.timings if t.config == record.config), None)
            time = "" if best is None else f"{best:.4f} ms"
            where = f"[{record.key.gpu}, {place.name}]"
            line = f"{path.stem:44}  {record.date[:10]}  {size / 1e3:5.1f} kB  {time:>12}"
            print(f"{line}  {record.config}  {where}")
    if count:
        print(f"{counted(count, 'config')}, {total / 1e3:.1f} kB")
        if (target := settings.gpu()) is not None and target not in store.gpus():
            print(f"none is for TRIAX_GPU, {target!r}.{near_misses(target, store.gpus())}")
    elif not status:
        print(f"no tuned configs yet: {NOTHING_YET}")
    return status


def show_folder() -> int:
    """Prints the folder of the user's store, whether or not it exists yet."""
    print(store.user_store().folder)
    return 0


def show(name: str) -> int:
    """Prints the records of a kernel, or of a file by its name without the suffix."""
    shown, status = 0, 0
    for place in store.stores():
        for path, record in place.records():
            if record is not None and _is_named(path, record, name):
                shown += 1
                print(f"{path}\n{record.to_json()}")
            elif record is None and path.stem == name:
                shown, status = shown + 1, 1
                _complain(f"{path} is not usable: {_reason(path)}")
    return status if shown else _nothing_named(name)


def clear(name: str | None, everything: bool) -> int:
    """Deletes records from the user's store: those of a name, or all and the leftovers too."""
    place = store.user_store()
    found = list(place.records())
    usable = [(path, record) for path, record in found if record is not None]
    paths = [p for p, record in usable if name is None or _is_named(p, record, name)]
    count = len(paths)
    if name is not None and not paths:
        return _nothing_named(name)
    if name is None:
        leftovers = place.leftovers()
        if not found and not leftovers:
            print(f"nothing to delete: there are no tuned configs in {place.folder}")
            return 0
        if not everything and not _may_delete(count, place):
            return 1
        paths += leftovers
    for path in paths:
        path.unlink(missing_ok=True)
    print(f"deleted {counted(count, 'config')} from {place.folder}")
    if name is None and len(found) > count:
        _complain(f"left {len(found) - count} files there that hold no config of this version")
    return 0


def export(file: Path) -> int:
    """Writes the records of the user's store into one file, a JSON list."""
    records = [record.to_json() for _, record in store.user_store().records() if record is not None]
    file.write_text(f"[{','.join(records)}]\n", encoding="utf-8")
    nothing = "" if records else f": {NOTHING_YET}"
    print(f"wrote {counted(len(records), 'config')} to {file}{nothing}")
    return 0


def import_(file: Path) -> int:
    """Puts the records of an exported file into the user's store.

    Raises:
      ArgumentValueError: the file is not one that `export` wrote.
    """
    place = store.user_store()
    try:
        found = typed_json.parse(store.contents(file, MAX_EXPORTED_BYTES).decode())
        if not isinstance(found, list):
            raise ValueError("it is not a list")
    except ValueError as error:
        raise ArgumentValueError(
            f"Argument `file` must be a file that `triax cache export` wrote; {file} cannot be "
            f"read: {error}."
        ) from error
    added = 0
    for number, data in enumerate(found, 1):
        try:
            record = Record.from_data(data)
        except ValueError as error:
            _complain(f"entry {number} of {file} is not usable: {error}")
            continue
        try:
            place.put(record)
            added += 1
        except OSError as error:
            problem = f"{place.folder} cannot be written: {error.strerror}"
            _complain(f"{problem}. Set TRIAX_CACHE_DIR to a folder that can.")
            return 1
    print(f"added {counted(added, 'config')} to {place.folder}")
    return 0 if added == len(found) else 1


def _is_named(path: Path, record: Record, name: str) -> bool:
    return name in (path.stem, record.key.kernel)


def _reason(path: Path) -> str:
    try:
        store.read(path)
    except (OSError, ValueError) as error:
        return str(error)
    return "it was replaced meanwhile"


def _nothing_named(name: str) -> int:
    _complain(f"no tuned config named {name!r}; `triax cache list` shows the names")
    return 1


def _may_delete(count: int, place: Store) -> bool:
    """Asks for confirmation; an error if there is no terminal."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise ArgumentValueError(
            "`triax cache clear` without a name deletes everything, and nobody is here to ask. "
            "Give `--all`, or a name."
        )
    try:
        answer = input(f"delete all {counted(count, 'config')} from {place.folder}? [y/N] ")
    except EOFError:
        return False
    return answer.strip().lower() in ("y", "yes")


def _complain(text: str) -> None:
    print(f"triax: {text}", file=sys.stderr)
