"""The op of glu, and its gradients'."""

from __future__ import annotations

import functools
from typing import Any

import jax

from triax.moe.activations import launchers, reference
from triax.moe.shared import linear
from triax.moe.shared.ops import Call, Op


def _derivative(call: Call, primals: Any, tangents: Any, out: jax.Array) -> jax.Array:
    names = "gate_up", "row_weights"
    plain = functools.partial(reference.glu_reference, **call.options)

    def along(operands: dict[str, Any], moving: dict[str, jax.Array]) -> jax.Array:
        fixed = {name: operands[name] for name in moving}
        return jax.jvp(lambda moved: plain(**operands | moved), (fixed,), (moving,))[1]

    def back(operands: dict[str, Any], gradient: jax.Array) -> dict[str, Any]:
        row_weights = operands["row_weights"]
        d_gate_up, d_row_weights = call.like(glu_grad)(operands["gate_up"], row_weights, gradient)
        if d_row_weights is not None:
            d_row_weights = d_row_weights.astype(row_weights.dtype)
        return {"gate_up": d_gate_up, "row_weights": d_row_weights}

    operands, moving = (dict(zip(names, of, strict=True)) for of in (primals, tangents))
    return linear.call(along, back, operands, moving, out)


glu = Op(
    "glu",
    arguments=("ru", "r"),  # gate and up beside each other, weights
    results="rw",
    cut="r",
    kernels=launchers.glu,
    xla=reference.glu_reference,
    derivative=_derivative,
)

glu_grad = Op(
    "glu_grad",
    arguments=("ru", "r", "rw"),
    results=("ru", "r"),
    cut="r",
    kernels=launchers.glu_grad,
    xla=reference.glu_grad_reference,
    derivative="xla",  # second derivatives are rare
)
