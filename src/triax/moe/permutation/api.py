"""`permute` and `unpermute`: check their arguments and call the ops."""

from __future__ import annotations

from typing import Any, overload

import jax
import jax.numpy as jnp

from triax import messages
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe.permutation import ops
from triax.moe.permutation.reference import Permuted
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
      scales: [tokens, scales], any dtype, moved with the tokens: the scales of quantized rows.
      implementation: None picks by the program's platform: Triton kernels on CUDA, plain JAX
        elsewhere. "triton", "interpret" (the kernels, interpreted on the CPU) and "xla" insist.

    Returns:
      rows [rows, hidden] in the dtype of `x`; with weights or scales a `Permuted`: rows,
      weights [rows] or None, scales [rows, scales] or None, in the dtypes of the arguments.

    Raises:
      ArgumentTypeError: an argument is not an array, or of the wrong dtype; `plan` is no plan.
      ArgumentValueError: an argument has the wrong shape, or `implementation` is unknown.
    """
    whole = x if isinstance(x, ScaledArray) else None
    if isinstance(x, ScaledArray):
        x, scales = tokens("x", x, scales)
    of_plan = _check_plan(plan)
    x = arguments.array("x", x, ("tokens", "hidden"), **of_plan)
    weights = _check_weights(weights, of_plan)
    if scales is not None:
        scales = arguments.array("scales", scales, ("tokens", "scales"), **of_plan)
    words = None if scales is None else ops.as_known_words(scales)
    implementations.check(implementation, x=x, weights=weights, scales=words)
    out = ops.permute(x, plan, weights, scales, implementation=implementation)
    if whole is not None:
        rows: Any = of_rows(whole, out.rows, out.scales)
        out = Permuted(rows, out.weights, None)
    return out.rows if out.weights is None and out.scales is None else out


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
    of_plan = _check_plan(plan)
    rows = arguments.array("rows", rows, ("rows", "hidden"), jnp.floating, **of_plan)
    weights = _check_weights(weights, of_plan)
    implementations.check(implementation, rows=rows, weights=weights)
    return ops.unpermute(rows, plan, weights, implementation=implementation)


def _check_plan(plan: Any) -> dict[str, Any]:
    """Returns the sizes of a plan, as `arguments.array` takes them; raises if it is none."""
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
    num_tokens, top_k = row_of.shape
    sizes = {"rows": plan.num_rows, "tokens": num_tokens, "top_k": top_k}
    return {"sizes": sizes, "of": "the plan"}


def _check_weights(weights: Any, of_plan: dict[str, Any]) -> jax.Array | None:
    if weights is None:
        return None
    return arguments.array("weights", weights, ("tokens", "top_k"), jnp.floating, **of_plan)
