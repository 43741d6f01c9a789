"""`glu`: checks its arguments and calls the op."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from triax.errors import ArgumentValueError
from triax.moe.activations import ops
from triax.moe.activations.options import check_two, remedy_by_gate, resolve
from triax.moe.activations.reference import Activation
from triax.moe.shared import arguments
from triax.moe.shared import implementation as implementations
from triax.moe.shared.arguments import Array
from triax.moe.shared.implementation import Implementation


def glu(
    gate_up: Array | tuple[Array, Array],
    row_weights: Array | None = None,
    *,
    activation: Activation = "swiglu",
    interleaved: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Applies an activation, and multiplies each row by its router weight.

        rows = moe.permute(x, plan, weights=routed.weights)
        gate_up = moe.ragged_dot(rows.rows, w_gate_up, plan.group_sizes)
        hidden = moe.glu(gate_up, rows.weights)
        y = moe.unpermute(moe.ragged_dot(hidden, w_down, plan.group_sizes), plan)

    ``out[r] = row_weights[r] * curve(gate[r]) * up[r]``, in float32, rounded once; without a gate
    ``out[r] = row_weights[r] * curve(gate_up[r])``.

    Experts' outputs are linear in this result, so the weights can be applied here instead of in
    `unpermute`. Then the experts' outputs, which are wider, need not be kept as residuals, and the
    gradient of `unpermute` need not read them.

    Under `jax.checkpoint` the result carries the name "triax_glu".

    Args:
      gate_up: [rows, 2 * width], floats of 16 bits or more, with the gate's columns first; or two
        arrays [rows, width], gate and up, as a tuple. [rows, width] for activations without a gate.
      row_weights: float [rows], or None for ones.
      activation: gated: "swiglu" (SiLU), "geglu" (GELU in its tanh form), "geglu_exact" (Shazeer,
        https://arxiv.org/abs/2002.05202), or a `Swiglu`; not gated: "silu", "gelu" (tanh),
        "gelu_exact", "relu2" (max(x, 0) squared; below zero the gradient is 0, even where the
        result's is NaN); or a JAX function of float32 arrays, gate and up if it takes two
        arguments, which XLA compiles on every platform. As under `jax.vmap`, it gets each row by
        itself, [1, width], and returns [1, width]: no row depends on others, and random numbers
        that it draws are the same in every row. The backward pass computes it again. A row of
        weight 0 has no derivative by gate and up, and no second one by the weight.
      interleaved: whether gate and up are the even and the odd columns of `gate_up`.
      implementation: None picks by the program's platform: Triton kernels on CUDA, plain JAX
        elsewhere. "triton", "interpret" (the kernels, interpreted on the CPU) and "xla" insist.

    Returns:
      [rows, width], in the dtype of `gate_up`.

    Raises:
      ArgumentTypeError: an argument is not an array, or of the wrong dtype; `activation` is neither
        a name nor a function.
      ArgumentValueError: an argument has the wrong shape, or `activation` or `implementation` is
        unknown.
    """
    resolved, up = resolve(activation, interleaved), None
    spec = resolved.spec
    if isinstance(gate_up, tuple):
        check_two("gate_up", gate_up, spec)
        gate_up, up = (_floats(half, "width") for half in gate_up)
        if gate_up.shape != up.shape or gate_up.dtype != up.dtype:
            raise ArgumentValueError(
                "Argument `gate_up` must be two arrays of one shape and dtype; got "
                f"{gate_up.dtype}{list(gate_up.shape)} and {up.dtype}{list(up.shape)}."
            )
    else:
        gate_up = _floats(gate_up, "2 * width" if spec.gated else "width")
        if spec.gated and gate_up.shape[1] % 2:
            raise ArgumentValueError(
                "Argument `gate_up` must have an even number of columns, half of them the gate's; "
                f"got shape {gate_up.shape}.{remedy_by_gate(spec)}"
            )
    if row_weights is not None:
        of_rows: dict[str, Any] = {"sizes": {"rows": gate_up.shape[0]}, "of": "`gate_up`"}
        row_weights = arguments.array(
            "row_weights", row_weights, ("rows",), jnp.floating, wide="Cast it.", **of_rows
        )
    floats: dict[str, Any] = {"gate_up": gate_up, "row_weights": row_weights}
    implementations.check(implementation, floats=True, **floats)
    return ops.activate(gate_up, up, row_weights, resolved, implementation=implementation)


def _floats(gate_up: Any, columns: str) -> jax.Array:
    remedy = "Make `ragged_dot` return one with `preferred_element_type`."
    return arguments.array("gate_up", gate_up, ("rows", columns), jnp.floating, wide=remedy)
