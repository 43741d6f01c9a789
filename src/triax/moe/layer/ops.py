"""The layer's second half as one op, for its gradient.

That makes the activation's result again while it reads what the result is made of, and has the
weights' gradient before those of the first half, so that its operands are freed first.
"""

from __future__ import annotations

from typing import Any

import jax

from triax.moe.activations.api import glu, glu_gradients
from triax.moe.layer.experts import Matrix
from triax.moe.layer.products import Products
from triax.moe.shared.ops import Call, Op
from triax.moe.shared.order import after
from triax.sharding import linear

_NAMES = "gate_up", "up", "row_weights", "weights", "bias", "sizes"


def _both(gate_up: Any, up: Any) -> Any:
    return gate_up if up is None else (gate_up, up)


def _product(inner: Any, operands: dict[str, Any], how: Products) -> jax.Array:
    matrix = Matrix(operands["weights"], operands["bias"])
    return how.multiply(inner, matrix, operands["sizes"], operands["row_weights"])


def _run(
    *operands: Any, activation: Any, interleaved: bool, how: Products, implementation: Any
) -> jax.Array:
    given = dict(zip(_NAMES, operands, strict=True))
    gate_up = _both(given["gate_up"], given["up"])
    kind: dict[str, Any] = {"activation": activation, "interleaved": interleaved}
    inner = glu(gate_up, given["row_weights"], **kind, implementation=implementation)
    return _product(inner, given, how)


def _derivative(call: Call, primals: Any, tangents: Any, out: jax.Array) -> jax.Array:
    how, kind = call.options["how"], {n: call.options[n] for n in ("activation", "interleaved")}
    moved = {name for name, of in zip(_NAMES, tangents, strict=True) if of is not None}

    def along(operands: dict[str, Any], moving: dict[str, jax.Array]) -> jax.Array:
        def run(moving: dict[str, jax.Array]) -> jax.Array:
            given = operands | moving
            return call.run(*(given[name] for name in _NAMES))

        return jax.jvp(run, ({name: operands[name] for name in moving},), (moving,))[1]

    def back(operands: dict[str, Any], gradient: jax.Array) -> dict[str, Any]:
        of_dot = operands["weights"], operands["sizes"]
        d_inner = how.dot(gradient, *of_dot, transpose_weights=not how.transposed)
        found, inner = glu_gradients(
            _both(operands["gate_up"], operands["up"]),
            operands["row_weights"],
            d_inner,
            **kind,
            again="weights" in moved,
            implementation=call.implementation,
        )
        inner = d_inner if inner is None else inner  # which its gradient by a bias does not need
        names = moved & {"weights", "bias"}
        if operands["bias"] is not None:
            names |= moved & {"row_weights"}
        if names:
            product = lambda moving: _product(inner, operands | moving, how)
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
    operands: tuple[Any, ...], how: Products, *, activation: Any, interleaved: bool
) -> jax.Array:
    """`ragged_dot` of what `glu` makes of gate and up, in their dtype."""
    options = {"activation": activation, "interleaved": interleaved, "how": how}
    if callable(activation):  # do not cache: it may hold tracers
        found: jax.Array = Call(_op, how.implementation, options)(*operands)
        return found
    return _op(*operands, implementation=how.implementation, **options)
