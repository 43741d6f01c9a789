"""Launches glu and its gradients: result types, grids and configs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from triax.binding.launch import KernelImplementation
from triax.moe.activations.reference import GluSpec, quantized_glu_reference
from triax.moe.quantization.configs import RowsConfig
from triax.moe.quantization.launchers import rounds_to
from triax.moe.shared import blocks
from triax.moe.shared.arrays import absent
from triax.moe.shared.launching import launch
from triax.moe.shared.target import Target, for_target

# Kernels are imported where they are launched: importing triax.moe needs no Triton.

_MAX_ROWS = 64  # rows of a program


def glu(
    gate_up: jax.Array,
    up: jax.Array | None,
    row_weights: jax.Array | None,
    *,
    spec: GluSpec,
    implementation: KernelImplementation | None,
) -> jax.Array:
    """Returns ``row_weights * activation(gate, up)``."""
    from triax.moe.activations.kernels import _glu_kernel

    num_rows, width = _shape(gate_up, up, spec)
    block = blocks.part(width, gate_up.dtype.itemsize, _MAX_ROWS)
    return launch(
        _glu_kernel,
        gate_up,
        up,
        row_weights,
        num_rows,
        width,
        out_type=jax.ShapeDtypeStruct((num_rows, width), gate_up.dtype),
        grid=-(-num_rows // block.rows) * -(-width // block.width),
        config=spec,
        num_warps=block.num_warps,
        implementation=implementation,
        BLOCK_ROWS=block.rows,
        BLOCK_COLUMNS=block.width,
    )


def quantized_glu(
    gate_up: jax.Array,
    up: jax.Array | None,
    row_weights: jax.Array | None,
    *,
    spec: GluSpec,
    dtype: np.dtype,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """Returns glu's result, quantized with a scale for each row: values and scales."""
    num_rows, width = _shape(gate_up, up, spec)
    values = jax.ShapeDtypeStruct((num_rows, width), dtype)
    types = values, jax.ShapeDtypeStruct((num_rows, 1), jnp.float32)
    options |= {"spec": spec, "types": types}
    return for_target(_quantized_glu, gate_up, up, row_weights, out_type=types, **options)


def _quantized_glu(
    target: Target,
    gate_up: jax.Array,
    up: jax.Array | None,
    row_weights: jax.Array | None,
    *,
    spec: GluSpec,
    types: tuple[Any, Any],
    implementation: KernelImplementation | None,
) -> tuple[jax.Array, jax.Array]:
    from triax.moe.activations.kernels import _quantized_glu_kernel

    (num_rows, width), dtype = types[0].shape, types[0].dtype
    if not rounds_to(dtype, target, implementation):
        return quantized_glu_reference(gate_up, up, row_weights, spec=spec, dtype=dtype)
    block = RowsConfig.for_depth(width)
    return launch(
        _quantized_glu_kernel,
        gate_up,
        up,
        row_weights,
        num_rows,
        width,
        out_type=types,
        grid=-(-num_rows // block.block_rows),
        config=(spec, block),
        implementation=implementation,
    )


def _shape(gate_up: jax.Array, up: jax.Array | None, spec: GluSpec) -> tuple[int, int]:
    """Returns the shape of glu's result."""
    num_rows, width = gate_up.shape
    return num_rows, width // 2 if spec.gated and up is None else width


def glu_grad(
    gate_up: jax.Array,
    up: jax.Array | None,
    row_weights: jax.Array | None,
    gradient: jax.Array,
    *,
    spec: GluSpec,
    again: bool,
    implementation: KernelImplementation | None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]:
    """Returns glu's gradients, of `row_weights` in float32; with `again`, its result."""
    from triax.moe.activations.kernels import _glu_grad_kernel

    num_rows, width = gradient.shape
    # Programs hold interleaved halves twice: half the block is faster, as measured on an H200.
    itemsize = gate_up.dtype.itemsize * (2 if spec.interleaved else 1)
    block = blocks.part(width, itemsize, _MAX_ROWS)
    results = (
        jax.ShapeDtypeStruct(gate_up.shape, gate_up.dtype),
        None if up is None else jax.ShapeDtypeStruct(up.shape, up.dtype),
        None if row_weights is None else jax.ShapeDtypeStruct((num_rows,), jnp.float32),
        jax.ShapeDtypeStruct((num_rows, width), gate_up.dtype) if again else None,
    )
    aliases = {"gate_up_ptr": 0, "gradient_ptr": len(jax.tree.leaves(results)) - 1}
    if up is not None:
        aliases["up_ptr"] = 1
    return launch(
        _glu_grad_kernel,
        gate_up,
        up,
        row_weights,
        gradient,
        num_rows,
        width,
        out_type=results,
        input_output_aliases=aliases if again else {},
        grid=-(-num_rows // block.rows),
        config=spec,
        num_warps=block.num_warps,
        implementation=implementation,
        BLOCK_ROWS=block.rows,
        BLOCK_COLUMNS=block.width,
        AGAIN=again,
        **absent(
            d_gate_up_ptr=None if again else gate_up,
            d_up_ptr=None if again else up,
            d_row_weights_ptr=row_weights,
        ),
    )
