"""What the ops' primitives ask of JAX, outside `jit`: nothing is compiled twice."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import monitoring

from triax import moe

EVENTS: list[str] = []
monitoring.register_event_duration_secs_listener(lambda event, *_, **__: EVENTS.append(event))

X = jnp.ones((8, 4))
W, SIZES = jnp.ones((2, 4, 6)), jnp.array([3, 5])
IDS = np.arange(16).reshape(8, 2) % 4
plan = functools.cache(lambda: moe.make_plan(IDS, 4, implementation="xla"))
CALLS = {
    "ragged_dot": lambda x: moe.ragged_dot(x, W, SIZES),
    "glu": lambda x: moe.glu(x, jnp.ones(8)),
    "route": lambda x: moe.route(x, 2).weights,
    "permute": lambda x: moe.permute(x, plan()),
    "unpermute": lambda x: moe.unpermute(moe.permute(x, plan()), plan(), jnp.ones((8, 2))),
    "sort_chunks_by_index": lambda x: moe.sort_chunks_by_index(x, SIZES, jnp.array([1, 0])).rows,
    "make_plan": lambda x: x * moe.make_plan(plan().expert_of, 4).num_dropped,
}


@pytest.mark.parametrize(
    "name",
    [
        "unpermute",
        *(
            pytest.param(name, marks=pytest.mark.slow("all ops are made by the same function"))
            for name in CALLS
            if name != "unpermute"
        ),
    ],
)
def test_calls_outside_jit_compile_once(name):
    call = CALLS[name]
    gradient = jax.grad(lambda x: jnp.sum(call(x) ** 2))
    for _ in range(2):
        call(X), gradient(X)
    EVENTS.clear()
    for _ in range(3):
        call(X), gradient(X)
    assert not [event for event in EVENTS if "backend_compile" in event]
    jax.jit(lambda x: x * 3)(X)
    assert [event for event in EVENTS if "backend_compile" in event], "JAX tells it otherwise now"
