"""Collects the tuned configs that a program uses, and saves them."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from triax.compat import jax_private
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.messages import shown
from triax.tuning import policy
from triax.tuning.store import Record, Store

logger = logging.getLogger(__name__)


class Records:
    """Tuned configs, one per key, as `record` collects them.

    Iterating gives the records that `triax cache show` prints, in order of first use: each has
    `key` (kernel, GPU, versions, dtypes, bytes), `config`, and `timings`, every candidate's median
    in milliseconds.
    """

    def __init__(self) -> None:
        self._by_key: dict[str, Record] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Record]:
        return iter([*self._by_key.values()])

    def __repr__(self) -> str:
        lines = (f"{r.key.kernel}: {r.config}  [{r.key.gpu}]" for r in self)
        return "\n".join(lines) or "no tuned configs"

    def add(self, record: Record) -> None:
        """Adds a tuned config, in place of one with the same key."""
        self._by_key[record.key.name] = record

    def save(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Writes a file for each tuned config into a folder, created if needed.

        The folder is a store, for ``TRIAX_CACHE_PATH`` or to ship in a package. If there are no
        tuned configs, nothing is written, and a warning is logged.

        Returns:
          The paths of the files.

        Raises:
          ArgumentTypeError, ArgumentValueError: `folder` is not a path, or is a file.
          OSError: the folder cannot be written.
        """
        if not isinstance(folder, (str, os.PathLike)):
            raise ArgumentTypeError(
                f"Argument `folder` must be the path of a folder; got {shown(folder)}."
            )
        if Path(folder).is_file():
            raise ArgumentValueError(
                f"Argument `folder` must be the path of a folder; {os.fspath(folder)!r} is a file."
            )
        place = Store(Path(folder), "saved")
        if not self:
            running_on = jax_private.default_platform()
            why = "Programs compiled before the block of `record` are not lowered again in it."
            if running_on not in ("gpu", "cuda", None):
                why = f"This process runs on {running_on}, and configs are measured on a GPU."
            text = "nothing is saved in %s: no call got a config that was measured. %s"
            logger.warning(text, place.folder, why)
        return [place.put(record) for record in self]


@contextlib.contextmanager
def record() -> Iterator[Records]:
    """Collects the tuned configs that calls get in the block, measured there or known before.

        with triax.record() as records:
            step.lower(params, batch).compile()
        records.save("tuned")

    A call gets its config when its program is lowered: programs compiled before the block are not
    lowered again. Calls of all threads count. Configs without timings are left out: a call's only
    config, a first config taken unmeasured, and the choice of another process of a job.

    Returns:
      A context manager that gives `Records`.
    """
    records = Records()
    policy.listeners.append(records.add)
    try:
        yield records
    finally:
        policy.listeners.remove(records.add)
