"""The ops of glu, and their gradients'."""

from __future__ import annotations

import functools
from typing import Any

import jax

from triax.moe.activations import launchers, reference
from triax.moe.shared import linear
from triax.moe.shared.ops import Call, Op
from triax.moe.shared.sharding import Shard


def _derivative(call: Call, primals: Any, tangents: Any, out: jax.Array) -> jax.Array:
    names = "gate_up", "up", "row_weights"
    plain = functools.partial(reference.glu_reference, **call.options)

    def along(operands: dict[str, Any], moving: dict[str, jax.Array]) -> jax.Array:
        fixed = {name: operands[name] for name in moving}
        return jax.jvp(lambda moved: plain(**operands | moved), (fixed,), (moving,))[1]

    def back(operands: dict[str, Any], gradient: jax.Array) -> dict[str, Any]:
        gradients = call.like(_GRADIENTS[call.op.name])(*map(operands.get, names), gradient)
        found = dict(zip(names, gradients, strict=True))
        if found["row_weights"] is not None:
            found["row_weights"] = found["row_weights"].astype(operands["row_weights"].dtype)
        return found

    operands, moving = (dict(zip(names, of, strict=True)) for of in (primals, tangents))
    return linear.call(along, back, operands, moving, out)


def _sum_over_width(call: Call, shard: Shard, *arguments: Any) -> Any:
    d_gate, d_up, d_row_weights = call.run(*arguments)
    if d_row_weights is not None:
        d_row_weights = shard.sum("w", d_row_weights)
    return d_gate, d_up, d_row_weights


# Of gate and up in one array, nothing, and the rows' weights.
glu = Op(
    "glu",
    arguments=("ru", "", "r"),
    results="rw",
    cut="r",
    kernels=launchers.glu,
    xla=reference.glu_reference,
    derivative=_derivative,
)

# Of gate and up, or of an array that is not gated and nothing: the width can be cut, too.
glu_of_two = Op(
    "glu_of_two",
    arguments=("rw", "rw", "r"),
    results="rw",
    cut="rw",
    kernels=launchers.glu,
    xla=reference.glu_reference,
    derivative=_derivative,
)

# Their gradients are differentiated in plain JAX, because second derivatives are rare.
glu_grad = Op(
    "glu_grad",
    arguments=("ru", "", "r", "rw"),
    results=("ru", "", "r"),
    cut="r",
    kernels=launchers.glu_grad,
    xla=reference.glu_grad_reference,
    derivative="xla",
)

glu_of_two_grad = Op(
    "glu_of_two_grad",
    arguments=("rw", "rw", "r", "rw"),
    results=("rw", "rw", "r"),
    cut="rw",
    kernels=launchers.glu_grad,
    xla=reference.glu_grad_reference,
    derivative="xla",
    part=_sum_over_width,
)

_GRADIENTS = {"glu": glu_grad, "glu_of_two": glu_of_two_grad}
