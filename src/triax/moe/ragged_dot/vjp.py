"""The derivatives of ragged_dot, a product that is linear in its rows and in its weights.

The gradient of the rows is the same product with the weights transposed; that of the weights is
`group_outer`, whose own gradients are products of the first kind again. So derivatives of any
order are made of these two.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from triax.bridge.errors import DifferentiationError
from triax.moe import implementation as implementations
from triax.moe.ragged_dot import launchers, reference
from triax.moe.ragged_dot.launchers import Options

Operands = tuple[jax.Array, jax.Array, jax.Array]


def _saved(tree: Any) -> Any:
    # Residuals that are inputs, JAX does not save but looks up among the inputs; inside `scan`,
    # under a second derivative, it looks in the wrong place (its count leaves out constants such
    # as the platform's index). A named value is no input, and costs nothing in the program.
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, "triax_residual"), tree)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def ragged_dot(
    rows: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    transposed: bool,
    options: Options,
    implementation: str | None,
) -> jax.Array:
    """Each row times the weights of its group, or times them transposed."""
    return scaled(rows, weights, group_sizes, None, None, transposed, options, implementation)


def scaled(
    rows: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    row_scales: jax.Array | None,
    group_scales: jax.Array | None,
    transposed: bool,
    options: Options,
    implementation: str | None,
) -> jax.Array:
    """The product times a scale of each row and one of each group, without a derivative."""
    return implementations.run(
        implementation,
        rows,
        weights,
        group_sizes,
        row_scales,
        group_scales,
        kernels=functools.partial(launchers.ragged_dot, transposed=transposed, options=options),
        xla=functools.partial(
            reference.ragged_dot_reference, transposed=transposed, options=options
        ),
    )


def _ragged_dot_fwd(
    rows: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    transposed: bool,
    options: Options,
    implementation: str | None,
) -> tuple[jax.Array, Operands]:
    out = ragged_dot(rows, weights, group_sizes, transposed, options, implementation)
    return out, _saved((rows, weights, group_sizes))


def _ragged_dot_bwd(
    transposed: bool,
    options: Options,
    implementation: str | None,
    residuals: Operands,
    gradient: jax.Array,
) -> Any:
    rows, weights, group_sizes = residuals
    if rows.dtype.itemsize == 1:
        raise DifferentiationError(
            f"moe.ragged_dot of {rows.dtype} has no gradient: 8 bits do not hold one. Multiply in "
            "bfloat16 where you differentiate, or write the gradient with jax.custom_vjp."
        )
    gradient = gradient.astype(rows.dtype)
    like_rows = Options(rows.dtype, options.precision)
    like_weights = Options(weights.dtype, options.precision)
    d_rows = ragged_dot(gradient, weights, group_sizes, not transposed, like_rows, implementation)
    sides = (gradient, rows) if transposed else (rows, gradient)
    d_weights = group_outer(*sides, group_sizes, like_weights, implementation)
    return d_rows, d_weights, None


ragged_dot.defvjp(_ragged_dot_fwd, _ragged_dot_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def group_outer(
    left: jax.Array,
    right: jax.Array,
    group_sizes: jax.Array,
    options: Options,
    implementation: str | None,
) -> jax.Array:
    """For each group the sum over its rows of left × right: [groups, left, right]."""
    return implementations.run(
        implementation,
        left,
        right,
        group_sizes,
        kernels=functools.partial(launchers.group_outer, options=options),
        xla=functools.partial(reference.group_outer_reference, options=options),
    )


def _group_outer_fwd(
    left: jax.Array,
    right: jax.Array,
    group_sizes: jax.Array,
    options: Options,
    implementation: str | None,
) -> tuple[jax.Array, Operands]:
    out = group_outer(left, right, group_sizes, options, implementation)
    return out, _saved((left, right, group_sizes))


def _group_outer_bwd(
    options: Options, implementation: str | None, residuals: Operands, gradient: jax.Array
) -> Any:
    left, right, group_sizes = residuals
    gradient = gradient.astype(left.dtype)
    like_left = Options(left.dtype, options.precision)
    like_right = Options(right.dtype, options.precision)
    d_left = ragged_dot(right, gradient, group_sizes, True, like_left, implementation)
    d_right = ragged_dot(left, gradient, group_sizes, False, like_right, implementation)
    return d_left, d_right, None


group_outer.defvjp(_group_outer_fwd, _group_outer_bwd)
