"""Allows one measurement at a time per GPU among all processes of this user."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from triax import settings
from triax.errors import TuningError

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def one_at_a_time(uuid: str, timeout_s: float = 120.0) -> Iterator[None]:
    """Keeps this user's other processes from measuring on a GPU inside the block.

    The lock file is in the cache folder, which the processes share; if files cannot be locked
    there, it is in this user's temporary folder.

    Raises:
      TuningError: another process holds the lock for too long, or no file can be locked.
    """
    # By UUID, because CUDA_VISIBLE_DEVICES can give the GPU another index in each process.
    with contextlib.ExitStack() as stack:
        reasons = []
        for place in (settings.cache_folder, settings.temporary_folder):
            try:
                if (folder := place()) is not None:
                    _lock(stack, folder / f"gpu-{uuid}.lock", timeout_s)
                    break
            except OSError as error:
                reasons.append(str(error))
        else:
            raise TuningError(
                "no file can be locked to keep other processes from measuring at the same time "
                f"({'; '.join(reasons)}); set TRIAX_CACHE_DIR to a folder where files can be locked"
            )
        yield  # closing the file releases the lock, even if the process dies


def _lock(stack: contextlib.ExitStack, path: Path, timeout_s: float) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_RDWR, 0o644)
    except PermissionError:  # another user's file in a shared store: reading is enough
        descriptor = os.open(path, flags | os.O_RDONLY)
    stack.callback(os.close, descriptor)
    deadline = time.monotonic() + timeout_s
    said = False
    while True:
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not said:
            said = True
            logger.warning("waiting for another process that measures on this GPU (%s)", path)
        if time.monotonic() > deadline:
            raise TuningError(f"other processes have measured on this GPU for {timeout_s:g} s")
        time.sleep(0.05)
