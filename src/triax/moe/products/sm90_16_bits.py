"""Launches ragged_dot in 16 bits on Hopper, its activation, and the gradient of its weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from triax.binding.descriptor import TensorDescriptor
from triax.moe.products.product import ALIGNED, GroupOuter, RaggedDot
from triax.moe.products.row_tiles import (
    ROW_TILES,
    ROWS,
    bounded_by_group,
    group_bounds,
    schedule,
    suit_tma,
)
from triax.moe.products.thresholds import HALF_A_TILE
from triax.moe.shared.arrays import absent
from triax.moe.shared.launching import launch
from triax.moe.shared.target import Target

_HALF, _DEPTH, _STAGES = 128, 64, 3
# Warps that store, and registers per thread: on average, and of the threads that multiply.
_WARPS, _REGISTERS, _REGISTERS_OF_PRODUCTS = 2, 168, 192
_DTYPES = {jnp.dtype(jnp.bfloat16)}, {jnp.dtype(jnp.float16)}


def needs(product: RaggedDot | GroupOuter) -> str | None:
    """Returns what the kernels need and a product does not have; None if they take it."""
    if needed := product.needs_hopper():
        return needed
    arrays = product.left.values, product.right.values
    if {*(array.dtype for array in arrays), product.options.dtype} not in _DTYPES:
        return "operands and a result of one dtype of 16 bits"
    if product.left.scales is not None or product.right.scales is not None:
        return "operands without scales"
    if product.rows_per_group <= HALF_A_TILE:
        return f"more than {HALF_A_TILE} rows for each group on average"
    if product.columns <= _HALF:
        return f"more than {_HALF} columns"
    bias = product.bias if isinstance(product, RaggedDot) else None
    return None if suit_tma(*arrays, *([] if bias is None else [bias])) else ALIGNED


def needs_of_gradients(product: GroupOuter) -> str | None:
    """As `needs`, of the gradient of the weights."""
    return "16 bits" if product.rounded_to else needs(product)


def ragged_dot(product: RaggedDot) -> Any:
    """Multiplies each row by its group's weights; with `glu` also returns its result."""
    from triton.experimental.gluon import language as gl

    from triax.moe.products.sm90_16_bits_kernels import _ragged_dot_overlapped_kernel

    x, w, bias, glu = product.left.values, product.right.values, product.bias, product.glu
    num_rows, columns, implementation = product.num_rows, product.columns, product.implementation
    is_apart = glu is not None and glu.gated and not glu.interleaved
    width, apart = (columns // 2, columns // 2) if is_apart else (columns, _HALF)
    layouts = [gl.NVMMASharedLayout(128, element_bitwidth=16, rank=rank) for rank in (2, 3)]
    box = (1, _HALF, _DEPTH) if product.transposed else (1, _DEPTH, _HALF)
    tiles, _ = schedule(product.groups, num_rows, ROWS, implementation, ROW_TILES)
    described = None
    if bias is not None:
        layout = gl.NVMMASharedLayout(0, element_bitwidth=8 * bias.dtype.itemsize)
        described = TensorDescriptor.from_array(bias, (1, _HALF), layout)
    inner = glu and jax.ShapeDtypeStruct((num_rows, glu.width(columns)), product.options.dtype)
    result = launch(
        _ragged_dot_overlapped_kernel,
        TensorDescriptor.from_array(x, (ROWS, _DEPTH), layouts[0]),
        TensorDescriptor.from_array(w, box, layouts[1]),
        described,
        tiles,
        product.bias_weights,
        product.row_weights,
        num_rows,
        product.depth,
        width,
        apart,
        columns,
        out_type=(product.out_type if product.keep_product else None, inner),
        implementation=implementation,
        TRANSPOSED=product.transposed,
        ACTIVATION=glu and dataclasses.astuple(glu),
        **_program(product.target),
        **absent(out_ptr=product.keep_product or None, inner_ptr=glu),
    )
    return result[0] if glu is None else result


def group_outer(product: GroupOuter) -> jax.Array:
    """Sums left × right over the rows of each group."""
    from triton.experimental.gluon import language as gl

    from triax.moe.products.sm90_16_bits_gradient_kernels import _group_outer_overlapped_kernel

    layout = gl.NVMMASharedLayout(128, element_bitwidth=16, rank=4)
    sides = product.left.values, product.right.values
    out_type = product.out_type
    return launch(
        _group_outer_overlapped_kernel,
        *(bounded_by_group(array, _DEPTH, _HALF, layout) for array in sides),
        group_bounds(product.groups, product.num_rows, product.implementation),
        *out_type.shape,
        out_type=out_type,
        implementation=product.implementation,
        ROW_TILES=ROW_TILES,
        **_program(product.target),
    )


def _program(target: Target) -> dict[str, Any]:
    warps = {"WARPS": _WARPS, "REGISTERS": _REGISTERS_OF_PRODUCTS, "STAGES": _STAGES}
    options = {"num_warps": 4, "backend_options": {"maxnreg": _REGISTERS}}
    return {"grid": target.multiprocessors, **options, **warps}
