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
from triax.moe.shared.sharding import Shard, Split


@functools.cache
def ragged_dot(transposed: bool, options: Options, implementation: str | None) -> linear.Function:
    """Each row times the weights of its group, or times them transposed.

    Of rows, weights and group_sizes, and optionally row_scales and group_scales.
    """
    choose = functools.partial(
        implementations.choose,
        implementation,
        launchers.ragged_dot,
        reference.ragged_dot_reference,
        transposed=transposed,
    )
    run, run_wide = choose(options=options), choose(options=options.for_partial_sums())

    def derivative(primals: Any, tangents: Any, out: jax.Array) -> Any:
        dtype = primals[0].dtype
        if dtype.itemsize == 1:
            raise DifferentiationError(
                f"moe.ragged_dot of {dtype} has no derivative: 8 bits do not hold one. Multiply in "
                "bfloat16 where you differentiate, or write the gradient with jax.custom_vjp."
            )
        if any(scale is not None for scale in primals[3:]):
            raise DifferentiationError(
                "moe.ragged_dot with `row_scales` or `group_scales` has no derivative. Scale the "
                "rows or the result outside of it where you differentiate."
            )
        return _product_rule(op, back, primals, tangents, out)

    def back(residuals: Any, gradient: jax.Array) -> dict[str, jax.Array]:
        rows, weights, group_sizes = residuals
        dtype = (weights if rows is None else rows).dtype
        gradient = gradient.astype(dtype)
        like = Options(dtype, options.precision)
        cotangents = {}
        if weights is not None:
            multiply = ragged_dot(not transposed, like, implementation)
            cotangents["left"] = multiply(gradient, weights, group_sizes)
        if rows is not None:
            left, right = (gradient, rows) if transposed else (rows, gradient)
            cotangents["right"] = group_outer(like, implementation)(left, right, group_sizes)
        return cotangents

    def product_of_part(
        _: Any, shard: Shard, rows: Any, weights: Any, sizes: Any, *scales: Any
    ) -> jax.Array:
        sizes = _sizes_of_part(shard, sizes, rows.shape[0])
        if shard.count("k") > 1:
            sums = run_wide(rows, weights, sizes, *scales)
            return shard.sum("k", sums).astype(options.dtype)
        return run(rows, weights, sizes, *scales)

    of_weights = "_nk" if transposed else "_kn"
    split = Split(("rk", of_weights, None, "r"), "rn", product_of_part)
    op = linear.op(run, derivative, split, implementation)
    return op


@functools.cache
def group_outer(options: Options, implementation: str | None) -> linear.Function:
    """For each group the sum over its rows of left × right: [groups, left, right].

    Of left, right and group_sizes.
    """
    choose = functools.partial(
        implementations.choose,
        implementation,
        launchers.group_outer,
        reference.group_outer_reference,
    )
    run, run_wide = choose(options=options), choose(options=options.for_partial_sums())

    def derivative(primals: Any, tangents: Any, out: jax.Array) -> Any:
        return _product_rule(op, back, primals, tangents, out)

    def back(residuals: Any, gradient: jax.Array) -> dict[str, jax.Array]:
        left, right, group_sizes = residuals
        dtype = (right if left is None else left).dtype
        weights = gradient.astype(dtype)
        like = Options(dtype, options.precision)
        cotangents = {}
        if right is not None:
            multiply = ragged_dot(True, like, implementation)
            cotangents["left"] = multiply(right, weights, group_sizes)
        if left is not None:
            multiply = ragged_dot(False, like, implementation)
            cotangents["right"] = multiply(left, weights, group_sizes)
        return cotangents

    def sum_of_part(_: Any, shard: Shard, left: Any, right: Any, sizes: Any) -> jax.Array:
        sizes = _sizes_of_part(shard, sizes, left.shape[0])
        if shard.count("r") > 1:
            return shard.sum("r", run_wide(left, right, sizes)).astype(options.dtype)
        return run(left, right, sizes)

    split = Split(("rk", "rn", None), "_kn", sum_of_part)
    op = linear.op(run, derivative, split, implementation)
    return op


def _sizes_of_part(shard: Shard, sizes: jax.Array, num_rows: int) -> jax.Array:
    """How many rows of each group are among the `num_rows` of a part."""
    part, count = shard.index("r"), shard.count("r")
    if count == 1:
        return sizes
    ends = reference.group_ends(sizes, num_rows * count) - part * num_rows
    return jnp.diff(jnp.clip(ends, 0, num_rows), prepend=0)


def _product_rule(product: Any, back: Any, primals: Any, tangents: Any, out: Any) -> Any:
    """The tangent of ``product(left, right, group_sizes)``, which is linear in left and in right.

    Each of the two is needed, and kept for the gradient, only where the other one has a tangent.
    """
    left, right = (
        primal if other is not None else None
        for primal, other in zip(primals[:2], tangents[1::-1], strict=True)
    )

    def along(residuals: Any, moving: dict[str, jax.Array]) -> Any:
        left, right, group_sizes = residuals
        terms = []
        if "left" in moving:
            terms.append(product(moving["left"], right, group_sizes))
        if "right" in moving:
            terms.append(product(left, moving["right"], group_sizes))
        return functools.reduce(jnp.add, terms)

    moving = {"left": tangents[0], "right": tangents[1]}
    return linear.call(along, back, (left, right, primals[2]), moving, out)
