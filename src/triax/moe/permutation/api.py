"""`permute` and `unpermute`: check their arguments and call the ops."""

from __future__ import annotations

from typing import Any, overload

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from triax import messages
from triax.binding import dtypes
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe.permutation import configs, ops
from triax.moe.permutation.reference import Permuted, Routes
from triax.moe.plans.reference import Plan
from triax.moe.quantization.scaled import ScaledArray, of_rows, tokens
from triax.moe.shared import arguments
from triax.moe.shared import implementation as implementations
from triax.moe.shared.arguments import Array
from triax.moe.shared.implementation import Implementation


@overload
def permute(
    x: Array,
    plan: Plan,
    *,
    weights: None = None,
    scales: None = None,
    implementation: Implementation | None = None,
) -> jax.Array: ...
@overload
def permute(
    x: ScaledArray,
    plan: Plan,
    *,
    weights: None = None,
    scales: None = None,
    implementation: Implementation | None = None,
) -> ScaledArray: ...
@overload
def permute(
    x: Array | ScaledArray,
    plan: Plan,
    *,
    weights: Array,
    scales: Array | None = None,
    implementation: Implementation | None = None,
) -> Permuted: ...
@overload
def permute(
    x: Array | ScaledArray,
    plan: Plan,
    *,
    weights: Array | None = None,
    scales: Array,
    implementation: Implementation | None = None,
) -> Permuted: ...
def permute(
    x: Array | ScaledArray,
    plan: Plan,
    *,
    weights: Array | None = None,
    scales: Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array | ScaledArray | Permuted:
    """Copies every token to its rows, grouped by expert.

        plan = moe.make_plan(selected_experts, num_experts)
        rows = moe.permute(x, plan)                       # [rows, hidden]
        y = jax.lax.ragged_dot(rows, w, plan.group_sizes)
        out = moe.unpermute(y, plan, weights=router_weights)

    ``rows[plan.row_of[t, k]] = x[t]`` for each token t and slot k that has a row. All other rows
    are exactly zero. Values are copied bit for bit, NaNs included. The gradient of a token is the
    sum of its rows' gradients, computed in float32 or wider and returned in the dtype of `x`.

    Under `jax.checkpoint` the results carry the names "triax_permuted_rows",
    "triax_permuted_weights" and "triax_permuted_scales": name them in a policy to keep them.

    Args:
      x: [tokens, hidden], any dtype, or a `ScaledArray` with scales for each token; the rows are
        then a `ScaledArray` too.
      plan: from `make_plan`. Wrong values in its arrays misplace rows, but never touch memory
        outside of the operands.
      weights: float [tokens, top_k], moved with the tokens: each row gets the weight of its (token,
        slot). The gradient of a weight is exactly zero if its slot has no row.
      scales: [tokens, scales], any dtype, moved with the tokens: the scales of quantised rows.
      implementation: None picks by the program's platform: Triton kernels on CUDA, plain JAX
        elsewhere. "triton", "interpret" (the kernels, interpreted on the CPU) and "xla" insist.

    Returns:
      rows [rows, hidden] in the dtype of `x`; with weights or scales a `Permuted`: rows,
      weights [rows] or None, scales [rows, scales] or None, in the dtypes of the arguments.

    Raises:
      ArgumentTypeError: an argument is not an array, or of the wrong dtype; `plan` is no plan.
      ArgumentValueError: an argument has the wrong shape, or `implementation` is unknown.
    """
    if isinstance(x, ScaledArray):
        values, of_tokens = tokens("x", x, scales)
        moved: Any = permute(
            values, plan, weights=weights, scales=of_tokens, implementation=implementation
        )
        rows: Any = of_rows(x, moved.rows, moved.scales)
        return rows if weights is None else Permuted(rows, moved.weights, None)
    routes = routes_of(plan)
    num_tokens, top_k = routes.row_of.shape
    of_plan: dict[str, Any] = {"sizes": {"tokens": num_tokens, "top_k": top_k}, "of": "the plan"}
    x = arguments.array("x", x, ("tokens", "hidden"), **of_plan)
    if weights is not None:
        axes = "tokens", "top_k"
        weights = arguments.array("weights", weights, axes, jnp.floating, **of_plan)
    scale_dtype: Any = None
    if scales is not None:
        scales = arguments.array("scales", scales, ("tokens", "scales"), **of_plan)
        scale_dtype = scales.dtype
        scales = as_known_words(scales)
    implementation = implementations.resolve(implementation, x=x, weights=weights, scales=scales)
    if not (num_tokens and top_k and routes.num_rows) or (
        x.shape[1] == 0 and weights is None and scales is None
    ):
        implementation = "xla"
    rows, row_weights, row_scales = ops.permute_rows(
        x, weights, scales, routes, implementation=implementation
    )
    rows = checkpoint_name(rows, "triax_permuted_rows")
    if row_weights is None and row_scales is None:
        return rows
    if row_weights is not None:
        row_weights = checkpoint_name(row_weights, "triax_permuted_weights")
    if row_scales is not None:
        if row_scales.dtype != scale_dtype:
            row_scales = jax.lax.bitcast_convert_type(row_scales, scale_dtype)
        row_scales = checkpoint_name(row_scales, "triax_permuted_scales")
    return Permuted(rows, row_weights, row_scales)


def unpermute(
    rows: Array,
    plan: Plan,
    weights: Array | None = None,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Sums every token's rows, multiplied by its weights.

        out = moe.unpermute(rows, plan, weights=router_weights)  # [tokens, hidden]

    ``out[t] = sum over k of weights[t, k] * rows[plan.row_of[t, k]]``, over the slots that have a
    row, in order. A zero weight still counts: 0 times NaN is NaN. A slot without a row adds
    nothing, whatever its weight, and a token without rows is exactly zero.

    Sums are computed in the widest of float32 and the dtypes of `rows` and `weights`, and rounded
    once. Gradients have the dtypes of `rows` and `weights` and are the same bits in every run:
    ``weight * gradient`` for each row, exactly zero for rows without a token, and
    ``<row, gradient>`` for each weight, exactly zero for slots without a row.

    Under `jax.checkpoint` the result carries the name "triax_unpermuted_tokens".

    Args:
      rows: float [plan.num_rows, hidden].
      plan: the plan that the rows were permuted by.
      weights: float [tokens, top_k]; None means ones.
      implementation: as for `permute`.

    Returns:
      [tokens, hidden] in the dtype of `rows`.

    Raises:
      ArgumentTypeError: an argument is not an array, or of the wrong dtype; `plan` is no plan.
      ArgumentValueError: an argument has the wrong shape, or `implementation` is unknown.
    """
    routes = routes_of(plan)
    num_tokens, top_k = routes.row_of.shape
    sizes = {"rows": routes.num_rows, "tokens": num_tokens, "top_k": top_k}
    of_plan: dict[str, Any] = {"sizes": sizes, "of": "the plan"}
    rows = arguments.array("rows", rows, ("rows", "hidden"), jnp.floating, **of_plan)
    if weights is not None:
        axes = "tokens", "top_k"
        weights = arguments.array("weights", weights, axes, jnp.floating, **of_plan)
    if weights is None or weights.size == 0:
        tokens = sum_rows(rows, routes, implementation)
    else:
        implementation = implementations.resolve(implementation, rows=rows, weights=weights)
        implementation = "xla" if rows.size == 0 else implementation
        tokens = ops.weigh_rows(rows, weights, routes, implementation=implementation)
    return checkpoint_name(tokens, "triax_unpermuted_tokens")


def sum_rows(rows: jax.Array, routes: Routes, implementation: Implementation | None) -> jax.Array:
    """Runs `unpermute` without weights, for any dtype with gradients: `permute`'s transpose."""
    implementation = implementations.resolve(implementation, rows=rows)
    if routes.row_of.size == 0 or rows.size == 0:
        implementation = "xla"
    gathered = ops.gather_rows(rows, None, None, routes, implementation=implementation)
    tokens: jax.Array = gathered.x
    return tokens


def weights_by_slot(
    row_weights: jax.Array, routes: Routes, implementation: Implementation | None
) -> jax.Array:
    """Returns the weight of each slot's row, [tokens, top_k]; zero for a slot without a row."""
    implementation = implementations.resolve(implementation, weights=row_weights)
    if routes.row_of.size == 0 or row_weights.size == 0:
        implementation = "xla"
    no_columns = jnp.zeros((routes.num_rows, 0), jnp.float32)
    gathered = ops.gather_rows(no_columns, None, row_weights, routes, implementation=implementation)
    weights: jax.Array = gathered.weights
    return weights


def routes_of(plan: Any) -> Routes:
    """Checks a plan and returns the parts of it that the ops use."""
    if not isinstance(plan, Plan):
        raise ArgumentTypeError(
            f"Argument `plan` must be a Plan, from `make_plan`; got {messages.shown(plan)}."
        )
    row_of = plan.row_of
    groups = plan.group_sizes.shape
    if row_of.ndim != 2 or groups != (plan.num_experts,) or groups != plan.group_filled.shape:
        raise ArgumentValueError(
            f"Argument `plan` must have `row_of` of shape [tokens, top_k], `group_sizes` and "
            f"`group_filled` of shape [{plan.num_experts}]; got {row_of.shape}, {groups} and "
            f"{plan.group_filled.shape}. Make one plan for all batches: reshape its inputs to "
            "[tokens, ...], and the results back."
        )
    num_slots = None
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
    if scales.dtype.name in dtypes.SUPPORTED or not jnp.issubdtype(scales.dtype, jnp.floating):
        return scales
    if jnp.finfo(scales.dtype).bits != 8:
        return scales
    return jax.lax.bitcast_convert_type(scales, jnp.uint8)
