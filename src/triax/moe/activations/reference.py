"""glu in plain JAX: the path for every platform without Triton."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from triax.moe.shared.arrays import at_least_float32

Activation = Literal["swiglu", "geglu"]
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "swiglu": jax.nn.silu,
    "geglu": functools.partial(jax.nn.gelu, approximate=True),
}


def glu_reference(
    gate_up: jax.Array, row_weights: jax.Array | None, *, activation: str
) -> jax.Array:
    """``row_weights * activation(gate) * up``, computed in float32 or wider."""
    wider = at_least_float32(gate_up.dtype)
    gate, up = (half.astype(wider) for half in jnp.split(gate_up, 2, axis=1))
    out = ACTIVATIONS[activation](gate) * up
    if row_weights is not None:
        out *= row_weights.astype(wider)[:, None]
    return out.astype(gate_up.dtype)


def glu_grad_reference(
    gate_up: jax.Array, row_weights: jax.Array | None, gradient: jax.Array, *, activation: str
) -> tuple[jax.Array, jax.Array | None]:
    """The gradients of `gate_up` and, in float32 or wider, of `row_weights`."""
    wider = at_least_float32(gate_up.dtype)
    if row_weights is not None:
        row_weights = row_weights.astype(wider)
    unit = functools.partial(glu_reference, activation=activation)
    _, pull = jax.vjp(unit, gate_up.astype(wider), row_weights)
    d_gate_up, d_row_weights = pull(gradient.astype(wider))
    return d_gate_up.astype(gate_up.dtype), d_row_weights
