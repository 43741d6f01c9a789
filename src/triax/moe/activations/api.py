"""`glu`: checks its arguments and calls the op."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from triax.errors import ArgumentValueError
from triax.moe.activations import ops
from triax.moe.activations.reference import ACTIVATIONS, Activation
from triax.moe.shared import arguments
from triax.moe.shared import implementation as implementations
from triax.moe.shared.implementation import Implementation


def glu(
    gate_up: Any,
    row_weights: Any = None,
    *,
    activation: Activation = "swiglu",
    implementation: Implementation | None = None,
) -> jax.Array:
    """Applies a gated activation, and multiplies each row by its router weight.

        rows = moe.permute(x, plan, weights=routed.weights)
        gate_up = moe.ragged_dot(rows.rows, w_gate_up, plan.group_sizes)
        hidden = moe.glu(gate_up, rows.weights)
        y = moe.unpermute(moe.ragged_dot(hidden, w_down, plan.group_sizes), plan)

    ``out[r] = row_weights[r] * activation(gate_up[r, :width]) * gate_up[r, width:]``, in float32,
    rounded once.

    Experts' outputs are linear in this result, so the weights can be applied here instead of in
    `unpermute`. Then the experts' outputs, which are wider, need not be kept as residuals, and the
    gradient of `unpermute` need not read them.

    Under `jax.checkpoint` the result carries the name "triax_glu".

    Args:
      gate_up: [rows, 2 * width], floats of 16 bits or more, with the gate's columns first.
      row_weights: float [rows], or None for ones.
      activation: "swiglu" (SiLU), or "geglu" (GELU in its tanh form); Shazeer,
        https://arxiv.org/abs/2002.05202.
      implementation: None picks by the program's platform: Triton kernels on CUDA, plain JAX
        elsewhere. "triton", "interpret" (the kernels, interpreted on the CPU) and "xla" insist.

    Returns:
      [rows, width], in the dtype of `gate_up`.

    Raises:
      ArgumentTypeError: an argument is not an array, or of the wrong dtype.
      ArgumentValueError: an argument has the wrong shape, or `activation` or `implementation` is
        unknown.
    """
    gate_up = arguments.array("gate_up", gate_up, ("rows", "2 * width"), jnp.floating)
    remedy = "Make `ragged_dot` return one with `preferred_element_type`."
    arguments.check_wide("gate_up", gate_up, remedy)
    if gate_up.shape[1] % 2:
        raise ArgumentValueError(
            "Argument `gate_up` must have an even number of columns, half of them the gate's; got "
            f"shape {gate_up.shape}."
        )
    if row_weights is not None:
        row_weights = arguments.array("row_weights", row_weights, ("rows",), jnp.floating)
        arguments.check_wide("row_weights", row_weights, "Cast it.")
        of = "rows of `gate_up`"
        arguments.check_length("row_weights", row_weights, gate_up.shape[0], "weight", of)
    remedy = " Write another in JAX, which fuses it."
    arguments.check_choice("activation", activation, ACTIVATIONS, remedy)
    implementation = implementations.resolve_for_floats(
        implementation, gate_up=gate_up, row_weights=row_weights
    )
    if not gate_up.size:
        implementation = "xla"
    out = ops.glu(gate_up, row_weights, activation=activation, implementation=implementation)
    return checkpoint_name(out, "triax_glu")
