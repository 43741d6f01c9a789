"""Makes primitives that run a function as one step of a program; callers add further rules."""

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
    """Returns a primitive that runs ``call.function``, whose results have ``call.types``.

    ``lowered(ctx, call)`` chooses the function that a lowered program runs.
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
