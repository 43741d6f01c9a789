"""Checks an activation, the option of `glu` and of `Experts`, and says what kernels make of it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from triax import messages
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe.activations.reference import SPECS, GluSpec, Swiglu
from triax.moe.shared import arguments


class ResolvedActivation(NamedTuple):
    """A checked activation.

    `spec` is what kernels compute. `function` is the activation if it is a JAX function, for which
    there is no kernel.
    """

    spec: GluSpec
    function: Callable[..., Any] | None


def resolve(activation: Any, interleaved: bool = False) -> ResolvedActivation:
    """Returns an activation, checked."""
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
    return ResolvedActivation(dataclasses.replace(spec, interleaved=bool(interleaved)), function)


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
