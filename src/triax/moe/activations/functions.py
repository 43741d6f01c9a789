"""Activations that are JAX functions: plain JAX on every platform, which XLA compiles."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from triax import messages
from triax.errors import ArgumentValueError
from triax.moe.activations import rows
from triax.moe.activations.reference import GluSpec, halves
from triax.moe.shared.arrays import at_least_float32
from triax.moe.shared.order import after


def apply(
    function: Callable[..., Any],
    spec: GluSpec,
    gate_up: jax.Array,
    up: jax.Array | None,
    row_weights: jax.Array | None,
) -> jax.Array:
    """`glu` by a function of gate and up, or of one array, in float32."""
    wider = at_least_float32(gate_up.dtype)
    parts = [part.astype(wider) for part in halves(gate_up, up, spec)]
    if row_weights is None:
        return _checked(function(*parts), parts).astype(gate_up.dtype)
    # Rows without a weight have no gradient, be the function's slope at them finite or not.
    # Pad rows, which are zeros, stay so: their NaN would reach the weights of their group.
    weighted = (row_weights != 0)[:, None]
    some = functools.reduce(jnp.logical_or, (part != 0 for part in parts))
    out = _checked(function(*(_moving(part, weighted, np.True_) for part in parts)), parts)
    out = _moving(out, weighted, weighted | some | jnp.isfinite(out))
    return (out * row_weights.astype(wider)[:, None]).astype(gate_up.dtype)


def gradients(
    function: Callable[..., Any],
    spec: GluSpec,
    gate_up: jax.Array,
    up: jax.Array | None,
    row_weights: jax.Array | None,
    gradient: jax.Array,
) -> tuple[dict[str, Any], jax.Array]:
    """Of `apply` the operands' gradients, by name; and its result."""
    # So that XLA makes all of them in one pass: the result alone could be made before.
    given = {"gate_up": after(gate_up, gradient), "up": up, "row_weights": row_weights}
    if up is not None:
        given["up"] = after(up, gradient)
    out, pull = jax.vjp(lambda given: apply(function, spec, **given), given)
    return pull(gradient)[0], out


def closes_over_traced(
    function: Callable[..., Any], spec: GluSpec, gate_up: jax.Array, up: jax.Array | None
) -> bool:
    """Whether the function uses arrays of the program that are not its arguments.

    Raises:
      ArgumentValueError: it does not compute each row by itself.
    """
    given = (gate_up,) if up is None else (gate_up, up)
    make = jax.make_jaxpr(lambda gate_up, up=None: apply(function, spec, gate_up, up, None))
    traced = make(*given)
    how, cause = "", None
    if gate_up.shape[0]:
        of_more, times = rows.more_rows(given, traced)
        try:
            traced_more = make(*of_more)
        except Exception as error:
            how, cause = f"fails for other numbers of rows ({type(error).__name__})", error
        else:
            if (step := rows.mixed_by(traced_more.jaxpr, times)) is not None:
                how = f"mixes or numbers them, by {step!r} over the rows"
            elif rows.differ(traced, traced_more):
                how = "depends on their number"
    if how:
        raise ArgumentValueError(
            "Argument `activation` must compute each row by itself: the layer's rows are those of "
            f"all experts, in an order of its own. {messages.short(function)} {how}."
        ) from cause
    return any(isinstance(array, jax.core.Tracer) for array in traced.consts)


def _checked(out: Any, parts: Sequence[Any]) -> jax.Array:
    is_real = hasattr(out, "dtype") and jnp.issubdtype(out.dtype, jnp.floating)
    if getattr(out, "shape", None) != parts[0].shape or not is_real:
        raise ArgumentValueError(
            "Argument `activation` must return floats of the shape of its arguments, "
            f"{parts[0].shape}; got {messages.shown(out)}."
        )
    found: jax.Array = out
    return found


@jax.custom_jvp
def _moving(x: jax.Array, moving: Any, kept: Any) -> jax.Array:
    """`x` where it is `kept`, else zero; only where `moving` it has a derivative."""
    return jnp.where(kept, x, 0)


@_moving.defjvp
def _moving_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _moving(*primals), jnp.where(primals[1], tangents[0], 0)
