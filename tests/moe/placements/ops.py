"""What is placed: every case, and the exchange, which must give what it gives on one device.

`place` is where results of ops are put; `place.mesh` is None on one device.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from tests.moe import draws
from tests.moe.case import Arrays, Case, ModelSizes, Sized
from tests.moe.cases import SIZED
from tests.moe.draws import Rng
from triax import moe

# The last two have dimensions that few devices divide, or none.
SIZES = (
    ModelSizes(16, 8, 8, 8, 2),
    ModelSizes(8, 16, 4, 4, 2),
    ModelSizes(12, 6, 4, 6, 2),
    ModelSizes(7, 5, 3, 6, 3),
)
# All devices divide the tokens and the experts.
EXCHANGED = (ModelSizes(16, 8, 8, 8, 2), ModelSizes(24, 256, 4, 16, 3))


def _exchange() -> Sized:
    def made(path: Any, of: ModelSizes) -> Case:
        def draw(rng: Rng) -> Arrays:
            shapes = (of.hidden, of.width), (of.width, of.hidden)
            return {
                "x": draws.values(rng, (of.tokens, of.hidden), of.dtype),
                "weights": draws.values(rng, (of.tokens, of.top_k), np.float32),
                "ids": draws.ids(rng, of.tokens, of.top_k, of.experts),
                "w_up": draws.values(rng, (of.experts, *shapes[0]), of.dtype),
                "w_down": draws.values(rng, (of.experts, *shapes[1]), of.dtype),
            }

        return Case(
            "exchange",
            path,
            f"exchange(place, {of.experts}, x, weights, ids, w_up, w_down)",
            ("tokens", "back", "counts"),
            draw,
            lambda arrays, found: {"back": found["back"]},  # moved there and back
            ("x", "weights", "w_up", "w_down"),
            {"exchange": exchange},
        )

    return made


def exchange(place, count, x, weights, ids, w_up, w_down):
    """Expert parallelism over some axes of the mesh, data parallelism over others."""
    if place.mesh is None:
        plan = moe.make_plan(ids, count)
        rows = moe.permute(x, plan)
        inner = jnp.tanh(moe.ragged_dot(rows, w_up, plan.group_sizes))
        out = moe.ragged_dot(inner, w_down, plan.group_sizes)
        back = moe.unpermute(jax.lax.stop_gradient(rows), plan)
        return moe.unpermute(out, plan, weights), back, plan.group_counts
    experts, data = place.exchange_axes

    def part(x, weights, ids, w_up, w_down):
        sent = moe.dispatch(x, weights, ids, count, experts)
        inner = jnp.tanh(moe.ragged_dot(place(sent.rows), w_up, sent.group_sizes))
        out = place(moe.ragged_dot(place(inner), w_down, sent.group_sizes))
        back = moe.combine(jax.lax.stop_gradient(sent.rows), sent.plan, weights=None)
        counts = jax.lax.psum(sent.group_counts, data) if data else sent.group_counts
        return moe.combine(out, sent.plan, weights=sent.weights), back, counts

    of_tokens, of_experts = P((*data, *experts)), P(experts)
    return place.shard_map(
        part,
        (of_tokens, of_tokens, of_tokens, of_experts, of_experts),
        (of_tokens, of_tokens, of_experts),
        {*experts, *data},
    )(x, weights, ids, w_up, w_down)


OPS: dict[str, Sized] = {
    **SIZED,
    "exchange": _exchange(),
}
