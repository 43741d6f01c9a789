"""An interpreted launch in a program: a host callback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from triax.binding.launch import Call, Launch
from triax.compat import jax_private
from triax.interpreting import frames


def emit_callback(ctx: Any, operands: Sequence[Any], call: Call, launch: Launch) -> Sequence[Any]:
    """Emits a host callback that interprets `launch`.

    Not `jax.pure_callback`, which turns its operands into JAX arrays, and hangs with a collective
    over several CPU devices and large arrays.
    """
    from triax.interpreting.run import run  # here: it imports triton

    # Results of 64 bits are handed over as pairs of 32: JAX narrows what a callback returns, unless
    # `jax.enable_x64` is set in the thread that runs it, which is one of XLA's.
    types = [
        jax.core.ShapedArray((*aval.shape, 2), np.uint32) if aval.dtype.itemsize == 8 else aval
        for aval in ctx.avals_out
    ]

    def callback(*arrays: Any) -> tuple[np.ndarray, ...]:
        try:
            found = run(launch, [np.asarray(array) for array in arrays], call.checked)
        except Exception as error:
            frames.raise_as_text(error)
        return tuple(
            array.reshape(-1).view(type.dtype).reshape(type.shape)
            for array, type in zip(found, types, strict=True)
        )

    # In a part that XLA has traced, the program's one callback has to be told which is meant.
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
    """`value`, its bytes taken for those of an array like `aval`."""
    element = mlir.dtype_to_ir_type(aval.dtype)
    # MLIR's Python classes have no types.
    like = ir.RankedTensorType.get(aval.shape, element)  # type: ignore[attr-defined]
    return stablehlo.bitcast_convert(like, value)  # type: ignore[attr-defined]
