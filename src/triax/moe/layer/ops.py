"""The layer's second half as one op, for its gradient.

That makes the activation's result again while it reads what the result is made of, and has the
weights' gradient before those of the first half, so that what this takes is in memory no longer.
"""

from __future__ import annotations

from typing import Any

import jax

from triax.moe.activations.api import glu, glu_gradients
from triax.moe.grouped_matmul.api import ragged_dot
from triax.moe.shared.ops import Call, Op
from triax.moe.shared.order import after
from triax.sharding import linear

_NAMES = "gate_up", "up", "row_weights", "weights", "bias", "sizes"


def _both(gate_up: Any, up: Any) -> Any:
    return gate_up if up is None else (gate_up, up)


def _product(
    inner: Any, operands: dict[str, Any], *, transposed: bool, precision: Any, implementation: Any
) -> jax.Array:
    # Not by name: None is the default in force, which may be another where this is differentiated.
    with jax.default_matmul_precision(precision):
        return ragged_dot(
            inner,
            operands["weights"],
            operands["sizes"],
            bias=operands["bias"],
            bias_weights=None if operands["bias"] is None else operands["row_weights"],
            transpose_weights=transposed,
            implementation=implementation,
        )


def _run(
    *operands: Any,
    activation: Any,
    interleaved: bool,
    transposed: bool,
    precision: Any,
    implementation: Any,
) -> jax.Array:
    given = dict(zip(_NAMES, operands, strict=True))
    inner = glu(
        _both(given["gate_up"], given["up"]),
        given["row_weights"],
        activation=activation,
        interleaved=interleaved,
        implementation=implementation,
    )
    how = {"transposed": transposed, "precision": precision, "implementation": implementation}
    return _product(inner, given, **how)


def _derivative(call: Call, primals: Any, tangents: Any, out: jax.Array) -> jax.Array:
    how = {"implementation": call.implementation} | call.options
    activation, interleaved = how.pop("activation"), how.pop("interleaved")
    moved = {name for name, of in zip(_NAMES, tangents, strict=True) if of is not None}

    def along(operands: dict[str, Any], moving: dict[str, jax.Array]) -> jax.Array:
        def run(moving: dict[str, jax.Array]) -> jax.Array:
            given = operands | moving
            return call.run(*(given[name] for name in _NAMES))

        return jax.jvp(run, ({name: operands[name] for name in moving},), (moving,))[1]

    def back(operands: dict[str, Any], gradient: jax.Array) -> dict[str, Any]:
        d_inner = _product(
            gradient,
            operands | {"bias": None},
            **how | {"transposed": not how["transposed"]},
        )
        found, inner = glu_gradients(
            _both(operands["gate_up"], operands["up"]),
            operands["row_weights"],
            d_inner,
            activation=activation,
            interleaved=interleaved,
            again="weights" in moved,
            implementation=call.implementation,
        )
        inner = d_inner if inner is None else inner  # which its gradient by a bias does not need
        names = moved & {"weights", "bias"}
        if operands["bias"] is not None:
            names |= moved & {"row_weights"}
        if names:
            product = lambda moving: _product(inner, operands | moving, **how)
            _, pull = jax.vjp(product, {name: operands[name] for name in names})
            (of_product,) = pull(gradient)
            d_row_weights = of_product.pop("row_weights", None)
            if d_row_weights is not None:
                found["row_weights"] += d_row_weights
            found |= of_product
        if "weights" in found:
            found["gate_up"] = after(found["gate_up"], found["weights"])
        return found

    operands, moving = (dict(zip(_NAMES, of, strict=True)) for of in (primals, tangents))
    return linear.call(along, back, operands, moving, out)


_op = Op("glu_ragged_dot", xla=_run, derivative=_derivative, inline=True)


def glu_ragged_dot(
    operands: tuple[Any, ...], *, activation: Any, implementation: Any, **options: Any
) -> jax.Array:
    """`ragged_dot` of what `glu` makes of gate and up."""
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    options |= {"activation": activation, "precision": precision}
    if callable(activation):  # which is not to be remembered
        found: jax.Array = Call(_op, implementation, options)(*operands)
        return found
    return _op(*operands, implementation=implementation, **options)
