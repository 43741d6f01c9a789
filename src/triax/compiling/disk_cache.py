"""Where Triton keeps what it has compiled: a folder that can be written, if there is any.

Triton takes a folder in the user's home. A user without one, as in a container that runs under an
arbitrary user id, would get a folder called "~" in the working directory, or an error.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

from triax import settings
from triax.compat import triton_private
from triax.errors import CompilationError

logger = logging.getLogger(__name__)


def prepare() -> None:
    """Gives Triton another folder if its own cannot be written, unless ``TRITON_CACHE_DIR`` is set.

    Raises:
      CompilationError: there is no folder that can be written.
    """
    with triton_private.front_end_lock:
        folder, problem = choose()
        if problem:
            logger.warning(
                "%s, so Triton keeps what it compiles in %s; TRITON_CACHE_DIR names another folder",
                problem,
                folder,
            )
            triton_private.set_cache_folder(folder)


def choose() -> tuple[Path, str]:
    """The folder, and what is wrong with Triton's own, "" if it is that or a given one.

    Raises:
      CompilationError: there is no folder that can be written.
    """
    own = triton_private.cache_folder()
    problem = why_not(own) if own.is_absolute() else "this user has no home folder"
    if triton_private.cache_folder_is_given() or not problem:
        return own, ""
    problems = [problem]
    places = settings.cache_folder, settings.temporary_folder, settings.new_temporary_folder
    for place in places:
        try:
            found = place()
        except OSError as error:
            problems.append(str(error))
            continue
        if found is not None:
            folder = Path(found, "triton")
            if not (reason := why_not(folder)):
                return folder, problem
            problems.append(reason)
    raise CompilationError(
        f"Triton has no folder to keep what it compiles in: {'; '.join(problems)}. Set "
        "TRITON_CACHE_DIR to a folder that can be written."
    )


def why_not(folder: Path) -> str:
    """Why files cannot be made in a folder, or in the one that it is to be made in; else ""."""
    try:
        existing = next(place for place in (folder, *folder.parents) if place.exists())
        with tempfile.TemporaryFile(dir=existing):
            return ""
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror}"
