"""Trains MoE blocks data × expert × tensor parallel, checks them against one device, and restarts.

    JAX_PLATFORMS=cpu python examples/parallel.py

Eight devices, virtual ones on a CPU, are a mesh of data 2 × expert 2 × tensor 2. A block is
attention, then experts chosen by a router beside a shared one. Parameters are kept in float32 and
computed with in bfloat16. The same program runs in several processes, each with some of the
devices, which find each other through `jax.distributed`:

    python examples/parallel.py --coordinator HOST:PORT --processes 2 --process 0
"""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
from pathlib import Path
from typing import Any

if os.environ.get("JAX_PLATFORMS") == "cpu":
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from triax import moe

Params = dict[str, jax.Array]

LAYERS, HIDDEN, HEADS, HEAD, EXPERTS, WIDTH, SHARED = 2, 32, 4, 8, 8, 32, 16
ROUTER = moe.Router(2, normalize=True)
SEQUENCES, LENGTH, STEPS, SAVED_AT = 8, 8, 12, 6
RATE, DECAY, BALANCE = 1e-2, 0.01, 0.01

BATCH = P(("data", "expert"))  # sequences; devices of a `tensor` group have the same
SPECS = {  # of the parameters, whose first dimension is the layer
    "attention_norm": P(),
    "qkv": P(None, None, "tensor"),  # [layers, 3, heads, hidden, head]
    "out": P(None, "tensor"),  # [layers, heads, head, hidden]
    "experts_norm": P(),
    "router": P(),  # [layers, hidden, experts]
    "shared_gate": P(None, None, "tensor"),  # [layers, hidden, width]
    "shared_up": P(None, None, "tensor"),
    "shared_down": P(None, "tensor"),  # [layers, width, hidden]
    "gate": P(None, "expert", "data", "tensor"),  # [layers, experts, hidden, width]
    "up": P(None, "expert", "data", "tensor"),
    "down": P(None, "expert", "tensor", "data"),  # [layers, experts, width, hidden]
}


def init(key: jax.Array) -> Params:
    shapes = {
        "attention_norm": (LAYERS, HIDDEN),
        "qkv": (LAYERS, 3, HEADS, HIDDEN, HEAD),
        "out": (LAYERS, HEADS, HEAD, HIDDEN),
        "experts_norm": (LAYERS, HIDDEN),
        "router": (LAYERS, HIDDEN, EXPERTS),
        "shared_gate": (LAYERS, HIDDEN, SHARED),
        "shared_up": (LAYERS, HIDDEN, SHARED),
        "shared_down": (LAYERS, SHARED, HIDDEN),
        "gate": (LAYERS, EXPERTS, HIDDEN, WIDTH),
        "up": (LAYERS, EXPERTS, HIDDEN, WIDTH),
        "down": (LAYERS, EXPERTS, WIDTH, HIDDEN),
    }
    keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
    draw = lambda name, shape: jax.random.normal(keys[name], shape) * shape[-2] ** -0.5
    return {n: jnp.ones(s) if n.endswith("norm") else draw(n, s) for n, s in shapes.items()}


# --- the model --------------------------------------------------------------------------------


def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x.dtype) * weight


def block(x: jax.Array, layer: Params, spread: bool) -> tuple[jax.Array, jax.Array]:
    """A device's sequences [sequences, length, hidden] after one layer, and its balance loss.

    With `spread` it runs inside `shard_map`, on the device's part of the layer. The parts of a sum
    over width or heads are on the devices of a `tensor` group; a width is whole nowhere.
    """
    over_tensor = lambda part: jax.lax.psum(part, "tensor") if spread else part

    def whole(name: str, axis: int) -> jax.Array:
        """The weights of this device's experts, of which each `data` group keeps a part."""
        weight = layer[name]
        return jax.lax.all_gather(weight, "data", axis=axis, tiled=True) if spread else weight

    q, k, v = jnp.einsum("slh,nkhd->nskld", norm(x, layer["attention_norm"]), layer["qkv"])
    scores = jnp.einsum("skld,skmd->sklm", q, k).astype(jnp.float32) * HEAD**-0.5
    scores = jnp.where(jnp.tri(LENGTH, dtype=bool), scores, -jnp.inf)
    mixed = jnp.einsum("sklm,skmd->skld", jax.nn.softmax(scores).astype(x.dtype), v)
    x = x + over_tensor(jnp.einsum("skld,kdh->slh", mixed, layer["out"]))

    tokens = norm(x, layer["experts_norm"]).reshape(-1, HIDDEN)
    logits = tokens.astype(jnp.float32) @ layer["router"].astype(jnp.float32)
    experts = moe.Experts((whole("gate", 1), whole("up", 1)), whole("down", 2))
    axis_name = "expert" if spread else None
    routed = moe.feed_forward(tokens, logits, experts, ROUTER, axis_name=axis_name)
    shared = jax.nn.silu(tokens @ layer["shared_gate"]) * (tokens @ layer["shared_up"])
    both = over_tensor(routed.tokens + shared @ layer["shared_down"])  # one sum for the two

    counts = jax.lax.psum(routed.group_counts, "data") if spread else routed.group_counts
    return x + both.reshape(x.shape), moe.load_balancing_loss(logits, counts)


def loss(params: Params, x: jax.Array, y: jax.Array, dtype: Any, spread: bool) -> jax.Array:
    """The mean over all tokens: inside `shard_map`, of those of all devices."""
    # Cast before they are gathered, so that half as many bytes are.
    layers = jax.tree.map(lambda weight: weight.astype(dtype), params)

    # A layer keeps its input alone, and for the gradient gathers and computes once more.
    @jax.checkpoint
    def step(x: jax.Array, layer: Params) -> tuple[jax.Array, jax.Array]:
        return block(x, layer, spread)

    out, balance = jax.lax.scan(step, x.astype(dtype), layers)
    value = jnp.mean((out.astype(jnp.float32) - y) ** 2) + BALANCE * jnp.sum(balance)
    return jax.lax.pmean(value, ("data", "expert")) if spread else value


def loss_on(mesh: Mesh, dtype: Any) -> Any:
    """The loss of whole arrays, which are sharded over a mesh."""
    local = functools.partial(loss, dtype=dtype, spread=True)
    return jax.shard_map(local, mesh=mesh, in_specs=(SPECS, BATCH, BATCH), out_specs=P())


# --- training ---------------------------------------------------------------------------------


def start(params: Params) -> Any:
    """The state of AdamW: step, parameters and both moments, all in float32."""
    zeros = lambda: jax.tree.map(jnp.zeros_like, params)
    return {"step": jnp.zeros((), jnp.int32), "params": params, "mean": zeros(), "square": zeros()}


def adamw(state: Any, gradients: Params) -> Any:
    step = state["step"] + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], gradients)
    square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, state["square"], gradients)
    rate = RATE * jnp.sqrt(1 - 0.99**step) / (1 - 0.9**step)

    def update(weight: jax.Array, mean: jax.Array, square: jax.Array) -> jax.Array:
        return weight - rate * mean / (jnp.sqrt(square) + 1e-8) - RATE * DECAY * weight

    params = jax.tree.map(update, state["params"], mean, square)
    return {"step": step, "params": params, "mean": mean, "square": square}


def shardings(mesh: Mesh) -> Any:
    """Where the state is: the moments of a weight are sharded as it is."""
    weights = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    step = NamedSharding(mesh, P())
    return {"step": step, "params": weights, "mean": weights, "square": weights}


@functools.cache
def train_step_on(mesh: Mesh) -> Any:
    """The next state, in the memory of the one before, and the loss."""
    whole = NamedSharding(mesh, P())

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(shardings(mesh), whole))
    def train_step(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss_on(mesh, jnp.bfloat16))(state["params"], x, y)
        return adamw(state, gradients), value

    return train_step


def batch(mesh: Mesh, step: int) -> tuple[jax.Array, jax.Array]:
    """The sequences of a step; a process makes those of its own devices alone."""
    shape = (SEQUENCES, LENGTH, HIDDEN)
    x = np.random.default_rng(step).standard_normal(shape, np.float32)
    y = np.tanh(x + np.roll(x, 1, axis=1)) + x  # of a token and the one before
    y[:, 0] = np.tanh(x[:, 0]) + x[:, 0]
    place = functools.partial(jax.make_array_from_callback, shape, NamedSharding(mesh, BATCH))
    return place(lambda index: x[index]), place(lambda index: y[index])


def train(mesh: Mesh, state: Any, steps: range, folder: Path | None = None) -> tuple[Any, list]:
    """The state after these steps, and the losses; after half of all it is saved in `folder`."""
    train_step, losses = train_step_on(mesh), []
    for step in steps:
        state, value = train_step(state, *batch(mesh, step))
        losses.append(float(value))
        if folder is not None and step + 1 == SAVED_AT:
            save(folder, state)
    return state, losses


# --- checkpoints ------------------------------------------------------------------------------


def save(folder: Path, state: Any) -> None:
    """Writes each part of each array once, by a process that has it, into a new folder."""
    for path, array in jax.tree_util.tree_leaves_with_path(state):
        at = folder / jax.tree_util.keystr(path, simple=True, separator=".")
        at.mkdir(parents=True, exist_ok=True)
        for shard in array.addressable_shards:
            if shard.replica_id == 0:
                begins = "-".join(str(part.start or 0) for part in shard.index)
                data = np.asarray(shard.data)
                if data.dtype.kind == "V":  # bfloat16, say, which NumPy's files do not know
                    data = data.astype(np.float32)
                np.save(at / f"part{begins}.npy", data)


def restore(folder: Path, like: Any, placed: Any) -> Any:
    """The state of types `like`, sharded as `placed` says: also over another mesh."""

    def load(path: Any, kind: Any, sharding: NamedSharding) -> jax.Array:
        at = folder / jax.tree_util.keystr(path, simple=True, separator=".")
        whole = np.empty(kind.shape, kind.dtype)
        filled = 0
        for file in at.glob("part*.npy"):
            part = np.load(file)
            begins = [int(b) for b in file.stem.removeprefix("part").split("-") if b]
            whole[tuple(slice(b, b + n) for b, n in zip(begins, part.shape, strict=True))] = part
            filled += part.size
        if filled != whole.size:
            problem = "lacks parts" if filled < whole.size else "has parts of another mesh too"
            raise ValueError(f"{at} {problem}: {filled} elements of {whole.size}")
        return jax.make_array_from_callback(kind.shape, sharding, lambda index: whole[index])

    return jax.tree_util.tree_map_with_path(load, like, placed)


# --- what is checked --------------------------------------------------------------------------


def compare(mesh: Mesh) -> float:
    """The largest error of loss and gradients, in float32, relative to the same on one device."""
    params, (x, y) = init(jax.random.key(1)), batch(mesh, 0)
    placed = jax.device_put(params, shardings(mesh)["params"])
    whole = jax.device_get((x, y))
    one_device = functools.partial(loss, dtype=jnp.float32, spread=False)
    with jax.default_matmul_precision("highest"):
        many = jax.jit(jax.value_and_grad(loss_on(mesh, jnp.float32)))(placed, x, y)
        one = jax.jit(jax.value_and_grad(one_device))(params, *whole)
    errors = jax.tree.map(
        lambda a, b: float(np.max(np.abs(np.asarray(a) - b)) / np.max(np.abs(b))),
        jax.device_get(many),
        jax.device_get(one),
    )
    return max(jax.tree.leaves(errors))


def same_bits(a: Any, b: Any) -> bool:
    """Of the parts that this process has."""
    parts = lambda tree: [s.data for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards]
    return all(map(np.array_equal, parts(a), parts(b)))


def main(folder: Path) -> tuple[float | None, list[float], bool]:
    """The error, the losses, and whether the restart has the bits of a run without."""
    devices = jax.devices()[:8]
    if len(devices) < 8:
        raise SystemExit(f"eight devices are needed, got {len(devices)}: set JAX_PLATFORMS=cpu")
    mesh = Mesh(np.array(devices).reshape(2, 2, 2), ("data", "expert", "tensor"))
    error = compare(mesh) if jax.process_count() == 1 else None
    make = lambda: start(init(jax.random.key(0)))
    state = jax.jit(make, out_shardings=shardings(mesh))()
    end, losses = train(mesh, state, range(STEPS), folder)

    multihost_utils.sync_global_devices("saved")
    again = restore(folder, jax.eval_shape(make), shardings(mesh))
    end_again, later = train(mesh, again, range(SAVED_AT, STEPS))
    same = later == losses[SAVED_AT:] and same_bits(end, end_again)

    if jax.process_index() == 0:
        print("mesh:", " × ".join(f"{name} {size}" for name, size in mesh.shape.items()))
        if error is not None:
            print(f"loss and gradients in float32, against one device: error {error:.1e}")
        print("losses:", " ".join(f"{value:.3f}" for value in losses))
        print("restarted from the checkpoint:", "the same bits" if same else "other bits")
    return error, losses, same


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--coordinator", help="HOST:PORT of process 0")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, default=0)
    parser.add_argument("--folder", help="for the checkpoint; all processes see it")
    options = parser.parse_args()
    if options.processes > 1:
        jax.distributed.initialize(options.coordinator, options.processes, options.process)
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(options.folder or temporary))
