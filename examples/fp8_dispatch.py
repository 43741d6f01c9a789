"""Moves tokens to their experts as 8-bit floats, with a scale for every 128 columns.

    python examples/fp8_dispatch.py

A row of bfloat16 takes twice the bytes of its values in float8_e4m3fn. Scales move along in the
same call: `moe.permute` on one device, `moe.dispatch` between all there are. Moving changes no bit,
so all of the error is that of quantizing. With JAX_PLATFORMS=cpu there are eight virtual devices.
"""

from __future__ import annotations

import math
import os

if os.environ.get("JAX_PLATFORMS") == "cpu":
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from triax import moe

TOKENS, HIDDEN, EXPERTS, TOP_K = 840, 512, 16, 2  # tokens of up to eight devices
BLOCK = 128


@jax.jit
def permuted(x: jax.Array, experts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The rows as bfloat16, and from 8-bit floats."""
    plan = moe.make_plan(experts, num_experts=EXPERTS)
    rows = moe.permute(moe.quantize(x, block=(1, BLOCK)), plan)
    return moe.permute(x, plan), rows.dequantize()


def dispatched(x: jax.Array, experts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same for the rows that arrive at each device."""
    weights = jnp.ones(experts.shape)
    plain = moe.dispatch(x, weights, experts, EXPERTS, "expert")
    x8 = moe.quantize(x, block=(1, BLOCK))
    sent = moe.dispatch(x8, weights, experts, EXPERTS, "expert")
    return plain.rows, sent.rows.dequantize()


def compare(name: str, num_rows: int, rows: jax.Array, restored: jax.Array) -> float:
    """Prints the bytes of the moved rows, and returns the largest error, of the largest value."""
    wide, narrow = HIDDEN * 2, HIDDEN + HIDDEN // BLOCK * 4
    error = float(jnp.max(jnp.abs(restored - rows)) / jnp.max(jnp.abs(rows)))
    print(f"{name}: {num_rows} rows, {num_rows * wide:,} bytes as bfloat16")
    print(f"  as float8 with scales {num_rows * narrow:,}, {narrow / wide:.0%} of that")
    print(f"  error at most {error:.1%} of the largest value")
    return error


def main() -> list[float]:
    """The error on one device and, where there are several, between them."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((TOKENS, HIDDEN)), jnp.bfloat16)
    experts = rng.random((TOKENS, EXPERTS)).argsort(axis=1)[:, :TOP_K].astype(np.int32)
    one = compare("moe.permute", experts.size, *permuted(x, experts))

    mesh = Mesh(jax.devices()[: math.gcd(jax.device_count(), 8)], ("expert",))
    if mesh.size == 1:
        print("moe.dispatch: left out, because one device has nothing to send")
        return [one]
    move = jax.shard_map(
        dispatched, mesh=mesh, in_specs=(P("expert"), P("expert")), out_specs=P("expert")
    )
    to = np.sort(experts // (EXPERTS // mesh.size))
    own = np.repeat(np.arange(mesh.size), TOKENS // mesh.size)[:, None]
    first = np.diff(to, axis=1, prepend=-1) != 0  # a token goes to each device once
    many = compare(
        f"moe.dispatch between {mesh.size} devices",
        int(np.sum(first & (to != own))),
        *jax.jit(move)(x, experts),
    )
    return [one, many]


if __name__ == "__main__":
    main()
