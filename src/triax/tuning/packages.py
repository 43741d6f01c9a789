"""The folders of tuned configs inside installed packages.

A package names itself in its metadata, under the entry point group `GROUP`, and has a folder
`FOLDER`. Neither it nor anything in it is imported.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import logging
from pathlib import Path

logger = logging.getLogger(__name__)

GROUP = "triax.records"
FOLDER = "triax_records"


@functools.cache  # metadata of all that is installed is slow to read
def folders() -> tuple[tuple[str, Path], ...]:
    """The entry points' names and folders, by name; those that name none are logged."""
    found = []
    try:
        points = sorted(
            importlib.metadata.entry_points(group=GROUP), key=lambda p: (p.name, p.value)
        )
    except Exception as error:  # another package's metadata may be damaged
        logger.warning("installed packages cannot be asked for tuned configs: %s", error)
        return ()
    for point in points:
        try:
            found.append((point.name, _folder(point.value)))
        except Exception as error:  # finding it may run an import hook of its own
            text = "tuned configs of package %r are ignored: its entry point of group %s is %r, %s"
            logger.warning(text, point.name, GROUP, point.value, error)
    return tuple(found)


def _folder(package: str) -> Path:
    """The folder of records in a package.

    Raises:
      ValueError: there is none, or it is not inside the package.
    """
    first, *rest = parts = package.split(".")
    if not all(part.isidentifier() for part in parts):
        raise ValueError("which must be the name of a package")
    # That of a package inside another would import the other.
    spec = importlib.util.find_spec(first)
    for location in (spec and spec.submodule_search_locations) or ():
        folder = Path(location, *rest, FOLDER)
        if folder.is_dir():
            if not folder.resolve().is_relative_to(Path(location).resolve()):
                raise ValueError(f"and {folder} leads out of it")
            return folder
    raise ValueError(f"and there is no folder {FOLDER} in a package of that name")
