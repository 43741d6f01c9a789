"""The ops of permute and unpermute, which are each other's derivatives.

`permute_rows` copies tokens to rows; its transpose, `gather_rows`, sums the rows of each token.
Both are linear. `weigh_rows` sums the rows with weights; `spread_gradient` is its gradient, and its
own derivatives are made of these four ops.

`permute` and `unpermute` call them with checked arguments, for the public functions of these names
and for what is made of them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from triax.binding import dtypes
from triax.moe.permutation import configs, launchers, reference
from triax.moe.permutation.reference import Gathered, Permuted, Routes
from triax.moe.plans.reference import Plan
from triax.moe.quantization.scaled import ScaledArray, of_rows
from triax.moe.shared import implementation as implementations
from triax.moe.shared.arrays import at_least_float32
from triax.moe.shared.implementation import Implementation
from triax.moe.shared.ops import Call, Op
from triax.sharding import linear
from triax.sharding.splits import Shard


def _routes(routes: Routes) -> list[str]:
    """Returns the dimensions of the arrays in `Routes`: tokens, slots and experts."""
    return ["tk", *([] if routes.num_slots is None else ["t"]), "e", "e"]


def _no_columns(num_rows: int) -> jax.Array:
    return jnp.zeros((num_rows, 0), jnp.float32)


def _permute_derivative(call: Call, primals: Any, tangents: Any, like: Any) -> Permuted:
    def copy(routes: Routes, tangents: dict[str, jax.Array]) -> dict[str, Any]:
        x = tangents.get("rows", _no_columns(routes.row_of.shape[0]))
        copies = call(x, tangents.get("weights"), tangents.get("scales"), routes)
        return {name: getattr(copies, name) for name in tangents}

    def gather(routes: Routes, gradients: dict[str, jax.Array]) -> dict[str, Any]:
        gather = call.replace(gather_rows)
        rows = gradients.get("rows", _no_columns(routes.num_rows))
        x, weights = gather(rows, None, gradients.get("weights"), routes)
        gathered = {"rows": x, "weights": weights}
        if "scales" in gradients:
            gathered["scales"] = gather(gradients["scales"], None, None, routes).x
        return gathered

    return linear.call_each(copy, gather, primals[3], Permuted(*tangents[:3]), like)


def _gather_derivative(call: Call, primals: Any, tangents: Any, like: Any) -> Gathered:
    def gather(routes: Routes, tangents: dict[str, jax.Array]) -> dict[str, Any]:
        rows = tangents.get("x", _no_columns(routes.num_rows))
        sums = call(rows, None, tangents.get("weights"), routes)
        return {name: getattr(sums, name) for name in tangents}

    def copy(routes: Routes, gradients: dict[str, jax.Array]) -> dict[str, Any]:
        x = gradients.get("x", _no_columns(routes.row_of.shape[0]))
        copies = call.replace(permute_rows)(x, gradients.get("weights"), None, routes)
        return {"x": copies.rows, "weights": copies.weights}

    named = Gathered(tangents[0], tangents[2])
    return linear.call_each(gather, copy, primals[3], named, like)


def _weigh_derivative(call: Call, primals: Any, tangents: Any, like: Any) -> jax.Array:
    def weigh(primals: Any, tangents: dict[str, jax.Array]) -> jax.Array:
        rows, weights, routes = primals
        terms = []
        if "rows" in tangents:
            terms.append(call(tangents["rows"], weights, routes))
        if "weights" in tangents:
            terms.append(call(rows, tangents["weights"], routes))
        return functools.reduce(jnp.add, terms)

    def spread(primals: Any, gradient: jax.Array) -> dict[str, jax.Array]:
        rows, weights, routes = primals
        d_rows, d_weights = call.replace(spread_gradient)(rows, weights, gradient, routes)
        return {"rows": d_rows, "weights": d_weights}

    named = {"rows": tangents[0], "weights": tangents[1]}
    return linear.call(weigh, spread, primals, named, like)


def _spread_derivative(
    call: Call, primals: Any, tangents: Any, like: Any
) -> tuple[jax.Array, jax.Array]:
    def spread(primals: Any, tangents: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        rows, weights, gradient, routes = primals
        terms = []
        if "gradient" in tangents:
            terms.append((rows, weights, tangents["gradient"]))
        if "rows" in tangents or "weights" in tangents:
            d_rows = tangents.get("rows", jnp.zeros_like(rows))
            terms.append((d_rows, tangents.get("weights", jnp.zeros_like(weights)), gradient))
        spreads = [call(*term, routes) for term in terms]
        return functools.reduce(lambda a, b: (a[0] + b[0], a[1] + b[1]), spreads)

    def gather(primals: Any, seconds: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
        rows, weights, gradient, routes = primals
        a, b = seconds  # like rows, like weights
        d_rows, d_weights = call(a, b, gradient, routes)
        weigh = call.replace(weigh_rows)
        d_gradient = weigh(a, weights, routes) + weigh(rows, b, routes)
        return {"rows": d_rows, "weights": d_weights, "gradient": d_gradient}

    named = dict(zip(("rows", "weights", "gradient"), tangents[:3], strict=True))
    return linear.call(spread, gather, primals, named, like)


def _sum_products(call: Call, shard: Shard, rows: Any, weights: Any, *others: Any) -> Any:
    """Runs `spread_gradient` on a shard of the width; rounds weights' gradients after the sum."""
    wider = weights.astype(at_least_float32(weights.dtype))
    d_rows, d_weights = call.run(rows, wider, *others)
    return d_rows, shard.sum("h", d_weights).astype(weights.dtype)


# Copies tokens, weights and scales to the rows given by routes. A token may go to any row, so only
# the width can be sharded.
permute_rows = Op(
    "permute_rows",
    arguments=("th", "tk", "ts", _routes),
    results=("rh", "r", "rs"),
    shardable="h",
    kernels=launchers.permute,
    xla=reference.permute_reference,
    derivative=_permute_derivative,
    any_bits=True,
)

# Sums each token's rows, and gathers each slot's weight from the row weights. The arguments are
# rows, None, row weights and routes.
gather_rows = Op(
    "gather_rows",
    arguments=("rh", "tk", "r", _routes),
    results=("th", "tk"),
    shardable="th",
    kernels=launchers.unpermute,
    xla=reference.unpermute_reference,
    derivative=_gather_derivative,
)

# Sums each token's rows, multiplied by their weights.
weigh_rows = Op(
    "weigh_rows",
    arguments=("rh", "tk", _routes),
    results="th",
    shardable="th",
    kernels=lambda rows, weights, routes, **options: (
        launchers.unpermute(rows, weights, None, routes, **options).x
    ),
    xla=lambda rows, weights, routes: reference.unpermute_reference(rows, weights, None, routes).x,
    derivative=_weigh_derivative,
)

# The gradients of `weigh_rows`: weight × gradient by row, <row, gradient> by slot. The arguments
# are rows, weights, the gradient and routes.
spread_gradient = Op(
    "spread_gradient",
    arguments=("rh", "tk", "th", _routes),
    results=("rh", "tk"),
    shardable="h",
    kernels=launchers.unpermute_grad,
    xla=reference.unpermute_grad_reference,
    derivative=_spread_derivative,
    local=_sum_products,
)


def permute(
    x: jax.Array,
    plan: Plan,
    weights: jax.Array | None = None,
    scales: jax.Array | None = None,
    *,
    implementation: Implementation | None,
) -> Permuted:
    """Copies every token to its rows, with its weights and scales, which may be None."""
    routes = routes_of(plan)
    words = None if scales is None else as_known_words(scales)
    implementation = implementations.fit(implementation, x, weights, words)
    empty = not (routes.row_of.size and routes.num_rows)
    if empty or (x.shape[1] == 0 and weights is None and scales is None):
        implementation = "xla"
    rows, row_weights, row_scales = permute_rows(
        x, weights, words, routes, implementation=implementation
    )
    rows = checkpoint_name(rows, "triax_permuted_rows")
    if row_weights is not None:
        row_weights = checkpoint_name(row_weights, "triax_permuted_weights")
    if scales is not None and row_scales is not None:
        if row_scales.dtype != scales.dtype:
            row_scales = jax.lax.bitcast_convert_type(row_scales, scales.dtype)
        row_scales = checkpoint_name(row_scales, "triax_permuted_scales")
    return Permuted(rows, row_weights, row_scales)


def permute_scaled(x: Any, plan: Plan, *, implementation: Implementation | None) -> Any:
    """Copies every token to its rows, numbers and scales if `x` is a `ScaledArray`."""
    if not isinstance(x, ScaledArray):
        return permute(x, plan, implementation=implementation).rows
    moved = permute(x.values, plan, None, x.scales, implementation=implementation)
    return of_rows(x, moved.rows, moved.scales)


def unpermute(
    rows: jax.Array,
    plan: Plan,
    weights: jax.Array | None = None,
    *,
    implementation: Implementation | None,
) -> jax.Array:
    """Sums every token's rows, multiplied by its weights if there are some."""
    if weights is None or weights.size == 0:
        tokens = sum_rows(rows, plan, implementation)
    else:
        implementation = implementations.fit(implementation, rows, weights)
        implementation = "xla" if rows.size == 0 else implementation
        tokens = weigh_rows(rows, weights, routes_of(plan), implementation=implementation)
    return checkpoint_name(tokens, "triax_unpermuted_tokens")


def sum_rows(rows: jax.Array, plan: Plan, implementation: Implementation | None) -> jax.Array:
    """Runs `unpermute` without weights, for any dtype with gradients: `permute`'s transpose."""
    implementation = implementations.fit(implementation, rows)
    if plan.row_of.size == 0 or rows.size == 0:
        implementation = "xla"
    tokens: jax.Array = gather_rows(
        rows, None, None, routes_of(plan), implementation=implementation
    ).x
    return tokens


def weights_by_slot(
    row_weights: jax.Array, plan: Plan, implementation: Implementation | None
) -> jax.Array:
    """Returns the weight of each slot's row, [tokens, top_k]; zero for a slot without a row."""
    implementation = implementations.fit(implementation, row_weights)
    if plan.row_of.size == 0 or row_weights.size == 0:
        implementation = "xla"
    no_columns = jnp.zeros((plan.num_rows, 0), jnp.float32)
    weights: jax.Array = gather_rows(
        no_columns, None, row_weights, routes_of(plan), implementation=implementation
    ).weights
    return weights


def routes_of(plan: Plan) -> Routes:
    """Returns the parts of a plan that the ops use."""
    row_of, num_slots = plan.row_of, None
    if row_of.shape[1] > configs.MAX_UNROLLED_SLOTS:
        slot = jnp.arange(row_of.shape[1], dtype=jnp.int32)
        num_slots = jnp.max(jnp.where(row_of >= 0, slot + 1, 0), axis=1)
    return Routes(
        row_of=row_of,
        num_slots=num_slots,
        group_sizes=plan.group_sizes,
        group_filled=plan.group_filled,
        num_rows=plan.num_rows,
        padded=plan.align_size > 1,
    )


def as_known_words(scales: jax.Array) -> jax.Array:
    """Reinterprets scales in a small float Triton lacks, such as float8_e8m0fnu, as integers."""
    if dtypes.is_supported(scales.dtype) or not jnp.issubdtype(scales.dtype, jnp.floating):
        return scales
    if jnp.finfo(scales.dtype).bits != 8:
        return scales
    return jax.lax.bitcast_convert_type(scales, jnp.uint8)
