"""The ops of glu and of its gradients.

`activate`, `activate_quantized` and `activate_gradients` call them, or a JAX function, with checked
arguments: for the public `glu`, and for what is made of it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from triax.moe.activations import functions, launchers, reference
from triax.moe.activations.options import ResolvedActivation
from triax.moe.activations.reference import GluSpec
from triax.moe.quantization.ops import quantized
from triax.moe.quantization.scaled import ScaledArray
from triax.moe.shared import implementation as implementations
from triax.moe.shared.implementation import Implementation
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
    of = call.replace(glu_grad, again=again)
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


def activate(
    gate_up: jax.Array,
    up: jax.Array | None,
    row_weights: jax.Array | None,
    activation: ResolvedActivation,
    *,
    implementation: Implementation | None,
) -> jax.Array:
    """Computes `glu` of gate and up, or of one array and None."""
    if activation.function is not None:
        run = functools.partial(functions.apply, activation.function, activation.spec)
        out = jax.checkpoint(run)(gate_up, up, row_weights)
    else:
        implementation = _fit(implementation, gate_up, row_weights)
        out = glu(gate_up, up, row_weights, spec=activation.spec, implementation=implementation)
    return checkpoint_name(out, "triax_glu")


def activate_quantized(
    gate_up: jax.Array,
    up: jax.Array | None,
    row_weights: jax.Array | None,
    activation: ResolvedActivation,
    dtype: str,
    *,
    implementation: Implementation | None,
) -> ScaledArray:
    """Computes `glu`, quantized with a scale for each row."""
    if activation.function is not None or not gate_up.size:
        out = activate(gate_up, up, row_weights, activation, implementation=implementation)
        return quantized(out, dtype, block=(1, None), implementation=implementation)
    options: dict[str, Any] = {"spec": activation.spec, "dtype": np.dtype(dtype)}
    options["implementation"] = _fit(implementation, gate_up, row_weights)
    values, scales = quantized_glu(gate_up, up, row_weights, **options)
    return ScaledArray(values, scales, (1, None))


def activate_gradients(
    gate_up: jax.Array,
    up: jax.Array | None,
    row_weights: jax.Array | None,
    activation: ResolvedActivation,
    gradient: jax.Array,
    *,
    again: bool,
    implementation: Implementation | None,
) -> tuple[dict[str, Any], Any]:
    """Returns the gradients of `glu`'s operands by name, and with `again` the result of `glu`.

    One pass over the operands computes all of them. A function must not close over JAX arrays.
    """
    if activation.function is not None:
        operands = gate_up, up, row_weights
        return functions.gradients(activation.function, activation.spec, *operands, gradient)
    call = glu.of(_fit(implementation, gate_up, row_weights), spec=activation.spec)
    return gradients(call, gate_up, up, row_weights, gradient=gradient, again=again)


def _fit(
    implementation: Implementation | None, gate_up: jax.Array, row_weights: jax.Array | None
) -> Implementation | None:
    if not gate_up.size:
        return "xla"
    return implementations.fit(implementation, gate_up, row_weights, floats=True)
