"""The processes of one job use one config per key.

Every resolved config is published in JAX's key-value service before it is used. The first
to publish decides, the others take what stands there. There is no leader and no barrier,
so a process that dies blocks nobody.
"""

from __future__ import annotations

from triax.bridge.compat import jax_private

_TIMEOUT_MS = 60_000


def published(name: str) -> str | None:
    """What another process has decided for a key, if one has."""
    client = jax_private.key_value_client()
    return None if client is None else client.find(_path(name))


def agree(name: str, config: str) -> str:
    """Publishes a config for a key; returns the one that the job uses."""
    client = jax_private.key_value_client()
    if client is None:
        return config
    return client.set_first(_path(name), config, _TIMEOUT_MS)


def _path(name: str) -> str:
    return f"triax/config/{name}"
