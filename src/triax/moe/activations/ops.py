"""The ops of glu and of its gradients."""

from __future__ import annotations

import functools
from typing import Any

import jax

from triax.moe.activations import launchers, reference
from triax.moe.activations.reference import GluSpec
from triax.moe.shared.ops import Call, Op, not_differentiable
from triax.sharding import linear
from triax.sharding.splits import Shard


def _derivative(call: Call, primals: Any, tangents: Any, out: jax.Array) -> jax.Array:
    names = "gate_up", "up", "row_weights"
    plain = functools.partial(reference.glu_reference, **call.options)

    def along(operands: dict[str, Any], tangents: dict[str, jax.Array]) -> jax.Array:
        fixed = {name: operands[name] for name in tangents}
        return jax.jvp(lambda moved: plain(**operands | moved), (fixed,), (tangents,))[1]

    def back(operands: dict[str, Any], gradient: jax.Array) -> dict[str, Any]:
        arguments = (operands[name] for name in names)
        return gradients(call, *arguments, gradient=gradient, again=False)[0]

    operands, named = (dict(zip(names, of, strict=True)) for of in (primals, tangents))
    return linear.call(along, back, operands, named, out)


def gradients(
    call: Call, gate_up: Any, up: Any, row_weights: Any, *, gradient: Any, again: bool
) -> tuple[dict[str, Any], Any]:
    """Returns the operands' gradients by name, and with `again` the result of glu."""
    of = call.like(glu_grad, again=again)
    d_gate_up, d_up, d_row_weights, out = of(gate_up, up, row_weights, gradient)
    if d_row_weights is not None:
        d_row_weights = d_row_weights.astype(row_weights.dtype)
    return {"gate_up": d_gate_up, "up": d_up, "row_weights": d_row_weights}, out


def _sum_over_width(call: Call, shard: Shard, *arguments: Any) -> Any:
    d_gate, d_up, d_row_weights, out = call.run(*arguments)
    if d_row_weights is not None:
        d_row_weights = shard.sum("w", d_row_weights)
    return d_gate, d_up, d_row_weights, out


_no_derivative = not_differentiable(
    "glu in 8 bits has no derivative: quantize is not differentiable."
)


def _dims(results: tuple[str | None, ...], shardable: str) -> Any:
    """Makes an op's `dims`; in `results`, None stands for the dimensions of gate and up."""

    def of(gate_up: Any, up: Any, *_: Any, spec: GluSpec, **__: Any) -> Any:
        in_one = spec.gated and up is None  # the joint width, u, is needed whole
        both = "ru" if in_one else "rw"
        dims = tuple(each or both for each in results)
        return (both, both, "r", "rw"), dims, "r" if in_one else shardable

    return of


# Operands: gate and up, or one array and None; the row weights or None.
glu = Op(
    "glu",
    dims=_dims(("rw",), "rw"),
    kernels=launchers.glu,
    xla=reference.glu_reference,
    derivative=_derivative,
)

# Quantizes the result of glu with a scale for each row. Results: values, scales.
quantized_glu = Op(
    "quantized_glu",
    dims=_dims(("rw", "r_"), "r"),
    kernels=launchers.quantized_glu,
    xla=reference.quantized_glu_reference,
    derivative=_no_derivative,
)

# Computes glu's gradients, which are differentiated in plain JAX: second derivatives are rare.
glu_grad = Op(
    "glu_grad",
    dims=_dims((None, None, "r", "rw"), "rw"),
    kernels=launchers.glu_grad,
    xla=reference.glu_grad_reference,
    derivative="xla",
    local=_sum_over_width,
)
