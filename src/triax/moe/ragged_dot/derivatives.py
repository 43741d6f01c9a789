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
    run = functools.partial(
        implementations.dispatch,
        implementation,
        kernels=functools.partial(launchers.ragged_dot, transposed=transposed, options=options),
        xla=functools.partial(
            reference.ragged_dot_reference, transposed=transposed, options=options
        ),
    )

    scaled = row_scales is not None or group_scales is not None

    def derivative(primals: Any, tangents: Any, out: jax.Array) -> jax.Array:
        rows, weights, group_sizes, *_ = primals
        if rows.dtype.itemsize == 1:
            raise DifferentiationError(
                f"moe.ragged_dot of {rows.dtype} has no derivative: 8 bits do not hold one. "
                "Multiply in bfloat16 where you differentiate, or write the gradient with "
                "jax.custom_vjp."
            )
        if scaled:
            raise DifferentiationError(
                "moe.ragged_dot with `row_scales` or `group_scales` has no derivative. Scale the "
                "rows or the result outside of it where you differentiate."
            )
        moving = {"rows": tangents[0], "weights": tangents[1]}
        return ragged_dot_tangent(
            rows,
            weights,
            group_sizes,
            moving,
            transposed=transposed,
            options=options,
            implementation=implementation,
        )

    return linear.op(run, derivative, rows, weights, group_sizes, row_scales, group_scales)


def ragged_dot_tangent(
    rows: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    tangents: dict[str, jax.Array | None],
    *,
    transposed: bool = False,
    options: Options,
    implementation: str | None,
) -> jax.Array:
    """The product's tangent, from those of `rows` and `weights` (None for one that is zero)."""
    multiply = functools.partial(
        ragged_dot, transposed=transposed, options=options, implementation=implementation
    )

    def along(primals: Any, moving: dict[str, jax.Array]) -> jax.Array:
        rows, weights, group_sizes = primals
        terms = []
        if "rows" in moving:
            terms.append(multiply(moving["rows"], weights, group_sizes))
        if "weights" in moving:
            terms.append(multiply(rows, moving["weights"], group_sizes))
        return functools.reduce(jnp.add, terms)

    def back(primals: Any, gradient: jax.Array) -> dict[str, jax.Array]:
        rows, weights, group_sizes = primals
        gradient = gradient.astype(rows.dtype)
        d_rows = ragged_dot(
            gradient,
            weights,
            group_sizes,
            transposed=not transposed,
            options=Options(rows.dtype, options.precision),
            implementation=implementation,
        )
        left, right = (gradient, rows) if transposed else (rows, gradient)
        d_weights = group_outer(
            left,
            right,
            group_sizes,
            options=Options(weights.dtype, options.precision),
            implementation=implementation,
        )
        return {"rows": d_rows, "weights": d_weights}

    columns = weights.shape[1 if transposed else 2]
    out = jax.ShapeDtypeStruct((rows.shape[0], columns), options.dtype)
    return linear.call(along, back, (rows, weights, group_sizes), tangents, out)


def group_outer(
    left: jax.Array,
    right: jax.Array,
    group_sizes: jax.Array,
    *,
    options: Options,
    implementation: str | None,
) -> jax.Array:
    """For each group the sum over its rows of left × right: [groups, left, right]."""
    multiply = functools.partial(group_outer, options=options, implementation=implementation)
    run = functools.partial(
        implementations.dispatch,
        implementation,
        kernels=functools.partial(launchers.group_outer, options=options),
        xla=functools.partial(reference.group_outer_reference, options=options),
    )

    def derivative(primals: Any, tangents: Any, out: jax.Array) -> jax.Array:
        moving = {"left": tangents[0], "right": tangents[1]}
        return linear.call(along, back, primals, moving, out)

    def along(primals: Any, moving: dict[str, jax.Array]) -> jax.Array:
        left, right, group_sizes = primals
        terms = []
        if "left" in moving:
            terms.append(multiply(moving["left"], right, group_sizes))
        if "right" in moving:
            terms.append(multiply(left, moving["right"], group_sizes))
        return functools.reduce(jnp.add, terms)

    def back(primals: Any, gradient: jax.Array) -> dict[str, jax.Array]:
        left, right, group_sizes = primals
        gradient = gradient.astype(left.dtype)
        product = functools.partial(
            ragged_dot,
            weights=gradient,
            group_sizes=group_sizes,
            options=Options(left.dtype, options.precision),
            implementation=implementation,
        )
        return {"left": product(right, transposed=True), "right": product(left)}

    return linear.op(run, derivative, left, right, group_sizes)
