"""Primitives that run a function: one step of a program, with whatever rules are added to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import mlir

from triax.compat import jax_private

Function = Callable[..., Any]


def primitive(
    name: str, lowered: Callable[[Any, Any], Function] = lambda _, call: call.function
) -> Primitive:
    """A primitive that runs ``call.function``, which returns arrays of ``call.types``.

    ``lowered(ctx, call)`` is what a program has of it.
    """
    new = Primitive(name)
    new.multiple_results = True

    def abstract_eval(*avals: Any, call: Any) -> list[Any]:
        kinds = call.types
        return [jax_private.result_aval(name, avals, a.shape, a.dtype, a.sharding) for a in kinds]

    def lower(ctx: Any, *operands: Any, call: Any) -> Sequence[Any]:
        return mlir.lower_fun(lowered(ctx, call), multiple_results=True)(ctx, *operands)

    new.def_impl(lambda *args, call: call.function(*args))
    new.def_abstract_eval(abstract_eval)
    mlir.register_lowering(new, lower)
    return new
