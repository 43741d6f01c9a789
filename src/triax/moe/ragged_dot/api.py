"""`ragged_dot`: checks its arguments and calls the op."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe.ragged_dot import derivatives
from triax.moe.ragged_dot.launchers import Options
from triax.moe.shared import arguments
from triax.moe.shared import implementation as implementations
from triax.moe.shared.implementation import Implementation


def ragged_dot(
    rows: Any,
    weights: Any,
    group_sizes: Any,
    *,
    row_scales: Any = None,
    group_scales: Any = None,
    preferred_element_type: Any = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Multiplies every row by the weights of its group.

        rows = moe.permute(x, plan)                          # [rows, depth]
        y = moe.ragged_dot(rows, weights, plan.group_sizes)  # [rows, columns]

    Like `jax.lax.ragged_dot`: the first ``group_sizes[0]`` rows are multiplied by ``weights[0]``,
    the next ``group_sizes[1]`` by ``weights[1]``, and so on. Rows past the groups are exactly zero,
    and so are their gradients.

    Sums are in float32 and rounded once. float32 is multiplied exactly, unless JAX's matmul
    precision (`jax.default_matmul_precision`) asks for TF32 where the op is called, which holds for
    its gradients too. Gradients have the dtypes of `rows` and `weights`, and the incoming gradient
    is rounded to them before it is multiplied. Results are the same bits in every run.

    Group sizes are values on the device. A negative size is an empty group, and groups end at the
    last row; memory outside is never touched. NaNs and infinities in one group's rows or weights do
    not reach another group's results (with "xla", only if `jax.lax.ragged_dot` ensures that).

    Under `jax.checkpoint` the result carries the name "triax_ragged_dot".

    Args:
      rows: [rows, depth], float32, bfloat16, float16 or an 8-bit float.
      weights: [groups, depth, columns], of the same dtype, or any 8-bit float if `rows` is one.
      group_sizes: integer [groups].
      row_scales: float [rows], multiplied with the result's rows before they are rounded.
      group_scales: float [groups], likewise for the rows of each group. Results with scales have no
        gradient.
      preferred_element_type: the dtype of the result; by default that of `rows`.
      implementation: None picks by the program's platform: Triton kernels on CUDA, plain JAX
        elsewhere. "triton", "interpret" (the kernels, interpreted on the CPU) and "xla" insist.

    Returns:
      [rows, columns].

    Raises:
      ArgumentTypeError: an argument is not an array, or of the wrong dtype.
      ArgumentValueError: an argument has the wrong shape, or `implementation` is unknown.
      DifferentiationError: 8-bit operands, or scales, were differentiated.
    """
    rows = arguments.array("rows", rows, ("rows", "depth"))
    weights = arguments.array("weights", weights, ("groups", "depth", "columns"))
    group_sizes = arguments.array("group_sizes", group_sizes, ("groups",), jnp.integer)
    num_rows, depth = rows.shape
    num_groups = weights.shape[0]
    if weights.shape[1] != depth:
        raise ArgumentValueError(
            f"Argument `weights` must have the depth of `rows`, {depth}, as its second size; got "
            f"shape {weights.shape}."
        )
    of = "groups of `weights`"
    arguments.check_length("group_sizes", group_sizes, num_groups, "size", of)
    row_scales = _check_scales("row_scales", row_scales, num_rows, "rows")
    group_scales = _check_scales("group_scales", group_scales, num_groups, "groups")
    rows, weights = _alike(rows, weights)
    result = rows.dtype
    if preferred_element_type is not None:
        result = jax.dtypes.canonicalize_dtype(preferred_element_type)
    implementation = implementations.resolve_for_floats(
        implementation,
        rows=rows,
        weights=weights,
        preferred_element_type=jax.ShapeDtypeStruct((), result),
    )
    if not (num_rows and depth and num_groups and weights.shape[2]):
        empty = jnp.zeros((num_rows, weights.shape[2]), result)
        # Sums of nothing: zero, but still a function of the operands, so that they have gradients.
        return empty + (jnp.sum(rows[:0]) + jnp.sum(weights[:0])).astype(result)
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    multiply = derivatives.ragged_dot(False, Options(result, precision), implementation)
    group_sizes = arguments.as_int32(group_sizes, num_rows)
    out = multiply(rows, weights, group_sizes, row_scales, group_scales)
    return checkpoint_name(out, "triax_ragged_dot")


def _alike(rows: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both in one dtype. 8-bit floats stay as they are: kernels multiply any two of them."""
    small = [_is_small_float(a) for a in (rows, weights)]
    if all(small) or rows.dtype == weights.dtype:
        return rows, weights
    if any(small):
        raise ArgumentTypeError(
            "Arguments `rows` and `weights` must both be 8-bit floats, or neither; got "
            f"{rows.dtype} and {weights.dtype}. Cast one."
        )
    dtype = jnp.promote_types(rows.dtype, weights.dtype)
    return rows.astype(dtype), weights.astype(dtype)


def _is_small_float(array: jax.Array) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize == 1


def _check_scales(name: str, scales: Any, count: int, axis: str) -> jax.Array | None:
    if scales is None:
        return None
    scales = arguments.array(name, scales, (axis,), jnp.floating)
    arguments.check_length(name, scales, count, "value", axis)
    return scales
