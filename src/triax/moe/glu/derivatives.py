"""The derivatives of glu."""

from __future__ import annotations

import functools
from typing import Any

import jax

from triax.moe.glu import launchers, reference
from triax.moe.shared import implementation as implementations
from triax.moe.shared import linear
from triax.moe.shared.sharding import Split


@functools.cache
def glu(activation: str, implementation: str | None) -> linear.Function:
    """``row_weights * activation(gate) * up``, of `gate_up` and `row_weights`."""
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
        gradients = glu_grad(activation, implementation)
        d_gate_up, d_row_weights = gradients(gate_up, row_weights, gradient)
        if d_row_weights is not None:
            d_row_weights = d_row_weights.astype(row_weights.dtype)
        return {"gate_up": d_gate_up, "row_weights": d_row_weights}

    return linear.op(run, derivative, Split(("r_", "r"), "r_"), implementation)


@functools.cache
def glu_grad(activation: str, implementation: str | None) -> linear.Function:
    """The gradients of the operands of `glu`, from these and its result's."""
    run = implementations.choose(
        implementation, launchers.glu_grad, reference.glu_grad_reference, activation=activation
    )
    # Second derivatives are rare: plain JAX on all platforms, differentiable to any order.
    plain = functools.partial(reference.glu_grad_reference, activation=activation)
    split = Split(("r_", "r", "r_"), ("r_", "r"))
    return linear.replaced(run, plain, split, implementation)
