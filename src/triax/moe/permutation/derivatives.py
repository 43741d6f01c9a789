"""The derivatives of permute and unpermute, which are each other's.

`permute_rows` copies tokens to rows; its transpose, `gather_rows`, sums the rows up again. Both are
linear. `weigh_rows` sums them up with weights; `spread_gradient` is its gradient, and closes the
circle: its own derivatives are made of these four.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from triax.moe.permutation import launchers, reference
from triax.moe.permutation.reference import Gathered, Permuted, Routes
from triax.moe.shared import implementation as implementations
from triax.moe.shared import linear
from triax.moe.shared.sharding import Shard, Split


@functools.cache
def permute_rows(implementation: str | None) -> linear.Function:
    """Tokens, weights and scales copied to the rows given by `routes`."""
    run = implementations.choose(
        implementation, launchers.permute, reference.permute_reference, any_bits=True
    )

    def derivative(primals: Any, tangents: Any, like: Any) -> Permuted:
        return linear.call_each(copy, gather, primals[3], Permuted(*tangents[:3]), like)

    def copy(routes: Routes, moving: dict[str, jax.Array]) -> dict[str, Any]:
        x = moving.get("rows", jnp.zeros((routes.row_of.shape[0], 0), jnp.float32))
        weights, scales = moving.get("weights"), moving.get("scales")
        copies = permute_rows(implementation)(x, weights, scales, routes)
        return {name: getattr(copies, name) for name in moving}

    def gather(routes: Routes, gradients: dict[str, jax.Array]) -> dict[str, Any]:
        rows = gradients.get("rows", jnp.zeros((routes.num_rows, 0), jnp.float32))
        x, weights = gather_rows(implementation)(rows, None, gradients.get("weights"), routes)
        gathered = {"rows": x, "weights": weights}
        if "scales" in gradients:
            scales = gather_rows(implementation)(gradients["scales"], None, None, routes)
            gathered["scales"] = scales.x
        return gathered

    # A token goes to any row: the width alone can be cut.
    split = Split(("_h", None, None, None), ("_h", None, None))
    return linear.op(run, derivative, split, implementation)


@functools.cache
def gather_rows(implementation: str | None) -> linear.Function:
    """Each token's sum over its rows, and each slot's weight of `row_weights`.

    Of rows, None, row_weights and routes.
    """
    run = implementations.choose(implementation, launchers.unpermute, reference.unpermute_reference)

    def derivative(primals: Any, tangents: Any, like: Any) -> Gathered:
        moving = Gathered(tangents[0], tangents[2])
        return linear.call_each(gather, copy, primals[3], moving, like)

    def gather(routes: Routes, moving: dict[str, jax.Array]) -> dict[str, Any]:
        rows = moving.get("x", jnp.zeros((routes.num_rows, 0), jnp.float32))
        sums = gather_rows(implementation)(rows, None, moving.get("weights"), routes)
        return {name: getattr(sums, name) for name in moving}

    def copy(routes: Routes, gradients: dict[str, jax.Array]) -> dict[str, Any]:
        x = gradients.get("x", jnp.zeros((routes.row_of.shape[0], 0), jnp.float32))
        copies = permute_rows(implementation)(x, gradients.get("weights"), None, routes)
        return {"x": copies.rows, "weights": copies.weights}

    split = Split(("_h", None, None, _by_token), ("th", "t_"))
    return linear.op(run, derivative, split, implementation)


@functools.cache
def weigh_rows(implementation: str | None) -> linear.Function:
    """Each token's sum over its rows times `weights` [tokens, top_k], by `routes`."""
    gather = implementations.choose(
        implementation, launchers.unpermute, reference.unpermute_reference
    )

    def run(rows: jax.Array, weights: jax.Array, routes: Routes) -> jax.Array:
        return gather(rows, weights, None, routes).x

    def derivative(primals: Any, tangents: Any, like: Any) -> jax.Array:
        moving = {"rows": tangents[0], "weights": tangents[1]}
        return linear.call(weigh, spread, primals, moving, like)

    def weigh(primals: Any, moving: dict[str, jax.Array]) -> jax.Array:
        rows, weights, routes = primals
        terms = []
        if "rows" in moving:
            terms.append(weigh_rows(implementation)(moving["rows"], weights, routes))
        if "weights" in moving:
            terms.append(weigh_rows(implementation)(rows, moving["weights"], routes))
        return functools.reduce(jnp.add, terms)

    def spread(primals: Any, gradient: jax.Array) -> dict[str, jax.Array]:
        rows, weights, routes = primals
        d_rows, d_weights = spread_gradient(implementation)(rows, weights, gradient, routes)
        return {"rows": d_rows, "weights": d_weights}

    split = Split(("_h", "t_", _by_token), "th")
    return linear.op(run, derivative, split, implementation)


@functools.cache
def spread_gradient(implementation: str | None) -> linear.Function:
    """The gradients of `weigh_rows`: ``weight * gradient`` by row, ``<row, gradient>`` by slot.

    Of rows, weights, the gradient and routes.
    """
    run = implementations.choose(
        implementation, launchers.unpermute_grad, reference.unpermute_grad_reference
    )

    def derivative(primals: Any, tangents: Any, like: Any) -> tuple[jax.Array, jax.Array]:
        moving = dict(zip(("rows", "weights", "gradient"), tangents[:3], strict=True))
        return linear.call(spread, gather, primals, moving, like)

    def spread(primals: Any, moving: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        rows, weights, gradient, routes = primals
        terms = []
        if "gradient" in moving:
            terms.append((rows, weights, moving["gradient"]))
        if "rows" in moving or "weights" in moving:
            d_rows = moving.get("rows", jnp.zeros_like(rows))
            terms.append((d_rows, moving.get("weights", jnp.zeros_like(weights)), gradient))
        spreads = [spread_gradient(implementation)(*term, routes) for term in terms]
        return functools.reduce(lambda a, b: (a[0] + b[0], a[1] + b[1]), spreads)

    def gather(primals: Any, seconds: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
        rows, weights, gradient, routes = primals
        a, b = seconds  # like rows, like weights
        d_rows, d_weights = spread_gradient(implementation)(a, b, gradient, routes)
        d_gradient = weigh_rows(implementation)(a, weights, routes)
        d_gradient += weigh_rows(implementation)(rows, b, routes)
        return {"rows": d_rows, "weights": d_weights, "gradient": d_gradient}

    def sum_products(function: linear.Function, shard: Shard, *arguments: Any) -> Any:
        d_rows, d_weights = function(*arguments)
        return d_rows, shard.sum("h", d_weights)

    split = Split(("_h", None, "_h", None), ("_h", None), sum_products)
    return linear.op(run, derivative, split, implementation)


def _by_token(routes: Routes) -> list[str]:
    """How routes are cut where each token gathers its own rows."""
    slots = [] if routes.num_slots is None else ["t"]
    return ["t_", *slots, "_", "_"]
