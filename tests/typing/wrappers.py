"""What a user's typed code does with Triax: `make lint` has mypy check it.

Where an error is ignored, there must be one: `warn_unused_ignores` sees to that.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, assert_type

import jax

import triax
from triax import moe

Implementation = Literal["triton", "interpret", "xla"]


class Pair(NamedTuple):
    """Types of outputs, by name."""

    values: jax.ShapeDtypeStruct
    indices: jax.ShapeDtypeStruct


def add(
    x: jax.Array, kernel: Any, implementation: Literal["triton", "interpret"] | None = None
) -> jax.Array:
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return triax.triton_call(
        x, kernel=kernel, out_type=like, grid=1, implementation=implementation, BLOCK=x.size
    )


def add_like(x: jax.Array, kernel: Any) -> jax.Array:
    out: jax.Array = triax.triton_call(  # JAX declares that `typeof` returns Any
        x, kernel=kernel, out_type=jax.typeof(x), grid=lambda meta: (meta["n"],), n=x.size
    )
    return out


def halves(x: jax.Array, kernel: Any) -> tuple[jax.Array, jax.Array]:
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return triax.triton_call(x, kernel=kernel, out_type=(like, like), grid=(1, 1), num_warps=4)


def thirds(x: jax.Array, kernel: Any) -> jax.Array:
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    first, _, third = triax.triton_call(x, kernel=kernel, out_type=(like, like, like), grid=1)
    return first + third


def named(x: jax.Array, kernel: Any) -> Any:
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    out = triax.triton_call(x, kernel=kernel, out_type=Pair(like, like), grid=1)
    assert_type(out, Any)
    return out.values, out.indices


def wrong_choices(x: jax.Array, kernel: Any) -> None:
    triax.triton_call(x, kernel=kernel, out_type=x, grid=1, implementation="xla")  # type: ignore[call-overload]
    triax.triton_call(x, kernel=kernel, out_type=x, grid=1, tuning="fast")  # type: ignore[call-overload]
    triax.triton_call(x, kernel=kernel, out_type=x, grid=1, vmap_method="loop")  # type: ignore[call-overload]
    triax.tuning_mode("fast")  # type: ignore[arg-type]
    moe.glu(x, activation="relu")  # type: ignore[arg-type]
    moe.Router(1, score="tanh")  # type: ignore[arg-type]
    moe.Experts(x, x, activation="relu")  # type: ignore[arg-type]
    moe.route(x, 8)  # type: ignore[arg-type]
    moe.feed_forward(x, x, x, moe.Router(1))  # type: ignore[arg-type]
    moe.glu(x, implementation="cuda")  # type: ignore[arg-type]


def tuned(
    x: jax.Array, kernel: Any, mode: Literal["auto", "cached", "strict", "off", "runtime"]
) -> jax.Array:
    with triax.tuning_mode(mode):
        return add(x, kernel)


def layer(
    x: jax.Array,
    logits: jax.Array,
    w_gate_up: jax.Array,
    w_down: jax.Array,
    implementation: Implementation | None = None,
) -> jax.Array:
    router = moe.Router(2, score="sigmoid")
    routing = assert_type(moe.route(logits, router, implementation=implementation), moe.Routing)
    weights, chosen = routing
    plan = moe.make_plan(chosen, logits.shape[1], implementation=implementation)
    assert_type(plan, moe.Plan)
    rows = assert_type(moe.permute(x, plan, implementation=implementation), jax.Array)
    weighted = assert_type(moe.permute(x, plan, weights=weights), moe.Permuted)
    assert_type(moe.permute(x, plan, scales=x), moe.Permuted)
    assert_type(moe.permute(x, plan, weights=weights, scales=x), moe.Permuted)
    experts = moe.Experts(w_gate_up, w_down, activation="geglu")
    out = moe.feed_forward(x, logits, experts, router, implementation=implementation)
    assert_type(
        moe.feed_forward(x, routing, experts.quantized("rows"), recipe="rows").routing, moe.Routing
    )
    back = moe.unpermute(rows + weighted.rows, plan, weights, implementation=implementation)
    return assert_type(out.tokens, jax.Array) + assert_type(back, jax.Array)


def optional_weights(
    x: jax.Array, plan: moe.Plan, weights: jax.Array | None
) -> jax.Array | moe.Permuted:
    return moe.permute(x, plan, weights=weights)
