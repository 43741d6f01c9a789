"""The derivatives of ragged_dot, a product that is linear in its rows and in its weights.

The gradient of the rows is the same product with the weights transposed; that of the weights is
`group_outer`, whose own gradients are products of the first kind again. So derivatives of any
order are made of these two.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from triax.errors import DifferentiationError
from triax.moe.ragged_dot import launchers, reference
from triax.moe.ragged_dot.launchers import Options
from triax.moe.shared import implementation as implementations
from triax.moe.shared import linear


def ragged_dot(
    rows: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    *,
    row_scales: jax.Array | None = None,
    group_scales: jax.Array | None = None,
    transposed: bool = False,
    options: Options,
    implementation: str | None,
) -> jax.Array:
    """Each row times the weights of its group, or times them transposed."""
    rules = _ragged_dot(transposed, options, implementation)
    out: jax.Array = linear.op(*rules, rows, weights, group_sizes, row_scales, group_scales)
    return out


@functools.cache
def _ragged_dot(transposed: bool, options: Options, implementation: str | None) -> linear.Rules:
    static: dict[str, Any] = {"transposed": transposed, "options": options}
    run = implementations.choose(
        implementation, launchers.ragged_dot, reference.ragged_dot_reference, **static
    )

    def derivative(primals: Any, tangents: Any, out: jax.Array) -> Any:
        rows, weights, group_sizes, *scales = primals
        if rows.dtype.itemsize == 1:
            raise DifferentiationError(
                f"moe.ragged_dot of {rows.dtype} has no derivative: 8 bits do not hold one. "
                "Multiply in bfloat16 where you differentiate, or write the gradient with "
                "jax.custom_vjp."
            )
        if any(scale is not None for scale in scales):
            raise DifferentiationError(
                "moe.ragged_dot with `row_scales` or `group_scales` has no derivative. Scale the "
                "rows or the result outside of it where you differentiate."
            )
        operands = {"rows": rows, "weights": weights}
        return _product_rule(multiply, back, operands, tangents, group_sizes, out)

    multiply: Any = functools.partial(ragged_dot, **static, implementation=implementation)

    def back(residuals: Any, gradient: jax.Array) -> dict[str, jax.Array]:
        fixed, group_sizes = residuals
        (dtype,) = {array.dtype for array in fixed.values()}
        gradient = gradient.astype(dtype)
        like: dict[str, Any] = {
            "options": Options(dtype, options.precision),
            "implementation": implementation,
        }
        cotangents = {}
        if "weights" in fixed:
            cotangents["rows"] = ragged_dot(
                gradient, fixed["weights"], group_sizes, transposed=not transposed, **like
            )
        if "rows" in fixed:
            rows = fixed["rows"]
            left, right = (gradient, rows) if transposed else (rows, gradient)
            cotangents["weights"] = group_outer(left, right, group_sizes, **like)
        return cotangents

    return run, derivative


def group_outer(
    left: jax.Array,
    right: jax.Array,
    group_sizes: jax.Array,
    *,
    options: Options,
    implementation: str | None,
) -> jax.Array:
    """For each group the sum over its rows of left × right: [groups, left, right]."""
    out: jax.Array = linear.op(*_group_outer(options, implementation), left, right, group_sizes)
    return out


@functools.cache
def _group_outer(options: Options, implementation: str | None) -> linear.Rules:
    run = implementations.choose(
        implementation, launchers.group_outer, reference.group_outer_reference, options=options
    )

    def derivative(primals: Any, tangents: Any, out: jax.Array) -> Any:
        left, right, group_sizes = primals
        operands = {"left": left, "right": right}
        return _product_rule(multiply, back, operands, tangents, group_sizes, out)

    multiply = functools.partial(group_outer, options=options, implementation=implementation)

    def back(residuals: Any, gradient: jax.Array) -> dict[str, jax.Array]:
        fixed, group_sizes = residuals
        (dtype,) = {array.dtype for array in fixed.values()}
        like: dict[str, Any] = {
            "options": Options(dtype, options.precision),
            "implementation": implementation,
        }
        weights = gradient.astype(dtype)
        cotangents = {}
        if "right" in fixed:
            cotangents["left"] = ragged_dot(
                fixed["right"], weights, group_sizes, transposed=True, **like
            )
        if "left" in fixed:
            cotangents["right"] = ragged_dot(fixed["left"], weights, group_sizes, **like)
        return cotangents

    return run, derivative


def _product_rule(
    multiply: Any, back: Any, operands: dict[str, Any], tangents: Any, group_sizes: Any, out: Any
) -> Any:
    """The tangent of ``multiply(**operands, group_sizes=group_sizes)``, linear in both operands.

    An operand is needed, and kept for the gradient, only where the other one has a tangent.
    """
    moving = dict(zip(operands, tangents, strict=False))
    fixed = {
        name: array
        for name, array in operands.items()
        if any(moving[other] is not None for other in operands if other != name)
    }

    def along(residuals: Any, moving: dict[str, jax.Array]) -> Any:
        fixed, group_sizes = residuals
        terms = [
            multiply(**fixed | {name: tangent}, group_sizes=group_sizes)
            for name, tangent in moving.items()
        ]
        return functools.reduce(jnp.add, terms)

    return linear.call(along, back, (fixed, group_sizes), moving, out)
