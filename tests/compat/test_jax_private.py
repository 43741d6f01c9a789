"""What Triax makes of JAX's insides."""

import time

from triax.compat import jax_private


class Service:
    """A job's key-value service in which somebody's key is deleted the moment it is looked at."""

    def __init__(self):
        self.values = {"taken": "1"}

    def key_value_set(self, key, value):
        if key in self.values:
            raise RuntimeError(f"ALREADY_EXISTS: {key}")
        self.values[key] = value

    def key_value_try_get(self, key):
        self.values.pop(key, None)
        raise RuntimeError(f"NOT_FOUND: {key}")

    def blocking_key_value_get(self, key, timeout_ms):
        time.sleep(timeout_ms / 1e3)
        raise RuntimeError("DEADLINE_EXCEEDED")


def test_a_claim_that_is_taken_back_meanwhile():
    client = jax_private.KeyValueClient(Service())
    start = time.monotonic()
    assert client.claim("taken", "2") is None
    assert client.claim("taken", "2") == "2"
    assert time.monotonic() - start < 1
