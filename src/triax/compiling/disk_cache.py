"""Picks a folder that can be written for Triton's cache of compiled kernels.

Triton's default is in the user's home folder. A user without a home, as in a container under an
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
    """Moves Triton's cache if its folder cannot be written, unless ``TRITON_CACHE_DIR`` is set.

    Raises:
      CompilationError: no folder can be written.
    """
    with triton_private.front_end_lock:
        folder, problem = choose()
        if problem:
            logger.warning(
                "%s, so Triton caches kernels in %s; set TRITON_CACHE_DIR to use another folder",
                problem,
                folder,
            )
            triton_private.set_cache_folder(folder)


def choose() -> tuple[Path, str]:
    """Chooses the cache folder, and says why it is not Triton's own; "" if it is, or was given.

    Raises:
      CompilationError: no folder can be written.
    """
    own = triton_private.cache_folder()
    problem = why_not(own) if own.is_absolute() else "this user has no home folder"
    if triton_private.cache_folder_is_given() or not problem:
        return own, ""
    problems = [problem]
    places = settings.cache_folder, settings.temporary_folder, settings.new_temporary_folder
    for place in places:
        try:
            parent = place()
        except OSError as error:
            problems.append(str(error))
            continue
        if parent is not None:
            folder = Path(parent, "triton")
            if not (reason := why_not(folder)):
                return folder, problem
            problems.append(reason)
    raise CompilationError(
        f"Triton has no folder for its cache of compiled kernels: {'; '.join(problems)}. Set "
        "TRITON_CACHE_DIR to a folder that can be written."
    )


def why_not(folder: Path) -> str:
    """Says why a folder, or its nearest existing parent, cannot be written; "" if it can."""
    try:
        existing = next(place for place in (folder, *folder.parents) if place.exists())
        with tempfile.TemporaryFile(dir=existing):
            return ""
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror}"
