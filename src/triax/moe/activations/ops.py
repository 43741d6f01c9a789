"""The ops of glu, and their gradients'."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import jax

from triax.errors import DifferentiationError
from triax.moe.activations import launchers, reference
from triax.moe.shared.ops import Call, Op
from triax.sharding import linear
from triax.sharding.splits import Shard


def _derivative(call: Call, primals: Any, tangents: Any, out: jax.Array) -> jax.Array:
    names = "gate_up", "up", "row_weights"
    plain = functools.partial(reference.glu_reference, **call.options)

    def along(operands: dict[str, Any], moving: dict[str, jax.Array]) -> jax.Array:
        fixed = {name: operands[name] for name in moving}
        return jax.jvp(lambda moved: plain(**operands | moved), (fixed,), (moving,))[1]

    def back(operands: dict[str, Any], gradient: jax.Array) -> dict[str, Any]:
        given = (operands[name] for name in names)
        return gradients(call, *given, gradient=gradient, again=False)[0]

    operands, moving = (dict(zip(names, of, strict=True)) for of in (primals, tangents))
    return linear.call(along, back, operands, moving, out)


def gradients(
    call: Call, gate_up: Any, up: Any, row_weights: Any, *, gradient: Any, again: bool
) -> tuple[dict[str, Any], Any]:
    """Of one of glu's ops the operands' gradients, by name; and, `again`, its result."""
    of = call.like(_GRADIENTS[call.op.name], again=again)
    d_gate_up, d_up, d_row_weights, out = of(gate_up, up, row_weights, gradient)
    if d_row_weights is not None:
        d_row_weights = d_row_weights.astype(row_weights.dtype)
    return {"gate_up": d_gate_up, "up": d_up, "row_weights": d_row_weights}, out


def _sum_over_width(call: Call, shard: Shard, *arguments: Any) -> Any:
    d_gate, d_up, d_row_weights, out = call.run(*arguments)
    if d_row_weights is not None:
        d_row_weights = shard.sum("w", d_row_weights)
    return d_gate, d_up, d_row_weights, out


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


def _no_derivative(*_: Any) -> NoReturn:
    raise DifferentiationError("glu in 8 bits has no derivative: quantize has no derivative.")


# What `quantize` makes of their results, with a scale for each row: values and scales.
_quantized = functools.partial(
    Op,
    results=("rw", "r_"),
    cut="r",
    kernels=launchers.quantized_glu,
    xla=reference.quantized_glu_reference,
    derivative=_no_derivative,
)
quantized_glu = _quantized("quantized_glu", arguments=("ru", "", "r"))
quantized_glu_of_two = _quantized("quantized_glu_of_two", arguments=("rw", "rw", "r"))

# Their gradients are differentiated in plain JAX, because second derivatives are rare.
glu_grad = Op(
    "glu_grad",
    arguments=("ru", "", "r", "rw"),
    results=("ru", "", "r", "rw"),
    cut="r",
    kernels=launchers.glu_grad,
    xla=reference.glu_grad_reference,
    derivative="xla",
)

glu_of_two_grad = Op(
    "glu_of_two_grad",
    arguments=("rw", "rw", "r", "rw"),
    results=("rw", "rw", "r", "rw"),
    cut="rw",
    kernels=launchers.glu_grad,
    xla=reference.glu_grad_reference,
    derivative="xla",
    part=_sum_over_width,
)

_GRADIENTS = {"glu": glu_grad, "glu_of_two": glu_of_two_grad}
QUANTIZED = {"glu": quantized_glu, "glu_of_two": quantized_glu_of_two}
