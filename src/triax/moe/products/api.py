"""`ragged_dot`: checks its arguments and calls the op."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from triax import messages
from triax.compat import jax_private
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe.products import operands, ops
from triax.moe.products.options import FAST_SUMS, Groups, Options
from triax.moe.products.reference import group_ends
from triax.moe.quantization.scaled import ScaledArray, check_no_bytes
from triax.moe.shared import arguments
from triax.moe.shared import implementation as implementations
from triax.moe.shared.arguments import Array
from triax.moe.shared.implementation import Implementation


def ragged_dot(
    rows: Array | ScaledArray,
    weights: Array | ScaledArray,
    group_sizes: Array,
    *,
    group_offset: Array | int | None = None,
    bias: Array | None = None,
    bias_weights: Array | None = None,
    transpose_weights: bool = False,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Multiplies every row by the weights of its group.

        rows = moe.permute(x, plan)                          # [rows, depth]
        y = moe.ragged_dot(rows, weights, plan.group_sizes)  # [rows, columns]

    Like `jax.lax.ragged_dot`: the first ``group_sizes[0]`` rows are multiplied by ``weights[0]``,
    the next ``group_sizes[1]`` by ``weights[1]``, and so on. Rows past the groups are exactly zero,
    and so are their gradients.

    Sums are in float32 and rounded once. float32 operands are multiplied exactly, unless
    `precision` or JAX's default for matmuls allows TF32, which holds for the gradients too.
    Gradients have the dtypes of `rows` and `weights`; the incoming gradient is rounded to the dtype
    of `rows` before it is multiplied. Results are the same in every run, bit for bit.

    Group sizes are values on the device. A negative size is an empty group, and groups are cut off
    at the last row; memory outside is never touched. NaNs and infinities in one group's rows or
    weights do not reach another group's results or gradients. An infinity in a row may become NaN
    if `weights` are a `ScaledArray` of float8_e4m3fn.

    Under `jax.checkpoint` the result carries the name "triax_ragged_dot".

    Two `ScaledArray` operands, from `quantize`, are multiplied in 8 bits. Tensor cores read 8-bit
    weights at full speed only if their depth is innermost (`transposed=True`). They accumulate with
    about 14 bits; by default sums are promoted to float32 every 128 products. With
    `precision="ANY_F8_ANY_F8_F32_FAST_ACCUM"` tensor cores accumulate the whole depth, which is
    faster, unless scales are of blocks along the depth. If only `weights` is a `ScaledArray`, the
    kernel converts its values to the dtype of `rows`; for the gradient of the rows the weights are
    dequantized in that dtype. Weights of 4 bits or in tiles are unpacked in the kernel for few
    bfloat16 rows, and otherwise dequantized up front; with few rows a warning then says why. So are
    8-bit weights with scales of blocks, for many bfloat16 rows. A `ScaledArray` has no
    gradient.

    Args:
      rows: [rows, depth]: float32, bfloat16, float16 or an 8-bit float; in plain JAX also float64
        and integers, which are summed in 32 bits or more. Or a `ScaledArray` with blocks (1, None)
        or (1, b), b a power of two from 32 on.
      weights: [groups, depth, columns], in the dtype of `rows`; any 8-bit float if `rows` is one;
        or a `ScaledArray` with blocks (1, None, any) or (1, b, any), or (1, any, any) in 4 bits,
        which need `rows` of 16 bits or more. Different floats or different integers are cast to a
        common dtype, with a warning if that makes the matmul slower.
      group_sizes: integer [groups].
      group_offset: an int or integer [], the first group of `weights`, if `weights` has only some
        groups: `group_sizes` then lists all, and `bias` has the groups of `weights`. Rows of other
        groups are zero, and so are their gradients; they only cost the writing of zeros. Groups
        past the last are empty.
      bias: float [groups, columns], added to the rows of each group before they are rounded.
      bias_weights: float [rows], the factor of the bias in each row: the router's weights if `glu`
        has multiplied the rows by them.
      transpose_weights: whether `weights` is [groups, columns, depth], as in torch. Nothing is
        transposed in memory.
      precision: how float32 is multiplied: a `jax.lax.Precision`, a `jax.lax.DotAlgorithmPreset`,
        or the name of one. None is JAX's default (`jax.default_matmul_precision`), or else exact.
      preferred_element_type: the dtype of the result; by default that of `rows`, or bfloat16 if
        `rows` is a `ScaledArray`.
      implementation: None picks by the program's platform: Triton kernels on CUDA, plain JAX
        elsewhere. "triton", "interpret" (the kernels, interpreted on the CPU) and "xla" insist.

    Returns:
      [rows, columns].

    Raises:
      ArgumentTypeError: an argument is not an array, or of the wrong dtype; `rows` and `weights`
        are not both floats or both integers.
      ArgumentValueError: an argument has the wrong shape, or `implementation` is unknown.
      DifferentiationError: an 8- or 4-bit operand, or its scales, were differentiated.
    """
    messages.check_bool(transpose_weights=transpose_weights)
    check_no_bytes("weights", weights, range(4, 6))
    swap, axes = bool(transpose_weights), ("groups", "depth", "columns")
    x = operands.operand("rows", rows, axes=("rows", "depth"))
    w = operands.operand("weights", weights, axes, swap=swap)
    num_rows, depth = x.shape
    num_groups, *sizes = weights.shape
    contracted, columns = sizes[:: -1 if swap else 1]
    if contracted != depth:
        raise ArgumentValueError(
            f"Argument `weights` must have the depth of `rows`, {depth}, as its "
            f"{'third' if swap else 'second'} size; got shape {weights.shape}."
            + (arguments.transpose_remedy() if columns == depth else "")
        )
    known = {"groups": num_groups} if group_offset is None else {}
    of: dict[str, Any] = {"sizes": known, "of": "`weights`"}
    group_sizes = arguments.array("group_sizes", group_sizes, ("groups",), jnp.integer, **of)
    if group_offset is not None:
        group_offset = _check_offset(group_offset, group_sizes.shape[0], num_groups)
    bias, bias_weights = _check_bias(bias, bias_weights, (num_groups, columns), num_rows)
    are_scaled = [isinstance(of, ScaledArray) for of in (x, w)]
    only_weights = are_scaled == [False, True]
    if only_weights or (are_scaled[1] and w.packed):
        operands.check_rows(x, w)
    else:
        x, w = _alike(x, w)
    if are_scaled[0] and preferred_element_type is None:
        preferred_element_type = jnp.bfloat16
    floats = any(are_scaled) or jnp.issubdtype(x.dtype, jnp.floating)
    result = _result_dtype(preferred_element_type, x.dtype, floats)
    if bias is not None and not jnp.issubdtype(x.dtype, jnp.floating):
        raise ArgumentTypeError(
            f"Argument `bias` must come with float operands; got {x.dtype}. Add it to the result."
        )
    implementation = implementations.resolve_for_floats(
        implementation,
        rows=x,
        weights=None if only_weights else w,  # kernels convert `w`, also integers
        preferred_element_type=jax.ShapeDtypeStruct((), result),
        bias=bias,
        bias_weights=bias_weights,
    )
    groups = Groups(arguments.as_int32(group_sizes))
    if group_offset is not None:
        groups = _some_groups(groups, group_offset, num_groups, num_rows)
    if not (num_rows and depth and num_groups and columns):
        # Empty sums are zero, but depend on the operands, so that these have gradients.
        empty = jnp.zeros((num_rows, columns), result)
        for values in (getattr(of, "values", of) for of in (x, w)):
            empty += jnp.sum(values[:0]).astype(result)
        if bias is None or not (num_groups and empty.size):
            return empty
        how = {"dtype": result, "num_rows": num_rows, "implementation": implementation}
        return empty + ops.spread_bias(bias, groups, bias_weights, **how)
    name = _precision_name(precision)
    if x.dtype.itemsize < 4 and not (x.dtype.itemsize == 1 and name == FAST_SUMS):
        name = None
    out = ops.ragged_dot(
        x,
        w,
        groups,
        bias,
        bias_weights,
        transposed=w.transposed if are_scaled[1] else swap,
        options=Options(result, name, min(1.0, num_groups / max(1, group_sizes.shape[0]))),
        implementation=implementation,
    )
    return checkpoint_name(out, "triax_ragged_dot")


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
    # Groups that do not exist are empty.
    num_sizes = groups.sizes.shape[0]
    which = jnp.clip(offset, -count, num_sizes) + jnp.arange(count + 1, dtype=jnp.int32)
    bounds = jnp.take(bounds, jnp.clip(which, 0, num_sizes), mode="clip")
    return Groups(jnp.diff(bounds), bounds[0])


def _alike(rows: Any, weights: Any) -> tuple[Any, Any]:
    """Returns both in one dtype; 8-bit floats may differ, because kernels multiply any two."""
    kinds = [_kind("rows", rows), _kind("weights", weights)]
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
            "Arguments `rows` and `weights` must both be floats, both 8-bit floats or both "
            f"integers{', of one dtype' * one_is_scaled}; got {rows.dtype} and {weights.dtype}. "
            f"{remedy}"
        )
    if kinds[0] == "floats":
        warnings.warn(
            f"ragged_dot multiplies {rows.dtype} rows by {weights.dtype} weights in {dtype}, which "
            "takes about 15 times as long as in 16 bits on an H200. Cast one to the dtype of the "
            "other.",
            UserWarning,
            stacklevel=3,
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
    if not any(jnp.issubdtype(result, kind) for kind in kinds):
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
    bias: Any, bias_weights: Any, shape: tuple[int, int], num_rows: int
) -> tuple[jax.Array | None, jax.Array | None]:
    if bias is None:
        if bias_weights is not None:
            raise ArgumentTypeError(
                "Argument `bias_weights` is given without `bias`. Give both, or scale the rows."
            )
        return None, None
    axes = "groups", "columns"
    of: dict[str, Any] = {"sizes": dict(zip(axes, shape, strict=True)), "of": "`weights`"}
    bias = arguments.array("bias", bias, axes, jnp.floating, **of)
    arguments.check_wide("bias", bias, "Cast it.")
    if bias_weights is not None:
        of = {"sizes": {"rows": num_rows}, "of": "`rows`"}
        bias_weights = arguments.array("bias_weights", bias_weights, ("rows",), jnp.floating, **of)
    return bias, bias_weights
