"""Tuned configs on disk: one JSON file per key.

A file is written whole beside its place and renamed into it, so a reader sees the old one
or the new one. A file that does not parse, or is about another key, is a miss and a log
line. Stores are looked up in order: the user's, the read-only ones of
``TRIAX_CACHE_PATH``, the one shipped with the package.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from triax.bridge import settings
from triax.bridge.compat import versions
from triax.tuning.key import FORMAT, Key

logger = logging.getLogger(__name__)

SHIPPED = Path(__file__).parent / "shipped"


@dataclasses.dataclass(frozen=True)
class Timing:
    """What became of one candidate: its median in milliseconds, or why it has none."""

    config: str
    median_ms: float | None = None
    runs: int = 0
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class Record:
    """A tuned config and how it was found. `config` is one of ``key.candidates``."""

    key: Key
    config: str
    timings: tuple[Timing, ...]
    inputs: str
    date: str
    versions: tuple[tuple[str, str], ...]

    @classmethod
    def now(cls, key: Key, config: str, timings: Sequence[Timing], inputs: str) -> Record:
        """A record of today, by the installed versions."""
        names = ("triax", "jax", "jaxlib", "triton")
        found = tuple((name, versions.installed(name) or "") for name in names)
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return cls(key, config, tuple(timings), inputs, date, found)

    def to_json(self) -> str:
        data = dataclasses.asdict(self)
        data["key"] = {
            **data["key"],
            **{n: dict(getattr(self.key, n)) for n in ("arguments", "dtypes", "options")},
        }
        data["versions"] = dict(self.versions)
        return json.dumps(data, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Record:
        """Raises ValueError, KeyError or TypeError where the text is no record."""
        data = json.loads(text)
        if data["key"]["format"] != FORMAT:
            raise ValueError(f"format {data['key']['format']} is not {FORMAT}")
        fields = dict(data["key"])
        for name in ("arguments", "dtypes", "options"):
            fields[name] = tuple(sorted(fields[name].items()))
        fields["candidates"] = tuple(fields["candidates"])
        key = Key(**fields)
        record = cls(
            key=key,
            config=data["config"],
            timings=tuple(Timing(**timing) for timing in data["timings"]),
            inputs=data["inputs"],
            date=data["date"],
            versions=tuple(data["versions"].items()),
        )
        if record.config not in key.candidates:
            raise ValueError(f"its config {record.config!r} is not one of its candidates")
        return record


@dataclasses.dataclass(frozen=True)
class Store:
    """A folder of records."""

    folder: Path
    name: str

    def path(self, key: Key) -> Path:
        return self.folder / f"{key.name}.json"

    def find(self, key: Key) -> Record | None:
        """The record of a key, or None."""
        path = self.path(key)
        try:
            record = Record.from_json(path.read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("tuned config %s is not usable and is ignored: %s", path, error)
            return None
        if record.key != key:
            logger.warning("tuned config %s is about another key and is ignored", path)
            return None
        return record

    def put(self, record: Record) -> Path:
        """Writes a record, whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.path(record.key)
        descriptor, temporary = tempfile.mkstemp(dir=self.folder, prefix=".", suffix=".part")
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(record.to_json())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        return path

    def paths(self) -> list[Path]:
        """The files of all records, by name."""
        return sorted(self.folder.glob("[!.]*.json")) if self.folder.is_dir() else []

    def records(self) -> Iterator[tuple[Path, Record | None]]:
        """All files with what is in them; None where it is not usable."""
        for path in self.paths():
            try:
                yield path, Record.from_json(path.read_text())
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                yield path, None


def user_store() -> Store:
    """The store that tuning writes to."""
    return Store(settings.cache_folder(), "user store")


def stores() -> list[Store]:
    """All stores, in the order they are looked up."""
    read_only = [Store(path, f"store {path}") for path in settings.cache_path()]
    return [user_store(), *read_only, Store(SHIPPED, "shipped with Triax")]


def find(key: Key) -> tuple[Record, Store] | None:
    """The first record of a key in the stores."""
    for store in stores():
        record = store.find(key)
        if record is not None:
            return record, store
    return None


def describe(record: Record) -> dict[str, Any]:
    """A record as a short dictionary for people."""
    best = next((t.median_ms for t in record.timings if t.config == record.config), None)
    return {
        "kernel": record.key.kernel,
        "gpu": record.key.gpu,
        "config": record.config,
        "median_ms": best,
        "arguments": dict(record.key.arguments),
        "date": record.date,
    }
