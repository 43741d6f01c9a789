"""Checks the arguments of a product of rows and weights, under a public function's names."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from triax import messages
from triax.compat import jax_private
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe.products import operands
from triax.moe.products.options import Groups, Options
from triax.moe.products.reference import group_ends
from triax.moe.quantization.scaled import ScaledArray, check_no_bytes
from triax.moe.shared import arguments
from triax.moe.shared import implementation as implementations
from triax.moe.shared.implementation import Implementation

_TRANSPOSE = (
    " It would be right with its last two axes swapped: that is `transpose_weights`, True for "
    "[experts, out, in], as in torch."
)


def checked(
    rows: Any,
    weights: Any,
    group_sizes: Any,
    *,
    group_offset: Any = None,
    bias: Any = None,
    bias_weights: Any = None,
    transpose_weights: Any = False,
    precision: Any = None,
    preferred_element_type: Any = None,
    implementation: Implementation | None,
    names: tuple[str, str] = ("rows", "weights"),
) -> tuple[Any, Any, Groups, jax.Array | None, jax.Array | None, bool, Options]:
    """Returns the arguments of `ops.multiply` for those of `ragged_dot`; raises as that does.

    `names` are the caller's for rows and weights.
    """
    messages.check_bool(transpose_weights=transpose_weights)
    of_rows, of_weights = names
    check_no_bytes(of_weights, weights, range(4, 6))
    swap, axes = bool(transpose_weights), ("groups", "depth", "columns")
    x = operands.operand(of_rows, rows, axes=("rows", "depth"))
    w = operands.operand(of_weights, weights, axes, swap=swap)
    num_rows, depth = x.shape
    num_groups, *sizes = weights.shape
    contracted, columns = sizes[:: -1 if swap else 1]
    if contracted != depth:
        raise ArgumentValueError(
            f"Argument `{of_weights}` must have the depth of `{of_rows}`, {depth}, as its "
            f"{'third' if swap else 'second'} size; got shape {weights.shape}."
            + (_TRANSPOSE if columns == depth else "")
        )
    known = {"groups": num_groups} if group_offset is None else {}
    of: dict[str, Any] = {"sizes": known, "of": f"`{of_weights}`"}
    group_sizes = arguments.array("group_sizes", group_sizes, ("groups",), jnp.integer, **of)
    if group_offset is not None:
        group_offset = _check_offset(group_offset, group_sizes.shape[0], num_groups)
    bias, bias_weights = _check_bias(bias, bias_weights, (num_groups, columns), num_rows, names)
    are_scaled = [isinstance(of, ScaledArray) for of in (x, w)]
    only_weights = are_scaled == [False, True]
    if only_weights or (are_scaled[1] and w.packed):
        operands.check_rows(x, w, names)
    else:
        x, w = _alike(x, w, names)
    if are_scaled[0] and preferred_element_type is None:
        preferred_element_type = jnp.bfloat16
    is_float = any(are_scaled) or jnp.issubdtype(x.dtype, jnp.floating)
    result = _result_dtype(preferred_element_type, x.dtype, is_float)
    if bias is not None and not jnp.issubdtype(x.dtype, jnp.floating):
        raise ArgumentTypeError(
            f"Argument `bias` must come with float operands; got {x.dtype}. Add it to the result."
        )
    floats = {of_rows: x, "preferred_element_type": jax.ShapeDtypeStruct((), result)}
    floats |= {"bias": bias, "bias_weights": bias_weights}
    if not only_weights:  # kernels convert `w`, also integers
        floats[of_weights] = w
    implementations.check(implementation, floats=True, **floats)
    groups = Groups(arguments.as_int32(group_sizes))
    if group_offset is not None:
        groups = _some_groups(groups, group_offset, num_groups, num_rows)
    share = min(1.0, num_groups / max(1, group_sizes.shape[0]))
    options = Options(result, _precision_name(precision), share)
    transposed = w.transposed if are_scaled[1] else swap
    return x, w, groups, bias, bias_weights, transposed, options


def _check_offset(group_offset: Any, num_sizes: int, num_groups: int) -> jax.Array:
    if isinstance(group_offset, (int, np.integer)) and not isinstance(group_offset, bool):
        if not 0 <= group_offset <= num_sizes - num_groups:
            raise ArgumentValueError(
                f"Argument `group_offset` must be from 0 to {num_sizes - num_groups}, because "
                f"`group_sizes` names {num_sizes} groups and `weights` has {num_groups}; got "
                f"{group_offset}."
            )
        return jnp.int32(group_offset)
    if not jax_private.is_array(group_offset):
        raise ArgumentTypeError(
            "Argument `group_offset` must be an int, or an integer array of shape []; got "
            f"{messages.shown(group_offset)}."
        )
    offset = arguments.array("group_offset", group_offset, (), jnp.integer)
    return arguments.as_int32(offset)


def _some_groups(groups: Groups, offset: jax.Array, count: int, num_rows: int) -> Groups:
    """Returns the `count` groups from `offset` on, with their first row."""
    bounds = jnp.concatenate([jnp.zeros(1, jnp.int32), group_ends(groups, num_rows)])
    # Groups that do not exist are empty, also where a sum wraps: that makes a negative size.
    which = offset + jnp.arange(count + 1, dtype=jnp.int32)
    bounds = jnp.take(bounds, which, mode="clip")
    return Groups(jnp.diff(bounds), bounds[0])


def _alike(rows: Any, weights: Any, names: tuple[str, str]) -> tuple[Any, Any]:
    """Returns both in one dtype; 8-bit floats may differ, because kernels multiply any two."""
    kinds = [*map(_kind, names, (rows, weights))]
    if rows.dtype == weights.dtype or kinds == ["8-bit floats"] * 2:
        return rows, weights
    remedy = "Cast one; call a `ScaledArray`'s `dequantize(dtype)`, or quantize the other operand."
    one_is_scaled = any(isinstance(of, ScaledArray) for of in (rows, weights))
    if one_is_scaled:
        remedy = f"Numbers with scales are not cast: {remedy[0].lower()}{remedy[1:]}"
    if kinds[0] != kinds[1] and "integers" in kinds:
        remedy = (
            "Integers are not converted: cast them to the floats' dtype, and multiply by "
            "their scales, if any."
        )
    may_cast = kinds[0] == kinds[1] and not one_is_scaled
    try:
        dtype = jnp.promote_types(rows.dtype, weights.dtype) if may_cast else None
    except TypeError:  # JAX's strict mode, or a dtype that it does not promote
        dtype = None
    if dtype is not None and not all(np.can_cast(a.dtype, dtype) for a in (rows, weights)):
        dtype, remedy = None, "No dtype holds both. Cast one."  # JAX without 64-bit types
    if dtype is None:
        raise ArgumentTypeError(
            f"Arguments `{names[0]}` and `{names[1]}` must both be floats, both 8-bit floats or "
            f"both integers{', of one dtype' * one_is_scaled}; got {rows.dtype} and "
            f"{weights.dtype}. {remedy}"
        )
    if kinds[0] == "floats":
        warnings.warn(
            f"ragged_dot multiplies {rows.dtype} rows by {weights.dtype} weights in {dtype}, which "
            "takes about 15 times as long as in 16 bits on an H200. Cast one to the dtype of the "
            "other.",
            UserWarning,
            stacklevel=4,
        )
    return rows.astype(dtype), weights.astype(dtype)


def _kind(name: str, array: jax.Array) -> str:
    if jnp.issubdtype(array.dtype, jnp.integer):
        return "integers"
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ArgumentTypeError(
            f"Argument `{name}` must be floats or integers; got {array.dtype}. Cast it; "
            "multiply the real and the imaginary parts of complex numbers."
        )
    return "8-bit floats" if array.dtype.itemsize == 1 else "floats"


def _result_dtype(preferred: Any, dtype: Any, floats: bool) -> Any:
    """Returns the result's dtype for operands of `dtype`; with `floats` it must be a float."""
    if preferred is None:
        return dtype
    try:
        result = jax.dtypes.canonicalize_dtype(preferred)
    except TypeError as error:
        raise ArgumentTypeError(
            "Argument `preferred_element_type` must be a dtype such as jnp.float32; got "
            f"{messages.short(preferred)}."
        ) from error
    kinds = (jnp.floating,) if floats else (jnp.floating, jnp.integer)
    if not any(jnp.issubdtype(result, class_) for class_ in kinds):
        raise ArgumentTypeError(
            "Argument `preferred_element_type` must be a float"
            f"{'' if floats else ' or an integer'}; got {result} for operands of {dtype}."
        )
    return result


def _precision_name(precision: Any) -> str | None:
    """Returns the name of a precision for `jax.default_matmul_precision`, or JAX's default."""
    if precision is None:
        default: str | None = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
        return default
    if isinstance(precision, jax.lax.Precision):
        return precision.name.lower()
    if isinstance(precision, jax.lax.DotAlgorithmPreset):
        precision = precision.name
    try:
        with jax.default_matmul_precision(precision):
            return str(precision)
    except (TypeError, ValueError) as error:
        raise ArgumentValueError(
            "Argument `precision` must be a jax.lax.Precision, a jax.lax.DotAlgorithmPreset, the "
            f"name of one, or None; got {messages.short(precision)}."
        ) from error


def _check_bias(
    bias: Any, bias_weights: Any, shape: tuple[int, int], num_rows: int, names: tuple[str, str]
) -> tuple[jax.Array | None, jax.Array | None]:
    if bias is None:
        if bias_weights is not None:
            raise ArgumentTypeError(
                "Argument `bias_weights` is given without `bias`. Give both, or scale the rows."
            )
        return None, None
    axes = "groups", "columns"
    of: dict[str, Any] = {"sizes": dict(zip(axes, shape, strict=True)), "of": f"`{names[1]}`"}
    bias = arguments.array("bias", bias, axes, jnp.floating, wide="Cast it.", **of)
    if bias_weights is not None:
        of = {"sizes": {"rows": num_rows}, "of": f"`{names[0]}`"}
        bias_weights = arguments.array("bias_weights", bias_weights, ("rows",), jnp.floating, **of)
    return bias, bias_weights
