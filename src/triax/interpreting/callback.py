"""An interpreted launch in a program: a host callback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from triax.binding.launch import Call, Launch
from triax.compat import jax_private
from triax.interpreting import frames


def emit_callback(ctx: Any, operands: Sequence[Any], call: Call, launch: Launch) -> Sequence[Any]:
    """Emits a host callback that interprets `launch`."""
    from triax.interpreting.run import run  # here: it imports triton

    def callback(*arrays: Any) -> tuple[np.ndarray, ...]:
        try:
            return run(launch, [np.asarray(array) for array in arrays], call.checked)
        except Exception as error:
            frames.raise_as_text(error)

    return jax_private.emit_callback(
        ctx,
        callback,
        operands,
        ctx.avals_in,
        ctx.avals_out,
        has_side_effect=call.has_side_effect,
    )
