"""Runs activations that are JAX functions, in plain JAX on every platform."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from triax import messages
from triax.errors import ArgumentValueError
from triax.moe.activations.options import ResolvedActivation
from triax.moe.activations.reference import GluSpec, halves
from triax.moe.shared.arrays import at_least_float32
from triax.moe.shared.order import after
from triax.sharding import explicit, rules


def apply(
    function: Callable[..., Any],
    spec: GluSpec,
    gate_up: jax.Array,
    up: jax.Array | None,
    row_weights: jax.Array | None,
) -> jax.Array:
    """Computes `glu` with a function of gate and up, or of one array, in float32.

    The function gets each row by itself, [1, width], so that no result depends on other rows. Later
    steps keep this shape, because XLA then fuses them more easily.
    """
    both = spec.gated and up is None
    dims = "r_" if both else "rw", "rw", "r"
    resharded = explicit.shard_alike("rw", dims, (gate_up, up, row_weights))
    alone = jax.tree.map(lambda array: array[:, None], tuple(resharded))
    out: jax.Array = jax.vmap(functools.partial(_of_one_row, function, spec))(*alone)
    return out[:, 0]


def _of_one_row(
    function: Callable[..., Any],
    spec: GluSpec,
    gate_up: jax.Array,
    up: jax.Array | None,
    row_weights: jax.Array | None,
) -> jax.Array:
    wider = at_least_float32(gate_up.dtype)
    parts = [part.astype(wider) for part in halves(gate_up, up, spec)]
    if row_weights is None:
        return _checked(function, parts).astype(gate_up.dtype)
    # Rows with a zero weight have no gradient, even if the function's slope there is not finite.
    # Pad rows are zeros, and stay zeros: a NaN in one would reach the weights of its group.
    weighted = (row_weights != 0)[:, None]
    some = functools.reduce(jnp.logical_or, (part != 0 for part in parts))
    out = _checked(function, [_active(part, weighted, np.True_) for part in parts])
    out = _active(out, weighted, weighted | some | jnp.isfinite(out))
    return (out * row_weights.astype(wider)[:, None]).astype(gate_up.dtype)


def gradients(
    function: Callable[..., Any],
    spec: GluSpec,
    gate_up: jax.Array,
    up: jax.Array | None,
    row_weights: jax.Array | None,
    gradient: jax.Array,
) -> tuple[dict[str, Any], jax.Array]:
    """Returns the gradients of the operands of `apply`, by name, and its result."""
    # `after` makes XLA compute all of them in one pass: the result alone could come earlier.
    arguments = {"gate_up": after(gate_up, gradient), "up": up, "row_weights": row_weights}
    if up is not None:
        arguments["up"] = after(up, gradient)
    out, pull = jax.vjp(lambda arguments: apply(function, spec, **arguments), arguments)
    return pull(explicit.cast(gradient, explicit.type_of(out)))[0], out


def closes_over_arrays(
    activation: ResolvedActivation, gate_up: jax.Array, up: jax.Array | None
) -> bool:
    """Whether an activation uses JAX arrays, traced or not, that are not its arguments.

    Functions that it calls, such as one of `jax.jit`, may hold them.
    """
    function, spec = activation.function, activation.spec
    if function is None:
        return False
    run = lambda gate_up, up: apply(function, spec, gate_up, up, None)
    traced = jax.make_jaxpr(run)(gate_up, up)
    return any(isinstance(array, jax.Array) for array in rules.constants(traced))


def _checked(function: Callable[..., Any], row: Sequence[jax.Array]) -> jax.Array:
    shape = row[0].shape
    try:
        out = function(*row)
    except Exception as error:
        error.add_note(f"(Triax calls `activation` with one row at a time, of shape {shape}.)")
        raise
    is_real = hasattr(out, "dtype") and jnp.issubdtype(out.dtype, jnp.floating)
    if getattr(out, "shape", None) != shape or not is_real:
        raise ArgumentValueError(
            "Argument `activation` must return floats of the shape of its arguments, one row "
            f"{shape}; got {messages.shown(out)}."
        )
    checked: jax.Array = out
    return checked


@jax.custom_jvp
def _active(x: jax.Array, active: Any, kept: Any) -> jax.Array:
    """Returns `x` where `kept`, else zero, with a derivative only where `active`."""
    return jnp.where(kept, x, 0)


@_active.defjvp
def _active_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _active(*primals), jnp.where(primals[1], tangents[0], 0)
