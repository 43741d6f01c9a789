"""What Triax makes of JAX's insides."""

import time

import jax
import jax.numpy as jnp
import pytest
from jax._src import dispatch
from jax.extend.core import Primitive
from jax.interpreters import mlir

from triax.compat import jax_private
from triax.moe.shared.target import for_target_p
from triax.primitive import triton_call_p


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


@pytest.mark.parametrize("like", [triton_call_p, for_target_p])
def test_a_program_is_lowered_for_its_own_device(like):
    seen = []
    spy = Primitive("spy")
    spy.def_abstract_eval(lambda x: x)

    def lower(ctx, x):
        seen.append(jax_private.lowering_devices(ctx))
        return [x]

    mlir.register_lowering(spy, lower)
    program = jax.jit(lambda x: spy.bind(x) + 1)
    devices = jax.devices()[2:4]
    program(jax.device_put(jnp.ones(3), devices[0]))
    assert seen == [()]  # why it is needed
    jax_private.require_devices(spy)
    for device in devices:
        jax.jit(lambda x: spy.bind(x) + 2)(jax.device_put(jnp.ones(3), device))
    assert seen[1:] == [(device,) for device in devices]
    assert like in dispatch.prim_requires_devices_during_lowering
