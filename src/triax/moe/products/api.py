"""`ragged_dot`: checks its arguments and calls the op."""

from __future__ import annotations

import jax
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from triax.moe.products import arguments, ops
from triax.moe.quantization.scaled import ScaledArray
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
    dequantized in that dtype. Weights in tiles (`ScaledArray.tile`) are unpacked in the kernels for
    few bfloat16 rows. Otherwise they are dequantized up front, as weights of 4 bits always are;
    with few rows a warning says why. So are 8-bit weights with scales of blocks, for many bfloat16
    rows. A `ScaledArray` has no gradient.

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
    product = arguments.checked(
        rows,
        weights,
        group_sizes,
        group_offset=group_offset,
        bias=bias,
        bias_weights=bias_weights,
        transpose_weights=transpose_weights,
        precision=precision,
        preferred_element_type=preferred_element_type,
        implementation=implementation,
    )
    return ops.multiply(*product, implementation=implementation)
