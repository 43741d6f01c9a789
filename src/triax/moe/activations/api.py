"""`glu`: checks its arguments and calls the op."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from triax import messages
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe.activations import functions, ops
from triax.moe.activations.reference import SPECS, Activation, GluSpec, Swiglu
from triax.moe.quantization.api import quantize
from triax.moe.quantization.scaled import ScaledArray
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
        "gelu_exact", "relu2" (max(x, 0) squared); or a JAX function of float32 arrays, gate and
        up if it takes two arguments, which XLA compiles on every platform. As under `jax.vmap`, it
        gets each row by itself, [1, width], and returns [1, width]: no row depends on others, and
        random numbers that it draws are the same in every row. The backward pass computes it again.
        A row of weight 0 has no derivative by gate and up, and no second one by the weight.
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
    spec, function = resolve(activation, interleaved)
    gate_up, up, row_weights, implementation = _checked(gate_up, row_weights, spec, implementation)
    if function is not None:
        run = jax.checkpoint(functools.partial(functions.apply, function, spec))
        out = run(gate_up, up, row_weights)
    else:
        out = ops.glu(gate_up, up, row_weights, spec=spec, implementation=implementation)
    return checkpoint_name(out, "triax_glu")


def quantized_glu(
    gate_up: Any,
    row_weights: Any,
    dtype: str,
    *,
    activation: Activation,
    interleaved: bool,
    implementation: Any,
) -> ScaledArray:
    """Returns the result of `glu`, quantized with a scale for each row."""
    spec, function = resolve(activation, interleaved)
    gate, up, weights, resolved = _checked(gate_up, row_weights, spec, implementation)
    if function is not None or not gate.size:
        options: dict[str, Any] = {"activation": activation, "interleaved": interleaved}
        out = glu(gate_up, row_weights, **options, implementation=implementation)
        return quantize(out, dtype, block=(1, None), implementation=implementation)
    options = {"spec": spec, "dtype": jnp.dtype(dtype), "implementation": resolved}
    values, scales = ops.quantized_glu(gate, up, weights, **options)
    return ScaledArray(values, scales, (1, None))


def glu_gradients(
    gate_up: Any,
    row_weights: Any,
    gradient: jax.Array,
    *,
    activation: Activation,
    interleaved: bool,
    again: bool,
    implementation: Any,
) -> tuple[dict[str, Any], Any]:
    """Returns the gradients of `glu`'s operands by name, and with `again` the result of `glu`.

    One pass over the operands computes all of them. A function must not close over JAX arrays.
    """
    spec, function = resolve(activation, interleaved)
    gate_up, up, row_weights, implementation = _checked(gate_up, row_weights, spec, implementation)
    if function is not None:
        return functions.gradients(function, spec, gate_up, up, row_weights, gradient)
    call = ops.glu.of(implementation, spec=spec)
    return ops.gradients(call, gate_up, up, row_weights, gradient=gradient, again=again)


def closes_over_arrays(
    activation: Activation, interleaved: bool, gate_up: jax.Array, up: jax.Array | None
) -> bool:
    """Whether an activation is a function that closes over JAX arrays, traced or not."""
    spec, function = resolve(activation, interleaved)
    return function is not None and functions.closes_over_arrays(function, spec, gate_up, up)


def _checked(
    gate_up: Any, row_weights: Any, spec: GluSpec, implementation: Implementation | None
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, Implementation | None]:
    """Returns gate and up, or one array and None; the row weights; and the implementation."""
    up = None
    if isinstance(gate_up, tuple):
        gate_up, up = _two(gate_up, spec)
    else:
        gate_up = _floats("gate_up", gate_up, "2 * width" if spec.gated else "width")
    if spec.gated and up is None and gate_up.shape[1] % 2:
        raise ArgumentValueError(
            "Argument `gate_up` must have an even number of columns, half of them the gate's; got "
            f"shape {gate_up.shape}.{remedy_by_gate(spec)}"
        )
    if row_weights is not None:
        of_rows: dict[str, Any] = {"sizes": {"rows": gate_up.shape[0]}, "of": "`gate_up`"}
        row_weights = arguments.array(
            "row_weights", row_weights, ("rows",), jnp.floating, **of_rows
        )
        arguments.check_wide("row_weights", row_weights, "Cast it.")
    implementation = implementations.resolve_for_floats(
        implementation, gate_up=gate_up, row_weights=row_weights
    )
    return gate_up, up, row_weights, implementation if gate_up.size else "xla"


def resolve(
    activation: Any, interleaved: bool = False
) -> tuple[GluSpec, Callable[..., Any] | None]:
    """Returns the spec of an activation, and the activation itself if it is a JAX function."""
    if isinstance(activation, Swiglu):
        spec = GluSpec("silu", gated=True, **dataclasses.asdict(activation))
    elif activation is Swiglu:
        raise ArgumentTypeError("Argument `activation` is the class Swiglu. Pass one: `Swiglu()`.")
    elif callable(activation):
        spec = GluSpec("", gated=_num_arguments(activation) == 2)
    else:
        remedy = " Or pass a `Swiglu`, or a JAX function of gate and up."
        arguments.check_choice("activation", activation, SPECS, remedy)
        spec = SPECS[activation]
    messages.check_bool(interleaved=interleaved)
    if interleaved and not spec.gated:
        raise ArgumentValueError(
            f"Argument `interleaved` is True, and `activation`, {messages.short(activation)}, has "
            f"no gate. Leave it out.{remedy_by_gate(spec)}"
        )
    function = activation if not spec.curve else None
    return dataclasses.replace(spec, interleaved=bool(interleaved)), function


def _num_arguments(function: Callable[..., Any]) -> int:
    try:
        parameters = [*inspect.signature(function).parameters.values()]
    except ValueError:  # a built-in function
        parameters = []
    positional = [p for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD]
    count = sum(p.default is p.empty for p in positional)
    if count not in (1, 2):
        raise ArgumentTypeError(
            "Argument `activation` must be a function of gate and up, or of one array; got "
            f"{messages.shown(function)} with {count} arguments. Wrap it: `lambda gate, up: …`."
        )
    return count


def remedy_by_gate(spec: GluSpec) -> str:
    """Returns a hint which activation to pass with a gate, or without one."""
    other = _name(dataclasses.replace(spec, gated=not spec.gated))
    if spec.gated:
        remedy = f"`activation={other}`" if other else "a JAX function of one array"
        return f" For experts without a gate, pass {remedy}."
    this = _name(spec)
    remedy = (
        f"`activation={other}`, {this} of the gate times up" if other else "a JAX function of both"
    )
    alone = f" {this} itself is for experts without a gate." if this else ""
    return f" For gate and up, pass {remedy}.{alone}"


def _name(spec: GluSpec) -> str:
    """Returns the name of an activation in quotes, or nothing."""
    plain = dataclasses.replace(spec, interleaved=False)
    return next((repr(name) for name, known in SPECS.items() if known == plain), "")


def check_two(name: str, pair: tuple[Any, ...], spec: GluSpec) -> None:
    """Raises unless `pair` is gate and up, and the activation takes two arrays."""
    if len(pair) == 2 and not spec.gated:
        raise ArgumentValueError(
            f"Argument `activation` must have a gate, because `{name}` is two arrays, gate and up; "
            f"got {_name(spec) or 'a function of one array'}.{remedy_by_gate(spec)}"
        )
    if len(pair) != 2 or spec.interleaved:
        raise ArgumentValueError(
            f"Argument `{name}` must be one array, or two (gate and up) for a gated activation "
            f"without `interleaved`; got {len(pair)}."
            f"{' Leave `interleaved` out.' if len(pair) == 2 else ''}"
        )


def _two(gate_up: Any, spec: GluSpec) -> tuple[jax.Array, jax.Array]:
    check_two("gate_up", gate_up, spec)
    gate, up = (_floats("gate_up", half, "width") for half in gate_up)
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ArgumentValueError(
            "Argument `gate_up` must be two arrays of one shape and dtype; got "
            f"{gate.dtype}{list(gate.shape)} and {up.dtype}{list(up.shape)}."
        )
    return gate, up


def _floats(name: str, value: Any, columns: str) -> jax.Array:
    array = arguments.array(name, value, ("rows", columns), jnp.floating)
    remedy = "Make `ragged_dot` return one with `preferred_element_type`."
    arguments.check_wide(name, array, remedy)
    return array
