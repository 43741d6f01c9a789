"""The launches of glu: result types, grids and configs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from triax.binding.launch import KernelImplementation
from triax.moe.shared import blocks
from triax.moe.shared.arrays import absent
from triax.moe.shared.launching import launch

# Kernels are imported where they are launched: importing triax.moe needs no Triton.

_MAX_ROWS = 64  # of one program


def glu(
    gate_up: jax.Array,
    row_weights: jax.Array | None,
    *,
    activation: str,
    implementation: KernelImplementation | None,
) -> jax.Array:
    """``row_weights * activation(gate) * up``."""
    from triax.moe.activations.kernels import _glu_kernel

    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    block = blocks.part(width, gate_up.dtype.itemsize, _MAX_ROWS)
    return launch(
        _glu_kernel,
        gate_up,
        row_weights,
        num_rows,
        width,
        out_type=jax.ShapeDtypeStruct((num_rows, width), gate_up.dtype),
        grid=-(-num_rows // block.rows) * -(-width // block.width),
        num_warps=block.num_warps,
        implementation=implementation,
        ACTIVATION=activation,
        BLOCK_ROWS=block.rows,
        BLOCK_COLUMNS=block.width,
    )


def glu_grad(
    gate_up: jax.Array,
    row_weights: jax.Array | None,
    gradient: jax.Array,
    *,
    activation: str,
    implementation: KernelImplementation | None,
) -> tuple[jax.Array, jax.Array | None]:
    """The gradients of `gate_up` and, in float32, of `row_weights`."""
    from triax.moe.activations.kernels import _glu_grad_kernel

    num_rows, width = gradient.shape
    block = blocks.part(width, gate_up.dtype.itemsize, _MAX_ROWS)
    return launch(
        _glu_grad_kernel,
        gate_up,
        row_weights,
        gradient,
        num_rows,
        width,
        out_type=(
            jax.ShapeDtypeStruct(gate_up.shape, gate_up.dtype),
            None if row_weights is None else jax.ShapeDtypeStruct((num_rows,), jnp.float32),
        ),
        grid=-(-num_rows // block.rows),
        num_warps=block.num_warps,
        implementation=implementation,
        ACTIVATION=activation,
        BLOCK_ROWS=block.rows,
        BLOCK_COLUMNS=block.width,
        **absent(d_row_weights_ptr=row_weights),
    )
