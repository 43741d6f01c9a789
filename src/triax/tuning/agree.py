"""Makes the processes of one job use the same config per key, found by one of them.

Every config is published in JAX's key-value service before it is used; the first published config
counts for all processes. A process that is about to measure claims the key first, so that no other
process measures it; processes that cannot measure wait for the result instead of publishing their
fallback. There is neither a leader nor a barrier, and all waits have a time limit: if the process
that has claimed a key dies, each other process waits for it once, and then goes on.
"""

from __future__ import annotations

import logging
import time

from triax.compat import jax_private

logger = logging.getLogger(__name__)

_TIMEOUT_MS = 60_000
# For a claimed key: compiling, waiting for the GPU and measuring can all be slow.
_CLAIMED_S = 180.0
# How long a process that cannot measure waits for another to claim the key.
_UNCLAIMED_S = 10.0


def published(name: str) -> str | None:
    """The config that another process has published for a key, or None."""
    client = jax_private.key_value_client()
    return None if client is None else client.find(_path("config", name))


def is_job() -> bool:
    """Whether there are other processes to agree with."""
    return jax_private.key_value_client() is not None


def agree(name: str, config: str) -> str:
    """Publishes a config for a key; returns the config that the job uses."""
    client = jax_private.key_value_client()
    if client is None:
        return config
    return client.set_first(_path("config", name), config, _TIMEOUT_MS)


def settle(name: str, *, able: bool) -> str | None:
    """Waits for another process's config for a key; None means that this process must decide.

    A process that is `able` to measure gets None if it claims the key, first or after a `release`,
    or if the process with the claim takes too long. A process that is not able gets None when no
    other process is likely to decide.
    """
    client = jax_private.key_value_client()
    if client is None:
        return None
    me = str(client.process)
    start = unclaimed_since = time.monotonic()
    if not able:
        client.set_first(_path("unable", name, me), me, _TIMEOUT_MS)
    pause, said = 0.01, False
    while (config := client.find(_path("config", name))) is None:
        claim = _path("claim", name)
        claimed_by = client.claim(claim, me) if able else client.find(claim)
        now = time.monotonic()
        if claimed_by is None:  # so this process is not able
            nobody_can = client.count(_path("unable", name)) >= client.num_processes
            if nobody_can or now - unclaimed_since > _UNCLAIMED_S:
                return None
        elif able and claimed_by == me:
            return None
        else:
            unclaimed_since = now
            text = f"process {claimed_by} of this job has not decided on a config of {name} "
            if now - start > _CLAIMED_S:
                logger.warning("%sfor %g s", text, _CLAIMED_S)
                return None
            if now - start > 10 and not said:
                said = True
                logger.warning("%syet: waiting for it", text)
        time.sleep(pause)
        pause = min(1.5 * pause, 0.25)
    return config


def release(name: str) -> None:
    """Withdraws this process's claim on a key, so that another can try."""
    client = jax_private.key_value_client()
    if client is None:
        return
    try:
        if client.find(_path("claim", name)) == str(client.process):
            client.delete(_path("claim", name))
    except Exception as error:  # another error is being raised, and must not be hidden
        logger.warning("the claim on %s could not be withdrawn: %s", name, error)


def _path(group: str, *parts: str) -> str:
    return "/".join(("triax", group, *parts))
