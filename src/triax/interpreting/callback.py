"""An interpreted launch in a program: a host callback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.interpreters import mlir

from triax.binding.launch import Call, Launch
from triax.interpreting import frames


def emit_callback(ctx: Any, operands: Sequence[Any], call: Call, launch: Launch) -> Sequence[Any]:
    """Emits a host callback that interprets `launch`.

    Not `jax.pure_callback`, which turns its operands into JAX arrays, and hangs with a collective
    over several CPU devices and large arrays.
    """
    from triax.interpreting.run import run  # here: it imports triton

    def callback(*arrays: Any) -> tuple[np.ndarray, ...]:
        try:
            return run(launch, [np.asarray(array) for array in arrays], call.checked)
        except Exception as error:
            frames.raise_as_text(error)

    results: Sequence[Any]
    results, _, _ = mlir.emit_python_callback(
        ctx,
        callback,
        None,
        operands,
        ctx.avals_in,
        ctx.avals_out,
        has_side_effect=call.has_side_effect,
    )
    return results
