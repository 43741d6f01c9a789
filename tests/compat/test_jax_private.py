"""What Triax makes of JAX's insides."""

import time
import types

import jax
import jax.numpy as jnp
import pytest
from jax._src import dispatch
from jax.extend.core import Primitive
from jax.interpreters import mlir

from triax import moe
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


def test_a_program_is_lowered_for_its_own_device_where_there_are_several(monkeypatch):
    seen = []
    spy = Primitive("spy")
    spy.def_abstract_eval(lambda x: x)

    def lower(ctx, x):
        seen.append(jax_private.lowering_devices(ctx))
        return [x]

    mlir.register_lowering(spy, lower)

    def run(device):
        def program(x):
            jax_private.require_devices(spy)
            return spy.bind(x)

        jax.jit(program)(jax.device_put(jnp.ones(3), device))

    devices = jax.devices()[2:4]
    with monkeypatch.context() as patch:
        run(devices[0])
        assert seen == [()]
        patch.setattr(jax_private, "_count", lambda platform: 2)
        for device in devices:
            run(device)
    assert seen[1:] == [(device,) for device in devices]


def test_ops_ask_for_their_devices(monkeypatch):
    monkeypatch.setattr(jax_private, "_count", lambda platform: 2)
    monkeypatch.setattr(dispatch, "prim_requires_devices_during_lowering", set())
    x = jnp.ones((4, 8))
    route = lambda x: moe.permute(x, moe.make_plan(jnp.zeros((4, 1), int), 2))
    jax.make_jaxpr(jax.grad(lambda x: route(x).sum()))(x)
    jax.make_jaxpr(lambda x: moe.ragged_dot(x, jnp.ones((1, 8, 8)), jnp.array([4])))(x)
    names = {p.name for p in dispatch.prim_requires_devices_during_lowering}
    ops = {"triax_place_pairs", "triax_permute_rows", "triax_gather_rows", "triax_ragged_dot"}
    assert names == {"triton_call", "for_target", "triax_linear", *ops}


@pytest.mark.parametrize("removes", [True, False])
def test_axes_that_vmap_took_may_be_used(monkeypatch, removes):
    """Also by a JAX that can only add their names."""
    core = jax_private._core
    if not hasattr(core, "add_explicit_mesh_axis_names"):
        pytest.skip("this JAX keeps no such names")
    if not removes:
        less = {k: v for k, v in vars(core).items() if k != "remove_explicit_mesh_axis_names"}
        monkeypatch.setattr(jax_private, "_core", types.SimpleNamespace(**less))
    taken = lambda: core.get_axis_env().explicit_mesh_axis_names
    with core.add_explicit_mesh_axis_names(("a",)):
        with jax_private.no_vmapped_axes():
            assert taken() == frozenset()
        assert taken() == {"a"}
    with jax_private.no_vmapped_axes():
        assert taken() == frozenset()
