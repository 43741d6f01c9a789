"""The folders of tuned configs inside installed packages.

A package names itself in its metadata, under the entry point group `GROUP`, and has a folder
`FOLDER`. The package is not imported.
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


@functools.cache  # the metadata of all installed packages is slow to read
def folders() -> tuple[tuple[str, Path | str], ...]:
    """The entry points' names and folders, sorted; or why there is no folder, which is logged."""
    places: list[tuple[str, Path | str]] = []
    try:
        points = sorted(
            importlib.metadata.entry_points(group=GROUP), key=lambda p: (p.name, p.value)
        )
    except Exception as error:  # another package's metadata may be damaged
        logger.warning("the metadata of installed packages cannot be read: %s", error)
        return ()
    for point in points:
        try:
            places.append((point.name, _folder(point.value)))
        except Exception as error:  # finding a package may run its own import hook
            why = f"its entry point of group {GROUP} is {point.value!r}, {error}"
            logger.warning("tuned configs of package %r are ignored: %s", point.name, why)
            places.append((point.name, why))
    return tuple(places)


def _folder(package: str) -> Path:
    """The folder of records in a package.

    Raises:
      ValueError: there is no such folder, or it is not inside the package.
    """
    first, *rest = parts = package.split(".")
    if not all(part.isidentifier() for part in parts):
        raise ValueError("which must be the name of a package")
    # Only the outermost package, because finding an inner one imports the packages around it.
    spec = importlib.util.find_spec(first)
    for location in (spec and spec.submodule_search_locations) or ():
        folder = Path(location, *rest, FOLDER)
        if folder.is_dir():
            if not folder.resolve().is_relative_to(Path(location).resolve()):
                raise ValueError(f"and {folder} leads out of it")
            return folder
    raise ValueError(f"and there is no folder {FOLDER} in a package of that name")
