"""One measurement at a time per GPU, over all processes of this user."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from triax.bridge import settings
from triax.bridge.errors import TuningError

logger = logging.getLogger(__name__)

_TIMEOUT_S = 120.0


@contextlib.contextmanager
def one_at_a_time(uuid: str) -> Iterator[None]:
    """Holds a GPU against other measuring processes of this user, however they see it.

    Raises:
      TuningError: another process holds it for too long, or the file cannot be locked.
    """
    # By the GPU's own number: CUDA_VISIBLE_DEVICES may give it another index in each process.
    folder = settings.cache_folder()
    path = (folder or Path(tempfile.gettempdir(), f"triax-{os.getuid()}")) / f"gpu-{uuid}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise _unusable(path, error) from error
    try:
        _wait_for_lock(descriptor, path)
        yield  # closing the file lets go of it, also when the process dies
    finally:
        os.close(descriptor)


def _wait_for_lock(descriptor: int, path: Path) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    said = False
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        except OSError as error:
            raise _unusable(path, error) from error
        if not said:
            said = True
            logger.warning("another process measures on this GPU; waiting for it (%s)", path)
        if time.monotonic() > deadline:
            raise TuningError(f"other processes have measured on this GPU for {_TIMEOUT_S:g} s")
        time.sleep(0.05)


def _unusable(path: Path, error: OSError) -> TuningError:
    return TuningError(
        f"{path}, which keeps processes from measuring at the same time, cannot be locked "
        f"({error}); set TRIAX_CACHE_DIR to a folder where that is possible"
    )
