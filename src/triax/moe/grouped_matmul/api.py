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
from triax.moe.grouped_matmul import ops, scaled
from triax.moe.grouped_matmul.options import FAST_SUMS, Groups, Options
from triax.moe.grouped_matmul.reference import group_ends
from triax.moe.quantization.scaled import ScaledArray
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
    row_scales: Array | None = None,
    group_scales: Array | None = None,
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

    Sums are in float32 and rounded once. float32 is multiplied exactly, unless `precision` or JAX's
    default for matmuls allows TF32, which holds for the gradients too. Gradients have the dtypes of
    `rows` and `weights`, and the incoming gradient is rounded to them before it is multiplied.
    Results are the same bits in every run.

    Group sizes are values on the device. A negative size is an empty group, and groups end at the
    last row; memory outside is never touched. NaNs and infinities in one group's rows or weights do
    not reach another group's results or gradients. An infinity in a row may become NaN where
    `weights` are a `ScaledArray` of float8_e4m3fn.

    Under `jax.checkpoint` the result carries the name "triax_ragged_dot".

    `ScaledArray` operands, as `quantize` makes them, are multiplied in 8 bits. Tensor cores read
    8-bit weights at full speed only where their depth is innermost (`transposed=True`). They keep
    about 14 bits of a sum; by default each 128 products are added in float32. With
    `precision="ANY_F8_ANY_F8_F32_FAST_ACCUM"` tensor cores add up the whole depth, which is faster,
    unless scales are of blocks along the depth. Where only `weights` is a `ScaledArray`, its values
    are converted to the dtype of `rows` on their way to the tensor cores; for the gradient of the
    rows they are dequantized in that dtype. Weights of 4 bits are unpacked on their way, too, to
    few rows of bfloat16, and else dequantized before, all groups' at once. There is no gradient by
    a `ScaledArray`.

    Args:
      rows: [rows, depth]: float32, bfloat16, float16, an 8-bit float; by plain JAX also float64
        and integers, of which sums are exact in 32 bits. Or a `ScaledArray` with blocks (1, depth)
        or (1, b), b a power of two from 32 on.
      weights: [groups, depth, columns], of the same dtype, or any 8-bit float if `rows` is one, or
        a `ScaledArray` with blocks (1, depth, columns), (1, depth, 1) or (1, b, any); in 4 bits,
        which need `rows` of 16 bits or more, (1, any, any).
        Other floats or other integers are cast to a dtype that holds both, with a warning if that
        makes the matmul slower.
      group_sizes: integer [groups].
      group_offset: the number of the group that `weights` begin with, an int or an integer [], if
        they are those of some of the groups: `group_sizes` then names all groups, and scales and
        bias have the groups of `weights`. Rows of other groups are zero, and so are their
        gradients; they cost as much as writing zeros. Groups past the last are empty.
      row_scales: float [rows], multiplied with the result's rows before they are rounded.
      group_scales: float [groups], likewise for the rows of each group. Results with scales are
        floats and have no gradient.
      bias: float [groups, columns], added to the rows of each group before they are rounded.
      bias_weights: float [rows], what the bias is multiplied by in each row: the router's weights
        where `glu` has multiplied the rows by them.
      transpose_weights: whether `weights` is [groups, columns, depth], as in torch. Nothing is
        transposed in memory.
      precision: how float32 is multiplied: a `jax.lax.Precision`, a `jax.lax.DotAlgorithmPreset`,
        or the name of one. None is the default that is in force
        (`jax.default_matmul_precision`), and without one exact.
      preferred_element_type: the dtype of the result; by default that of `rows`, and bfloat16 if
        these are a `ScaledArray`.
      implementation: None picks by the program's platform: Triton kernels on CUDA, plain JAX
        elsewhere. "triton", "interpret" (the kernels, interpreted on the CPU) and "xla" insist.

    Returns:
      [rows, columns].

    Raises:
      ArgumentTypeError: an argument is not an array, or of the wrong dtype; `rows` and `weights`
        are not both floats or both integers.
      ArgumentValueError: an argument has the wrong shape, or `implementation` is unknown.
      DifferentiationError: 8-bit operands, or scales, were differentiated.
    """
    only_weights = isinstance(weights, ScaledArray) and not isinstance(rows, ScaledArray)
    if isinstance(rows, ScaledArray) and preferred_element_type is None:
        preferred_element_type = jnp.bfloat16
    messages.check_bool(transpose_weights=transpose_weights)
    transpose_weights = bool(transpose_weights)
    if isinstance(weights, ScaledArray):
        transpose_weights ^= weights.transposed
    given_rows = rows
    rows, row_scales, row_block, _ = scaled.rows(rows, row_scales)
    found = scaled.weights(weights, group_scales, transpose_weights)
    weights, group_scales, weight_block, packed = found
    rows = arguments.array("rows", rows, ("rows", "depth"))
    weights = arguments.array("weights", weights, ("groups", "depth", "columns"))
    group_sizes = arguments.array("group_sizes", group_sizes, ("groups",), jnp.integer)
    messages.check_sizes_known("rows", rows.shape)
    messages.check_sizes_known("weights", weights.shape)
    num_rows, depth = rows.shape
    num_groups, *sizes = found.shape
    contracted, columns = sizes[:: -1 if transpose_weights else 1]
    if contracted != depth:
        raise ArgumentValueError(
            f"Argument `weights` must have the depth of `rows`, {depth}, as its "
            f"{'third' if transpose_weights else 'second'} size; got shape {found.shape}."
            + (arguments.transpose_remedy() if columns == depth else "")
        )
    of = "groups of `weights`"
    if group_offset is None:
        arguments.check_length("group_sizes", group_sizes, num_groups, "size", of)
    else:
        group_offset = _check_offset(group_offset, group_sizes.shape[0], num_groups)
    if row_block is None:
        row_scales = scaled.check_scales("row_scales", row_scales, num_rows, "rows")
    if weight_block[0] is None:
        group_scales = scaled.check_scales("group_scales", group_scales, num_groups, "groups")
    bias, bias_weights = _check_bias(bias, bias_weights, (num_groups, columns), num_rows)
    if only_weights or packed:
        scaled.check_rows(given_rows, packed)
    else:
        rows, weights = _alike(rows, weights)
    result = _result_dtype(preferred_element_type, rows.dtype)
    if not (row_scales is None and group_scales is None) and not jnp.issubdtype(
        result, jnp.floating
    ):
        raise ArgumentTypeError(
            "Arguments `row_scales` and `group_scales` must scale a float; the result is "
            f"{result}. Pass `preferred_element_type=jnp.float32`."
        )
    if bias is not None and not jnp.issubdtype(rows.dtype, jnp.floating):
        raise ArgumentTypeError(
            f"Argument `bias` must be added to a product of floats; got {rows.dtype}. Add it to "
            "the result."
        )
    implementation = implementations.resolve_for_floats(
        implementation,
        rows=rows,
        weights=None if only_weights else weights,  # which kernels convert, also from integers
        preferred_element_type=jax.ShapeDtypeStruct((), result),
        bias=bias,
        bias_weights=bias_weights,
    )
    if not depth and bias is not None and num_rows and num_groups and columns:
        implementation = "xla"  # nothing to multiply, but something to add
    elif not (num_rows and depth and num_groups and columns):
        empty = jnp.zeros((num_rows, columns), result)
        # Sums of nothing: zero, but still a function of the operands, so that they have gradients.
        return empty + jnp.sum(rows[:0]).astype(result) + jnp.sum(weights[:0]).astype(result)
    share = min(1.0, num_groups / max(1, group_sizes.shape[0]))
    name = _precision_name(precision)
    if rows.dtype.itemsize < 4 and not (rows.dtype.itemsize == 1 and name == FAST_SUMS):
        name = None
    options = Options(result, name, share, row_block, weight_block, packed)
    groups = Groups(arguments.as_int32(group_sizes))
    if group_offset is not None:
        groups = _some_groups(groups, group_offset, num_groups, num_rows)
    operands = rows, weights, groups, row_scales, group_scales, bias, bias_weights
    op = ops.DOTS[transpose_weights, options.kind]
    out = op(*operands, options=options, implementation=implementation)
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
    """The groups from `offset` on, and where they begin."""
    bounds = jnp.concatenate([jnp.zeros(1, jnp.int32), group_ends(groups, num_rows)])
    # Groups that do not exist are empty.
    num_sizes = groups.sizes.shape[0]
    which = jnp.clip(offset, -count, num_sizes) + jnp.arange(count + 1, dtype=jnp.int32)
    bounds = jnp.take(bounds, jnp.clip(which, 0, num_sizes), mode="clip")
    return Groups(jnp.diff(bounds), bounds[0])


def _alike(rows: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both in one dtype. 8-bit floats stay as they are: kernels multiply any two of them."""
    kinds = [_kind("rows", rows), _kind("weights", weights)]
    if rows.dtype == weights.dtype or kinds == ["8-bit floats"] * 2:
        return rows, weights
    remedy = "Cast one; of a `ScaledArray` pass `dequantize(dtype)`, or quantize the other, too."
    if kinds[0] != kinds[1] and "integers" in kinds:
        remedy = (
            "Integers are multiplied as they are: cast them to the floats' dtype, and multiply by "
            "their scales, if they have some."
        )
    try:
        dtype = jnp.promote_types(rows.dtype, weights.dtype) if kinds[0] == kinds[1] else None
    except TypeError:  # JAX's strict mode, or a dtype that it does not promote
        dtype = None
    if dtype is not None and not all(np.can_cast(a.dtype, dtype) for a in (rows, weights)):
        dtype, remedy = None, "No dtype holds both. Cast one."  # without 64 bits
    if dtype is None:
        raise ArgumentTypeError(
            "Arguments `rows` and `weights` must both be floats, both 8-bit floats or both "
            f"integers; got {rows.dtype} and {weights.dtype}. {remedy}"
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
            f"Argument `{name}` must be floats or integers; got {array.dtype}. Cast it; of complex "
            "numbers multiply the real and the imaginary parts."
        )
    return "8-bit floats" if array.dtype.itemsize == 1 else "floats"


def _result_dtype(preferred: Any, dtype: Any) -> Any:
    """The dtype of the result, of operands of a dtype."""
    if preferred is None:
        return dtype
    try:
        result = jax.dtypes.canonicalize_dtype(preferred)
    except TypeError as error:
        raise ArgumentTypeError(
            "Argument `preferred_element_type` must be a dtype such as jnp.float32; got "
            f"{messages.short(preferred)}."
        ) from error
    floats = jnp.issubdtype(dtype, jnp.floating)
    kinds = (jnp.floating,) if floats else (jnp.floating, jnp.integer)
    if not any(jnp.issubdtype(result, kind) for kind in kinds):
        raise ArgumentTypeError(
            "Argument `preferred_element_type` must be a float"
            f"{'' if floats else ' or an integer'}; got {result} for operands of {dtype}."
        )
    return result


def _precision_name(precision: Any) -> str | None:
    """JAX's name of a precision for `jax.default_matmul_precision`; by default the one in force."""
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
    bias = arguments.array("bias", bias, ("groups", "columns"), jnp.floating)
    arguments.check_wide("bias", bias, "Cast it.")
    if bias.shape != shape:
        raise ArgumentValueError(
            f"Argument `bias` must have shape {shape}, a value for each group and column; got "
            f"{bias.shape}."
        )
    return bias, scaled.check_scales("bias_weights", bias_weights, num_rows, "rows")
