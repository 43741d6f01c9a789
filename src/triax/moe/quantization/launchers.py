"""Launches quantize: result types, grids and configs."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from triax.binding.launch import KernelImplementation
from triax.errors import UnsupportedError
from triax.moe.quantization.configs import TILE, Kernel, RowsConfig
from triax.moe.quantization.reference import quantize_reference
from triax.moe.quantization.scaled import num_blocks, swapped
from triax.moe.shared.launching import launch
from triax.moe.shared.target import Target, for_target

# Kernels are imported where they are launched: importing triax.moe needs no Triton.

_CASTS_TO_FLOAT8 = 89  # older GPUs lack the instruction, and Triton would round twice
# Blocks as measured on an H200.
_TILES = {"BLOCK_DEPTH": 64, "num_warps": 4}
_COLUMNS = {"BLOCK_DEPTH": 256, "BLOCK_COLUMNS": 64, "num_warps": 8}


def quantize(
    array: jax.Array,
    *,
    block: tuple[int, ...],
    dtype: np.dtype,
    transposed: bool,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """Returns the values and scales of an array; `block` has a size for each dimension."""
    swap = swapped if transposed else tuple
    values = jax.ShapeDtypeStruct(swap(array.shape), dtype)
    types = values, jax.ShapeDtypeStruct(swap(num_blocks(array.shape, block)), jnp.float32)
    options |= {"block": block, "dtype": dtype, "transposed": transposed, "types": types}
    return for_target(_quantize, array, out_type=types, **options)


def rounds_to(dtype: np.dtype, target: Target, implementation: str | None) -> bool:
    """Whether the GPU rounds to `dtype`; raises if it does not, and kernels were requested."""
    capability = target.compute_capability
    if dtype.kind == "i" or capability >= _CASTS_TO_FLOAT8:
        return True
    if implementation is None:
        return False
    raise UnsupportedError(
        f"Argument `implementation` is {implementation!r}, and GPUs of compute capability "
        f"{capability} do not round to {dtype.name}. Let it be None, to run plain JAX on this GPU, "
        "or use int8."
    )


def _quantize(
    target: Target,
    array: jax.Array,
    *,
    block: tuple[int, ...],
    dtype: np.dtype,
    transposed: bool,
    types: tuple[Any, Any],
    kernel: Kernel,
    implementation: KernelImplementation | None,
) -> Any:
    from triax.moe.quantization import kernels

    if not rounds_to(dtype, target, implementation):
        return quantize_reference(array, block=block, dtype=dtype, transposed=transposed)
    scales = num_blocks(array.shape, block)
    options: dict[str, Any] = {
        "out_type": types,
        "implementation": implementation,
        # A multiplication must not be fused with the rounding after it.
        "backend_options": {"enable_fp_fusion": False},
    }
    depth = array.shape[-1]
    if kernel in ("rows", "parts"):
        count, parts, part = math.prod(scales), scales[-1], None
        if parts > 1 and depth % block[-1]:
            part = block[-1]
        elif parts > 1:  # parts are whole: they become rows of a narrower array
            depth, parts = block[-1], 1
        rows = RowsConfig.for_depth(min(depth, block[-1]))
        return launch(
            kernels._quantize_rows_kernel,
            array,
            count,
            depth,
            parts,
            config=rows,
            grid=-(-count // rows.block_rows),
            BLOCK=part,
            **options,
        )
    groups, rows_of_group = math.prod(array.shape[:-2]), array.shape[-2]
    operands = array, rows_of_group, depth
    if kernel == "tiles":
        options |= {"TRANSPOSED": transposed, "TILE": TILE, **_TILES}
        programs = groups * -(-rows_of_group // TILE) * -(-depth // TILE)
        return launch(kernels._quantize_tiles_kernel, *operands, grid=programs, **options)
    programs = groups * -(-depth // _COLUMNS["BLOCK_COLUMNS"])
    options |= _COLUMNS
    return launch(kernels._quantize_columns_kernel, *operands, grid=programs, **options)
