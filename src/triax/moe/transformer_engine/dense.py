"""`grouped_dense`, which is `ragged_dot` with a bias."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from triax.errors import ArgumentValueError, UnsupportedError
from triax.messages import short
from triax.moe.products import arguments as products
from triax.moe.products.ops import multiply
from triax.moe.shared import arguments
from triax.moe.shared.arguments import Array
from triax.moe.shared.implementation import Implementation


def grouped_dense(
    x: Array,
    kernel: Array,
    group_sizes: Array,
    contracting_dims: Any = ((1,), (1,)),
    bias: Array | None = None,
    *,
    precision: PrecisionLike = jax.lax.Precision.DEFAULT,
    preferred_element_type: DTypeLike | None = None,
    group_offset: Array | None = None,
    quantizer_set: Any = None,
    kernel_fsdp_info: Any = (None, -1),
    kernel_amax: Any = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Multiplies every row by the kernel of its group, and adds the group's bias.

        y = grouped_dense(rows, kernel, tokens_per_expert, bias=bias)  # [rows, columns]

    `triax.moe.ragged_dot` does the same, and documents dtypes, rows past the groups and gradients.
    Arguments after `bias` must be named, because their order differs between versions of
    TransformerEngine.

    Args:
      x: float [rows, depth].
      kernel: [groups, depth, columns] in the dtype of `x`.
      group_sizes: integer [groups].
      contracting_dims: ((1,), (1,)); or ((1,), (2,)) for a kernel [groups, columns, depth].
      bias: float [groups, columns], added in float32 before results are rounded.
      precision: as for `ragged_dot`. The default multiplies float32 in TF32, which
        TransformerEngine does for every `precision`.
      preferred_element_type: the dtype of the result; by default the dtype of `x`.
      group_offset: None; TransformerEngine refuses it too.
      quantizer_set: None, or a set without quantizers, such as `noop_quantizer_set`.
      kernel_fsdp_info: (None, -1); the kernel is whole on each device.
      kernel_amax: None, an argument that TransformerEngine had until 2.14.

    Returns:
      [rows, columns].

    Raises:
      ArgumentTypeError: an argument has the wrong type.
      ArgumentValueError: an argument has the wrong shape.
      UnsupportedError: an argument asks for a feature that Triax lacks.
    """
    _check_unsupported(group_offset, quantizer_set, kernel_fsdp_info, kernel_amax)
    x = arguments.array("x", x, ("rows", "depth"), jnp.floating)
    kernel = arguments.array("kernel", kernel, ("groups", "depth", "columns"), jnp.floating)
    ways = {((1,), (1,)): 1, ((1,), (2,)): 2}
    try:
        depth_of_kernel = ways[tuple(map(tuple, contracting_dims))]  # type: ignore[index]
    except (KeyError, TypeError) as error:
        raise ArgumentValueError(
            "Argument `contracting_dims` must be ((1,), (1,)), or ((1,), (2,)) for a kernel "
            f"[groups, columns, depth]; got {short(contracting_dims)}."
        ) from error
    if kernel.shape[depth_of_kernel] != x.shape[1]:
        raise ArgumentValueError(
            f"Argument `kernel` must have the depth of `x`, {x.shape[1]}, in dimension "
            f"{depth_of_kernel}; got shape {kernel.shape}."
        )
    product = products.checked(
        x,
        kernel,
        group_sizes,
        bias=bias,
        transpose_weights=depth_of_kernel == 2,
        precision=precision,
        preferred_element_type=preferred_element_type,
        implementation=implementation,
        names=("x", "kernel"),
    )
    return multiply(*product, implementation=implementation)


def _check_unsupported(
    group_offset: Any, quantizer_set: Any, kernel_fsdp_info: Any, kernel_amax: Any
) -> None:
    remedies = {
        "group_offset": "Call `triax.moe.ragged_dot`, which takes one.",
        "quantizer_set": "For 8 bits call `triax.moe.ragged_dot` with `ScaledArray`s.",
        "kernel_fsdp_info": "Gather the kernel before, with `jax.lax.all_gather`.",
        "kernel_amax": "It is for quantizers; call `triax.moe.quantize` instead.",
    }
    quantizers = ("x", "kernel", "dgrad")
    passed = {
        "group_offset": group_offset is not None,
        "quantizer_set": quantizer_set is not None
        and any(getattr(quantizer_set, name, quantizer_set) is not None for name in quantizers),
        "kernel_fsdp_info": kernel_fsdp_info is not None and kernel_fsdp_info[0] is not None,
        "kernel_amax": kernel_amax is not None,
    }
    for name, is_given in passed.items():
        if is_given:
            raise UnsupportedError(
                f"Argument `{name}` of grouped_dense is not supported. {remedies[name]}"
            )
