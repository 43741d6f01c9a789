"""The processes of one job use one config per key, and one of them finds it.

Every config is published in JAX's key-value service before it is used; the first to publish
decides, the others take what stands there. Who is about to measure claims the key first, so
that nobody else does, and so that a process that cannot measure waits for the result
instead of publishing its fallback. There is no leader and no barrier: all waiting is
bounded, and a process that dies blocks nobody for good.
"""

from __future__ import annotations

import logging
import time

from triax.compat import jax_private

logger = logging.getLogger(__name__)

_TIMEOUT_MS = 60_000
# For a claimed key: compiling, waiting for the GPU and measuring may all take their time.
_CLAIMED_S = 180.0
# For a claim: how far behind another process may be that can measure where this one cannot.
_UNCLAIMED_S = 10.0


def published(name: str) -> str | None:
    """What another process has decided for a key, if one has."""
    client = jax_private.key_value_client()
    return None if client is None else client.find(_path("config", name))


def is_job() -> bool:
    """Whether there are other processes to agree with."""
    return jax_private.key_value_client() is not None


def agree(name: str, config: str) -> str:
    """Publishes a config for a key; returns the one that the job uses."""
    client = jax_private.key_value_client()
    if client is None:
        return config
    return client.set_first(_path("config", name), config, _TIMEOUT_MS)


def settle(name: str, *, able: bool) -> str | None:
    """What another process decides for a key, or None: then it is for this process to decide.

    A process that is `able` to measure is told None if it is the first to come here, or if the
    one that came first gave up (`release`) or has been silent for too long. One that is not is
    told None once no other is likely to.
    """
    client = jax_private.key_value_client()
    if client is None:
        return None
    me = str(client.process)
    start = time.monotonic()
    unclaimed_since = start
    if not able:
        client.set_first(_path("unable", name, me), me, _TIMEOUT_MS)
    pause, said = 0.01, False
    while True:
        if (config := client.find(_path("config", name))) is not None:
            return config
        claimed_by: str | None
        if able:
            claimed_by = client.claim(_path("claim", name), me)
            if claimed_by == me:
                return None
        else:
            claimed_by = client.find(_path("claim", name))
        now = time.monotonic()
        if claimed_by is None and not able:
            nobody_can = client.count(_path("unable", name)) >= client.num_processes
            if nobody_can or now - unclaimed_since > _UNCLAIMED_S:
                return None
        elif claimed_by is not None:
            unclaimed_since = now
            if now - start > _CLAIMED_S:
                logger.warning(
                    "process %s of this job has not decided on a config of %s for %g s",
                    claimed_by,
                    name,
                    _CLAIMED_S,
                )
                return None
            if now - start > 10 and not said:
                said = True
                logger.warning("waiting for process %s, which measures %s", claimed_by, name)
        time.sleep(pause)
        pause = min(1.5 * pause, 0.25)


def release(name: str) -> None:
    """Takes this process's claim on a key back, for another to try."""
    client = jax_private.key_value_client()
    if client is None:
        return
    try:
        if client.find(_path("claim", name)) == str(client.process):
            client.delete(_path("claim", name))
    except Exception as error:  # on the way out of another error, which is the one to see
        logger.warning("the claim on %s could not be taken back: %s", name, error)


def _path(kind: str, *parts: str) -> str:
    return "/".join(("triax", kind, *parts))
