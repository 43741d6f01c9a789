"""Launches ragged_dot in 16 bits on Hopper, its activation, and the gradient of its weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from triax.binding.descriptor import TensorDescriptor
from triax.compat import versions
from triax.moe.activations.reference import GluSpec
from triax.moe.products.operands import Parts
from triax.moe.products.options import Groups, Options
from triax.moe.products.row_tiles import ROW_TILES, ROWS, bounded_by_group, schedule, suit_tma
from triax.moe.shared.arrays import absent
from triax.moe.shared.launching import launch
from triax.moe.shared.target import Target

_HALF, _DEPTH, _STAGES = 128, 64, 3
# Warps that store, and registers per thread: on average, and of the threads that multiply.
_WARPS, _REGISTERS, _REGISTERS_OF_PRODUCTS = 2, 168, 192
_HOPPER = 90
_DTYPES = {jnp.dtype(jnp.bfloat16)}, {jnp.dtype(jnp.float16)}


def suit(
    target: Target, x: Parts, w: Parts, num_groups: int, columns: int, options: Options, how: Any
) -> bool:
    """Whether the kernels support their operands: many rows in a group, and many columns.

    Gluon is not interpreted.
    """
    return (
        target.compute_capability == _HOPPER
        and target.tensor_maps
        and how != "interpret"
        and versions.GLUON.passes(versions.installed(versions.GLUON.package) or "0")
        and {x.values.dtype, w.values.dtype, options.dtype} in _DTYPES
        and x.scales is w.scales is None
        and int(len(x.values) * options.share) // num_groups > ROWS // 2
        and columns > _HALF
        and suit_tma(x.values, w.values)
    )


def ragged_dot(
    target: Target,
    x: Parts,
    w: Parts,
    groups: Groups,
    bias: jax.Array | None = None,
    bias_weights: jax.Array | None = None,
    row_weights: jax.Array | None = None,
    *,
    transposed: bool,
    options: Options,
    implementation: Any,
    spec: GluSpec | None = None,
) -> Any:
    """Multiplies each row by its group's weights; with `spec` also returns the result of `glu`.

    Returns None if the kernel does not `suit`.
    """
    (num_rows, depth), columns = x.values.shape, w.values.shape[1 if transposed else 2]
    if not suit(target, x, w, len(w.values), columns, options, implementation):
        return None
    if bias is not None and not suit_tma(bias):
        return None
    from triton.experimental.gluon import language as gl

    from triax.moe.products.sm90_16_bits_kernels import _ragged_dot_overlapped_kernel

    is_apart = spec is not None and spec.gated and not spec.interleaved
    width, apart = (columns // 2, columns // 2) if is_apart else (columns, _HALF)
    layouts = [gl.NVMMASharedLayout(128, element_bitwidth=16, rank=rank) for rank in (2, 3)]
    box = (1, _HALF, _DEPTH) if transposed else (1, _DEPTH, _HALF)
    tiles, _ = schedule(groups, num_rows, ROWS, implementation, ROW_TILES)
    inner = spec and jax.ShapeDtypeStruct((num_rows, spec.width(columns)), options.dtype)
    found = launch(
        _ragged_dot_overlapped_kernel,
        TensorDescriptor.from_array(x.values, (ROWS, _DEPTH), layouts[0]),
        TensorDescriptor.from_array(w.values, box, layouts[1]),
        None if bias is None else _described(bias),
        tiles,
        bias_weights,
        row_weights,
        num_rows,
        depth,
        width,
        apart,
        columns,
        out_type=(jax.ShapeDtypeStruct((num_rows, columns), options.dtype), inner),
        implementation=implementation,
        TRANSPOSED=transposed,
        ACTIVATION=spec and dataclasses.astuple(spec),
        **_program(target),
        **absent(inner_ptr=spec),
    )
    return found[0] if spec is None else found


def _described(bias: jax.Array) -> TensorDescriptor:
    from triton.experimental.gluon import language as gl

    layout = gl.NVMMASharedLayout(0, element_bitwidth=8 * bias.dtype.itemsize)
    return TensorDescriptor.from_array(bias, (1, _HALF), layout)


def group_outer(
    target: Target, left: jax.Array, right: jax.Array, bounds: jax.Array, out_type: Any, how: Any
) -> jax.Array:
    """Sums left × right over the rows of each group, given their bounds."""
    from triton.experimental.gluon import language as gl

    from triax.moe.products.sm90_16_bits_gradient_kernels import _group_outer_overlapped_kernel

    layout = gl.NVMMASharedLayout(128, element_bitwidth=16, rank=4)
    return launch(
        _group_outer_overlapped_kernel,
        *(bounded_by_group(array, _DEPTH, _HALF, layout) for array in (left, right)),
        bounds,
        *out_type.shape,
        out_type=out_type,
        implementation=how,
        ROW_TILES=ROW_TILES,
        **_program(target),
    )


def _program(target: Target) -> dict[str, Any]:
    warps = {"WARPS": _WARPS, "REGISTERS": _REGISTERS_OF_PRODUCTS, "STAGES": _STAGES}
    options = {"num_warps": 4, "backend_options": {"maxnreg": _REGISTERS}}
    return {"grid": target.multiprocessors, **options, **warps}
