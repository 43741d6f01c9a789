"""Trains an MoE layer of Flax NNX on an explicit mesh, and resumes it from an Orbax checkpoint.

    JAX_PLATFORMS=cpu python examples/moe_nnx.py

All devices, virtual ones on a CPU, are a mesh of data × expert with explicit axes: tokens are
sharded over both, experts over `expert`, to which `moe.feed_forward` sends the tokens. A step adds
up the gradients of several microbatches. Training is saved half-way, and the second half is run
again from the checkpoint: it has the same bits.
"""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path

if os.environ.get("JAX_PLATFORMS") == "cpu":
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from triax import moe

HIDDEN, WIDTH, EXPERTS = 32, 48, 8
MICROBATCHES, TOKENS = 4, 168  # of a microbatch, for up to eight devices but five
CAPACITY = 1.25  # of a balanced router's need
STEPS, SAVED_AT = 12, 6
ALL = ("data", "expert")


class MoE(nnx.Module):
    """A router of one matrix, and gated experts, for tokens [tokens, hidden]."""

    def __init__(self, *, rngs: nnx.Rngs):
        def draw(*shape: int, spec: P) -> jax.Array:
            return jax.random.normal(rngs.params(), shape, out_sharding=spec) * shape[-2] ** -0.5

        self.w_router = nnx.Param(draw(HIDDEN, EXPERTS, spec=P()))
        gate_up = draw(EXPERTS, HIDDEN, 2 * WIDTH, spec=P("expert"))  # the gate's columns first
        experts = moe.Experts(gate_up, draw(EXPERTS, WIDTH, HIDDEN, spec=P("expert")))
        self.experts = nnx.data(jax.tree.map(nnx.Param, experts))  # a parameter of each array
        self.router = moe.Router(2, normalize=True)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The layer's output, its balance loss, and how many pairs were dropped."""

        def of_device(x: jax.Array, logits: jax.Array, experts: moe.Experts) -> tuple:
            # The most tokens that travel between two devices.
            share = CAPACITY * self.router.top_k / jax.lax.axis_size("expert")
            how = {"axis_name": "expert", "capacity": math.ceil(len(x) * min(share, 1))}
            out = moe.feed_forward(x, logits, experts, self.router, **how)
            # These are sums over `expert`; here they become sums over `data` too.
            counts, dropped = jax.lax.psum((out.group_counts, out.num_dropped), "data")
            return out.tokens, counts, dropped

        logits = x @ self.w_router[...]
        specs = {"in_specs": (P(ALL), P(ALL), P("expert")), "out_specs": (P(ALL), P(), P())}
        layer = jax.shard_map(of_device, **specs)
        y, counts, dropped = layer(x, logits, nnx.as_pure(self.experts))
        return x + y, moe.load_balancing_loss(logits, counts), dropped


@nnx.jit
def make() -> tuple[MoE, nnx.Optimizer]:
    """A new layer and its optimizer, sharded where they are made."""
    layer = MoE(rngs=nnx.Rngs(0))
    return layer, nnx.Optimizer(layer, optax.adamw(1e-2), wrt=nnx.Param)


@nnx.jit
def train_step(
    layer: MoE, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One step for microbatches [microbatches, tokens, hidden]: the loss, and dropped pairs."""
    graph, params = nnx.split(layer)

    def loss(params: nnx.State, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, balance, dropped = nnx.merge(graph, params)(x)
        return jnp.mean((out - y) ** 2) + 0.01 * balance, dropped

    def add(sums: tuple, microbatch: tuple) -> tuple[tuple, None]:
        of_one = jax.value_and_grad(loss, has_aux=True)(params, *microbatch)
        return jax.tree.map(jnp.add, sums, of_one), None

    zeros = (jnp.zeros(()), jnp.zeros((), jnp.int32)), jax.tree.map(jnp.zeros_like, params)
    ((value, dropped), gradients), _ = jax.lax.scan(add, zeros, (x, y))
    optimizer.update(layer, jax.tree.map(lambda sum: sum / len(x), gradients))
    return value / len(x), dropped


def batch(step: int) -> tuple[jax.Array, jax.Array]:
    """The tokens of a step and their targets: they depend on its number alone."""
    shape = MICROBATCHES, TOKENS, HIDDEN
    x = np.random.default_rng(step).standard_normal(shape, np.float32)
    return jax.device_put((x, np.tanh(x[..., ::-1])), P(None, ALL))


def train(state: tuple[MoE, nnx.Optimizer], steps: range, checkpoints: ocp.CheckpointManager):
    """Trains the state in place; after half of all steps it is saved. Returns the losses."""
    losses = []
    for step in steps:
        value, dropped = train_step(*state, *batch(step))
        losses.append(float(value))
        if step % 3 == 0:
            print(f"step {step}: loss {losses[-1]:.3f}, {int(dropped)} pairs dropped")
        if step + 1 == SAVED_AT:
            checkpoints.save(step + 1, args=ocp.args.StandardSave(nnx.state(state)))
    return losses


def resume(checkpoints: ocp.CheckpointManager, mesh: Mesh) -> tuple[int, tuple]:
    """The latest step, and its state, sharded over this mesh as `make` shards it."""

    def placed(of: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, of.sharding.spec)
        return jax.ShapeDtypeStruct(of.shape, of.dtype, sharding=sharding)

    state = nnx.eval_shape(make)  # types alone
    target = jax.tree.map(placed, nnx.state(state))
    step = checkpoints.latest_step()
    nnx.update(state, checkpoints.restore(step, args=ocp.args.StandardRestore(target)))
    return step, state


def make_mesh() -> Mesh:
    """All devices, in groups of up to four that share the experts."""
    count = jax.device_count()
    shape = count // math.gcd(count, 4), math.gcd(count, 4)
    return jax.make_mesh(shape, ALL, axis_types=(AxisType.Explicit,) * 2)


def main(folder: Path) -> tuple[list[float], bool]:
    """The losses, and whether the second half is the same after a restart, bit for bit."""
    mesh = make_mesh()
    with jax.set_mesh(mesh), ocp.CheckpointManager(folder) as checkpoints:
        state = make()
        print("experts:", jax.typeof(state[0].experts.w_gate_up[...]))
        losses = train(state, range(STEPS), checkpoints)
        checkpoints.wait_until_finished()

        step, again = resume(checkpoints, mesh)
        later = train(again, range(step, STEPS), checkpoints)
        pairs = zip(*(jax.tree.leaves(nnx.state(of)) for of in (state, again)), strict=True)
        same = later == losses[step:] and all(jnp.array_equal(a, b) for a, b in pairs)
    print(f"resumed at step {step}:", "the same bits" if same else "other bits")
    return losses, same


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
