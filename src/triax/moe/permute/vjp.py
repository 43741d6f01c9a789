"""The derivatives of permute and unpermute, which are each other's.

`permute_rows` copies tokens to rows; its transpose, `gather_rows`, sums the rows up again.
`weigh_rows` sums them up with weights; `spread_gradient` is its gradient, and closes the
circle: its own gradient is made of these four.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from triax.moe import implementation as implementations
from triax.moe.permute import launchers, reference
from triax.moe.permute.reference import Gathered, Permuted, Routes


def _saved(tree: Any) -> Any:
    # Residuals that are inputs, JAX does not save but looks up among the inputs; inside `scan`,
    # under a second derivative, it looks in the wrong place (its count leaves out constants such
    # as the platform's index). A named value is no input, and costs nothing in the program.
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, "triax_residual"), tree)


def _is_differentiable(gradient: jax.Array | None) -> bool:
    return gradient is not None and gradient.dtype != jax.dtypes.float0


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def permute_rows(
    x: jax.Array,
    weights: jax.Array | None,
    scales: jax.Array | None,
    routes: Routes,
    implementation: str | None,
) -> Permuted:
    """Tokens, weights and scales copied to the rows that `routes` tells."""
    return implementations.run(
        implementation,
        x,
        weights,
        scales,
        routes,
        kernels=launchers.permute,
        xla=reference.permute_reference,
    )


def _permute_rows_fwd(
    x: jax.Array,
    weights: jax.Array | None,
    scales: jax.Array | None,
    routes: Routes,
    implementation: str | None,
) -> tuple[Permuted, Routes]:
    return permute_rows(x, weights, scales, routes, implementation), _saved(routes)


def _permute_rows_bwd(implementation: str | None, routes: Routes, gradient: Permuted) -> Any:
    d_rows, d_row_weights, d_row_scales = gradient
    d_x = d_weights = d_scales = None
    if _is_differentiable(d_rows):
        d_x, d_weights = gather_rows(d_rows, d_row_weights, routes, implementation)
    elif d_row_weights is not None:  # rows of integers: the weights come back alone
        no_rows = jnp.zeros((routes.num_rows, 0), jnp.float32)
        _, d_weights = gather_rows(no_rows, d_row_weights, routes, implementation)
    if _is_differentiable(d_row_scales):
        d_scales, _ = gather_rows(d_row_scales, None, routes, implementation)
    return d_x, d_weights, d_scales, None


permute_rows.defvjp(_permute_rows_fwd, _permute_rows_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def gather_rows(
    rows: jax.Array, row_weights: jax.Array | None, routes: Routes, implementation: str | None
) -> Gathered:
    """Each token's sum over its rows, and each slot's weight of `row_weights`."""
    return implementations.run(
        implementation,
        rows,
        None,
        row_weights,
        routes,
        kernels=launchers.unpermute,
        xla=reference.unpermute_reference,
    )


def _gather_rows_fwd(
    rows: jax.Array, row_weights: jax.Array | None, routes: Routes, implementation: str | None
) -> tuple[Gathered, Routes]:
    return gather_rows(rows, row_weights, routes, implementation), _saved(routes)


def _gather_rows_bwd(implementation: str | None, routes: Routes, gradient: Gathered) -> Any:
    d_rows, d_row_weights, _ = permute_rows(*gradient, None, routes, implementation)
    return d_rows, d_row_weights, None


gather_rows.defvjp(_gather_rows_fwd, _gather_rows_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def weigh_rows(
    rows: jax.Array, weights: jax.Array, routes: Routes, implementation: str | None
) -> jax.Array:
    """Each token's sum over its rows times `weights` [tokens, top_k]."""
    return implementations.run(
        implementation,
        rows,
        weights,
        None,
        routes,
        kernels=launchers.unpermute,
        xla=reference.unpermute_reference,
    ).x


def _weigh_rows_fwd(
    rows: jax.Array, weights: jax.Array, routes: Routes, implementation: str | None
) -> tuple[jax.Array, Any]:
    return weigh_rows(rows, weights, routes, implementation), _saved((rows, weights, routes))


def _weigh_rows_bwd(implementation: str | None, residuals: Any, gradient: jax.Array) -> Any:
    rows, weights, routes = residuals
    return *spread_gradient(rows, weights, gradient, routes, implementation), None


weigh_rows.defvjp(_weigh_rows_fwd, _weigh_rows_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def spread_gradient(
    rows: jax.Array,
    weights: jax.Array,
    gradient: jax.Array,
    routes: Routes,
    implementation: str | None,
) -> tuple[jax.Array, jax.Array]:
    """The gradients of `weigh_rows`: ``weight * gradient`` by row, ``<row, gradient>`` by slot."""
    return implementations.run(
        implementation,
        rows,
        weights,
        gradient,
        routes,
        kernels=launchers.unpermute_grad,
        xla=reference.unpermute_grad_reference,
    )


def _spread_gradient_fwd(
    rows: jax.Array,
    weights: jax.Array,
    gradient: jax.Array,
    routes: Routes,
    implementation: str | None,
) -> tuple[Any, Any]:
    residuals = _saved((rows, weights, gradient, routes))
    return spread_gradient(rows, weights, gradient, routes, implementation), residuals


def _spread_gradient_bwd(
    implementation: str | None, residuals: Any, seconds: tuple[jax.Array, jax.Array]
) -> Any:
    rows, weights, gradient, routes = residuals
    a, b = seconds  # like rows, like weights
    d_rows, d_weights = spread_gradient(a, b, gradient, routes, implementation)
    d_gradient = weigh_rows(a, weights, routes, implementation)
    d_gradient += weigh_rows(rows, b, routes, implementation)
    return d_rows, d_weights, d_gradient, None


spread_gradient.defvjp(_spread_gradient_fwd, _spread_gradient_bwd)
