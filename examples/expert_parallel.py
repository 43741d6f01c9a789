"""Trains an MoE layer on all devices there are, data × expert parallel, and on one, side by side.

    python examples/expert_parallel.py

Tokens are split over all devices, experts over groups of up to four. Each device routes its own
tokens; `moe.dispatch` sends them to the devices of their experts, `moe.combine` brings the sums
back. The loss is the same as on one device. Without GPUs there are eight virtual devices.
"""

from __future__ import annotations

import functools
import math
import os
from typing import Any

if os.environ.get("JAX_PLATFORMS") == "cpu":
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from triax import moe

Params = dict[str, Any]

TOKENS, HIDDEN, WIDTH, EXPERTS = 840, 64, 96, 16  # tokens of up to eight devices
ROUTER = moe.Router(2, normalize=True)
STEPS, LEARNING_RATE = 20, 20.0
ALL = ("data", "expert")
SPECS = {"router": P(), "experts": P("expert")}


def init(key: jax.Array) -> Params:
    draw = lambda key, *shape: jax.random.normal(key, shape) * shape[-2] ** -0.5
    router, up, down = jax.random.split(key, 3)
    weights = draw(up, EXPERTS, HIDDEN, 2 * WIDTH), draw(down, EXPERTS, WIDTH, HIDDEN)
    return {"router": draw(router, HIDDEN, EXPERTS), "experts": moe.Experts(*weights)}


def on_one_device(params: Params, x: jax.Array) -> jax.Array:
    return moe.feed_forward(x, x @ params["router"], params["experts"], ROUTER).tokens


def on_all_devices(params: Params, x: jax.Array) -> jax.Array:
    """The layer as one device sees it: with its own tokens [tokens, hidden] and experts."""
    weights, chosen = moe.route(x @ params["router"], ROUTER)
    sent = moe.dispatch(x, weights, chosen, EXPERTS, "expert")
    experts = params["experts"]
    inner = moe.ragged_dot(sent.rows, experts.w_gate_up, sent.group_sizes)
    rows = moe.ragged_dot(moe.glu(inner, sent.weights), experts.w_down, sent.group_sizes)
    return moe.combine(rows, sent.plan, weights=None)


@functools.partial(jax.jit, static_argnums=0)
def train_step(layer: Any, params: Params, x: jax.Array, y: jax.Array) -> tuple[Params, jax.Array]:
    def loss(params: Params) -> jax.Array:
        return jnp.mean((x + layer(params, x) - y) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, gradients), value


def train(layer: Any, params: Params, x: jax.Array, y: jax.Array) -> list[float]:
    """The loss before each step."""
    losses = []
    for _ in range(STEPS):
        params, value = train_step(layer, params, x, y)
        losses.append(float(value))
    return losses


def make_mesh() -> Mesh:
    """All devices, in groups of up to four that share the experts."""
    devices = np.array(jax.devices())
    return Mesh(devices.reshape(-1, math.gcd(len(devices), 4)), ALL)


def main() -> tuple[list[float], list[float]]:
    mesh = make_mesh()
    keys = jax.random.split(jax.random.key(0), 3)
    params, teacher = init(keys[0]), init(keys[1])
    x = jax.random.normal(keys[2], (TOKENS, HIDDEN))
    y = x + jax.jit(on_one_device)(teacher, x)
    with jax.default_matmul_precision("highest"):
        one = train(on_one_device, params, x, y)
        layer = jax.shard_map(on_all_devices, mesh=mesh, in_specs=(SPECS, P(ALL)), out_specs=P(ALL))
        place = lambda arrays, spec: jax.device_put(arrays, NamedSharding(mesh, spec))
        params = {name: place(arrays, SPECS[name]) for name, arrays in params.items()}
        many = train(layer, params, place(x, P(ALL)), place(y, P(ALL)))
    shape = " × ".join(f"{size} {name}" for name, size in mesh.shape.items())
    print(f"{mesh.size} devices of {mesh.devices.flat[0].device_kind}: {shape}")
    print("step   one device   all devices")
    for step in range(0, STEPS, 4):
        print(f"{step:4}   {one[step]:10.6f}   {many[step]:11.6f}")
    print(f"{STEPS - 1:4}   {one[-1]:10.6f}   {many[-1]:11.6f}")
    return one, many


if __name__ == "__main__":
    main()
