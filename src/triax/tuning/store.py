"""Tuned configs on disk: one JSON file per key.

A file is written under a temporary name and renamed into place, so a reader sees either the old or
the new one. A file that is not a valid record, or is for another key, is ignored and logged. Stores
are searched in order: the user's, the read-only ones in ``TRIAX_CACHE_PATH``, those in packages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import logging
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from triax import settings
from triax.compat import versions
from triax.tuning import packages, typed_json
from triax.tuning.key import FORMAT, Key

logger = logging.getLogger(__name__)

_MAX_BYTES = 4 << 20  # per file; a record of a hundred candidates has about 10 kB
_PART_PREFIX = ".triax-"
_PART_AGE_S = 60


@dataclasses.dataclass(frozen=True)
class Timing:
    """The result of one candidate: its median in milliseconds, or why it has none.

    `out_of_time` means that the candidate did not end or was not tried in time, or that this
    machine failed; the candidate may still be fine.
    """

    config: str
    median_ms: float | None = None
    runs: int = 0
    error: str | None = None
    out_of_time: bool = False


@dataclasses.dataclass(frozen=True)
class Record:
    """A tuned config and how it was found. `config` is one of ``key.candidates``."""

    key: Key
    config: str
    timings: tuple[Timing, ...]
    inputs: str
    date: str
    versions: dict[str, str]

    @classmethod
    def now(cls, key: Key, config: str, timings: Sequence[Timing], inputs: str) -> Record:
        """A record with today's date and the installed versions."""
        installed = {name: versions.installed(name) or "" for name in ("jax", "jaxlib", "triton")}
        installed["triax"] = versions.__version__  # which may be imported from a checkout
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return cls(key, config, tuple(timings), inputs, date, installed)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Record:
        """Parses a record; raises ValueError if the text is not a valid one."""
        data = typed_json.parse(text)
        match data:
            case {"key": {"format": int(format_)}} if format_ != FORMAT:
                raise ValueError(f"format {format_} is not {FORMAT}")
        record: Record = typed_json.build(cls, data)
        if not record.key.kernel.isidentifier():  # it becomes a part of a file's name
            raise ValueError(f"its kernel {record.key.kernel!r:.80} is not the name of a function")
        if not 0 <= record.key.moved_bytes < 1 << 63:
            raise ValueError("its number of bytes moved is out of range")
        if record.config not in record.key.candidates:
            raise ValueError(f"its config {record.config!r:.80} is not one of its candidates")
        return record


def _contents(path: Path) -> bytes:
    """Reads an untrusted file.

    Raises:
      OSError: the file cannot be opened or read.
      ValueError: the file is larger than `_MAX_BYTES`, or not a regular file.
    """
    # Opening a pipe that nobody writes to would wait forever without O_NONBLOCK.
    with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is not a regular file")
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ValueError(f"it is larger than {_MAX_BYTES} bytes")
    return data


@dataclasses.dataclass(frozen=True)
class Store:
    """A folder of records. In a package's folder, links are refused: they may lead anywhere."""

    folder: Path
    name: str
    in_package: bool = False

    def path(self, key: Key) -> Path:
        return self.folder / f"{key.name}.json"

    def find(self, key: Key) -> Record | None:
        """Finds the record of a key, or of the nearest key that may share its config."""
        try:
            paths = self.paths()
        except OSError as error:
            logger.warning("store %s cannot be read and is ignored: %s", self.folder, error)
            return None
        ends = [path.stem.rpartition("-") for path in paths]
        sizes = [int(size) for family, _, size in ends if family == key.family and size.isdecimal()]
        keys = [dataclasses.replace(key, moved_bytes=size) for size in sizes]
        near = sorted(filter(key.is_near, keys), key=lambda other: key.ratio(other.moved_bytes))
        return next(filter(None, map(self._read, near)), None)

    def read(self, path: Path) -> Record:
        """Reads the record in one of the store's files.

        Raises:
          OSError: the file cannot be opened or read.
          ValueError: the file is not a valid record, not a regular file, or too large.
        """
        if self.in_package and path.is_symlink():
            raise ValueError("it is a link")
        return Record.from_json(_contents(path).decode())

    def _read(self, key: Key) -> Record | None:
        path = self.path(key)
        try:
            record = self.read(path)
            if record.key == key:
                return record
            logger.warning("tuned config %s is for another key and is ignored", path)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            logger.warning("tuned config %s is not usable and is ignored: %s", path, error)
        return None

    def put(self, record: Record) -> Path:
        """Writes a record, completely or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.path(record.key)
        temporary = self.folder / f"{_PART_PREFIX}{secrets.token_hex(8)}.part"
        # Readable by others, if the umask allows, because a store can be shared.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
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
        """The files of all records, sorted by name; none if the folder does not exist yet."""
        return [p for p in self._files() if p.suffix == ".json" and not p.name.startswith(".")]

    def records(self, kernel: str | None = None) -> Iterator[tuple[Path, Record | Exception]]:
        """All files, or the files of a kernel, each with its record or why it has none."""
        for path in self.paths():
            if kernel is None or path.name.startswith(f"{kernel}-"):
                try:
                    yield path, self.read(path)
                except (OSError, ValueError) as error:
                    yield path, error

    def leftovers(self) -> list[Path]:
        """Temporary files older than a minute, left behind by killed writers."""
        now = time.time()
        old = []
        for path in self._files():
            if path.name.startswith(_PART_PREFIX) and path.suffix == ".part":
                with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
                    old += [path] if now - path.lstat().st_mtime > _PART_AGE_S else []
        return old

    def _files(self) -> list[Path]:
        try:
            return sorted(self.folder.iterdir())
        except FileNotFoundError:
            return []


def user_store() -> Store:
    """The store that tuning writes to.

    Raises:
      FileNotFoundError: the user has no home folder.
    """
    if (folder := settings.cache_folder()) is None:
        raise FileNotFoundError(
            "this user has no home folder to keep tuned configs in; set TRIAX_CACHE_DIR"
        )
    return Store(folder, "user store")


def stores() -> list[Store]:
    """All stores, in the order of the search."""
    return [*_in_order()]


def _in_order() -> Iterator[Store]:
    if settings.cache_folder() is not None:
        yield user_store()
    for path in settings.cache_path():
        yield Store(path, f"store {path}")
    for name, folder in packages.folders():
        if isinstance(folder, Path):
            yield Store(folder, f"package {name}", in_package=True)


def known(kernel: str | None = None) -> Iterator[tuple[Record, str]]:
    """All usable records, or the records of a kernel, each with the name of its store."""
    for place in stores():
        with contextlib.suppress(OSError):
            for _, record in place.records(kernel):
                if isinstance(record, Record):
                    yield record, place.name


def gpus() -> list[str]:
    """The names of the GPUs that stored configs are for."""
    return sorted({record.key.gpu for record, _ in known()} - {""})


def find(key: Key) -> tuple[Record, Store] | None:
    """Finds the first record in the stores whose config a key may use, with its store."""
    searched = ((store.find(key), store) for store in _in_order())
    return next(((record, store) for record, store in searched if record is not None), None)
