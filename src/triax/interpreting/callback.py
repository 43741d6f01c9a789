"""Puts an interpreted launch into a program, as a host callback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from triax.binding.launch import BoundCall, Launch
from triax.compat import jax_private
from triax.interpreting import frames


def emit_callback(
    ctx: Any, operands: Sequence[Any], call: BoundCall, launch: Launch
) -> Sequence[Any]:
    """Emits a host callback that interprets `launch`.

    `jax.pure_callback` will not do: it turns its operands into JAX arrays, and hangs with large
    arrays beside a collective over several CPU devices.
    """
    from triax.interpreting.run import run  # here: it imports triton

    # 64-bit results are returned as pairs of 32 bits: JAX narrows a callback's results, unless
    # `jax.enable_x64` is set in the thread that runs it, which is a thread of XLA's.
    types = [
        jax.core.ShapedArray((*aval.shape, 2), np.uint32) if aval.dtype.itemsize == 8 else aval
        for aval in ctx.avals_out
    ]

    def callback(*arrays: Any) -> tuple[np.ndarray, ...]:
        try:
            outputs = run(launch, [np.asarray(array) for array in arrays], call.checked)
        except Exception as error:
            frames.raise_as_text(error)
        return tuple(
            array.reshape(-1).view(type.dtype).reshape(type.shape)
            for array, type in zip(outputs, types, strict=True)
        )

    # Parts that XLA has traced share one callback of the program: a number selects this launch.
    numbered, avals, numbers = callback, list(ctx.avals_in), list[Any]()
    if (board := jax_private.switchboard(ctx)) is not None:
        numbered = lambda number, *arrays: callback(*arrays)
        numbers = [mlir.ir_constant(np.int32(board.announce()))]
        avals = [jax.core.ShapedArray((), np.int32), *avals]

    results: Sequence[Any]
    results, _, _ = mlir.emit_python_callback(
        ctx.replace(avals_in=avals, avals_out=types),
        numbered,
        None,
        [*numbers, *operands],
        avals,
        types,
        has_side_effect=call.has_side_effect,
    )
    return [
        result if type is aval else _bitcast(result, aval)
        for result, type, aval in zip(results, types, ctx.avals_out, strict=True)
    ]


def _bitcast(value: Any, aval: Any) -> Any:
    """Reinterprets the bytes of `value` as an array like `aval`."""
    element = mlir.dtype_to_ir_type(aval.dtype)
    # MLIR's Python classes have no type annotations.
    like = ir.RankedTensorType.get(aval.shape, element)  # type: ignore[attr-defined]
    return stablehlo.bitcast_convert(like, value)  # type: ignore[attr-defined]
