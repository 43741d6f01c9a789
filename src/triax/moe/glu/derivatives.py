"""The derivatives of glu."""

from __future__ import annotations

import functools
from typing import Any

import jax

from triax.moe.glu import launchers, reference
from triax.moe.shared import implementation as implementations
from triax.moe.shared import linear


def glu(
    gate_up: jax.Array, row_weights: jax.Array | None, activation: str, implementation: str | None
) -> jax.Array:
    """``row_weights * activation(gate) * up``."""
    return linear.op(*_glu(activation, implementation), gate_up, row_weights)


@functools.cache
def _glu(activation: str, implementation: str | None) -> linear.Rules:
    plain = functools.partial(reference.glu_reference, activation=activation)
    run = implementations.choose(
        implementation, launchers.glu, reference.glu_reference, activation=activation
    )

    def derivative(primals: Any, tangents: Any, out: jax.Array) -> jax.Array:
        operands = dict(zip(("gate_up", "row_weights"), primals, strict=True))
        moving = dict(zip(("gate_up", "row_weights"), tangents, strict=True))
        return linear.call(along, back, operands, moving, out)

    def along(operands: dict[str, Any], moving: dict[str, jax.Array]) -> jax.Array:
        fixed = {name: operands[name] for name in moving}
        return jax.jvp(lambda moved: plain(**operands | moved), (fixed,), (moving,))[1]

    def back(operands: dict[str, Any], gradient: jax.Array) -> dict[str, Any]:
        gate_up, row_weights = operands["gate_up"], operands["row_weights"]
        d_gate_up, d_row_weights = glu_grad(
            gate_up, row_weights, gradient, activation, implementation
        )
        if d_row_weights is not None:
            d_row_weights = d_row_weights.astype(row_weights.dtype)
        return {"gate_up": d_gate_up, "row_weights": d_row_weights}

    return run, derivative


def glu_grad(
    gate_up: jax.Array,
    row_weights: jax.Array | None,
    gradient: jax.Array,
    activation: str,
    implementation: str | None,
) -> tuple[jax.Array, jax.Array | None]:
    """The gradients of the operands of `glu`."""
    return linear.replaced(*_glu_grad(activation, implementation), gate_up, row_weights, gradient)


@functools.cache
def _glu_grad(activation: str, implementation: str | None) -> linear.Rules:
    run = implementations.choose(
        implementation, launchers.glu_grad, reference.glu_grad_reference, activation=activation
    )
    # Second derivatives are rare: plain JAX on all platforms, differentiable to any order.
    return run, functools.partial(reference.glu_grad_reference, activation=activation)
