"""Where the processes of a `jax.distributed` job meet."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def address() -> Iterator[str]:
    """An address of this host whose port nobody else gets, though the job's service can have it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as the service does
        held.bind(("", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"
