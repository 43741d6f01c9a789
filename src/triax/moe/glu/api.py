"""`glu`: checks its arguments and calls the op."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from triax.compat import jax_private
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe.glu import derivatives
from triax.moe.glu.reference import ACTIVATIONS, Activation
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
      implementation: None picks by the platform the program is lowered for: the Triton
        kernels on CUDA, plain JAX elsewhere. "triton", "interpret" (the kernels in
        Triton's interpreter, on the CPU) and "xla" insist.

    Returns:
      [rows, width], in the dtype of `gate_up`.

    Raises:
      ArgumentTypeError: an argument is not an array, or of the wrong dtype.
      ArgumentValueError: an argument has the wrong shape, or `activation` or `implementation` is
        unknown.
    """
    gate_up = arguments.array("gate_up", gate_up, ("rows", "2 * width"), jnp.floating)
    if gate_up.dtype.itemsize == 1:
        raise ArgumentTypeError(
            f"Argument `gate_up` must be a float of 16 bits or more; got {gate_up.dtype}. Make "
            "`ragged_dot` return one with `preferred_element_type`."
        )
    if gate_up.shape[1] % 2:
        raise ArgumentValueError(
            "Argument `gate_up` must have an even number of columns, half of them the gate's; got "
            f"shape {gate_up.shape}."
        )
    num_rows = gate_up.shape[0]
    if row_weights is not None:
        row_weights = arguments.array("row_weights", row_weights, ("rows",), jnp.floating)
        if row_weights.dtype.itemsize == 1:
            raise ArgumentTypeError(
                "Argument `row_weights` must be a float of 16 bits or more; got "
                f"{row_weights.dtype}. Cast it."
            )
        if row_weights.shape[0] != num_rows:
            raise ArgumentValueError(
                f"Argument `row_weights` must have one weight for each of the {num_rows} rows of "
                f"`gate_up`; got shape {row_weights.shape}."
            )
    if activation not in ACTIVATIONS:
        raise ArgumentValueError(
            f"Argument `activation` must be one of {', '.join(map(repr, ACTIVATIONS))}; got "
            f"{activation!r}. Write another in JAX, which fuses it."
        )
    implementation = implementations.choose_for_floats(
        implementation, gate_up=gate_up, row_weights=row_weights
    )
    if not gate_up.size:
        implementation = "xla"
    # Inside shard_map, what the platforms' code returns must vary over the same mesh axes.
    present = [gate_up] if row_weights is None else [gate_up, row_weights]
    gate_up, *weights = jax_private.insert_varying_casts(present)
    out = derivatives.glu(gate_up, weights[0] if weights else None, activation, implementation)
    return checkpoint_name(out, "triax_glu")
