"""Functions that are linear in some arguments, with their transposes, for the derivatives of ops.

A kernel has no derivative. `jax.custom_vjp` would only add reverse mode; `jax.custom_jvp` is lost
where JAX splits a loop into forward and backward parts and differentiates these again; and
`jax.custom_derivatives.linear_call` has no `vmap`. So `call` binds a primitive: forward mode runs
its function, reverse mode its transpose.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching

from triax.compat import jax_private
from triax.sharding import explicit
from triax.sharding.primitives import primitive

Function = Callable[..., Any]


def call(
    function: Callable[[Any, dict[str, Any]], Any],
    transpose: Callable[[Any, Any], dict[str, Any]],
    residuals: Any,
    tangents: dict[str, Any],
    like: Any,
) -> Any:
    """Returns ``function(residuals, tangents)``, which is linear in `tangents`.

    Args:
      function: takes the tangents that are not zero, and returns arrays like `like`.
      transpose: ``transpose(residuals, cotangents)`` maps cotangents like `like` to cotangents of
        `tangents`, by name; cotangents of zero tangents are ignored.
      residuals: a pytree of arrays.
      tangents: tangents by name, None if zero; at least one must not be zero.
      like: the results as a pytree of arrays, or of their shapes and dtypes.

    Raises:
      TypeError: one of the functions closes over an array, or returns other shapes or dtypes.
    """
    _check_closes_over_no_array(function)
    _check_closes_over_no_array(transpose)
    active = {name: tangent for name, tangent in tangents.items() if tangent is not None}
    saved, saved_tree = jax.tree.flatten(residuals)
    out_tree, types = jax.tree.structure(like), tuple(map(explicit.type_of, jax.tree.leaves(like)))
    active_types = tuple(map(explicit.type_of, active.values()))
    count, names = len(saved), tuple(active)

    # These become a parameter of the primitive, so they must hold no arrays: see the check above.
    def flat_function(*flat: Any) -> list[Any]:
        known = jax.tree.unflatten(saved_tree, flat[:count])
        named = dict(zip(names, flat[count:], strict=True))
        return _as_declared(function, jax.tree.leaves(function(known, named)), types)

    def flat_transpose(*flat: Any) -> list[Any]:
        known = jax.tree.unflatten(saved_tree, flat[:count])
        cotangents = transpose(known, jax.tree.unflatten(out_tree, flat[count:]))
        return _as_declared(transpose, [cotangents[name] for name in names], active_types)

    linear = _BoundLinear(_name(function), flat_function, flat_transpose, count, types)
    jax_private.require_devices(_linear_p)
    return jax.tree.unflatten(out_tree, _linear_p.bind(*saved, *active.values(), call=linear))


def _check_closes_over_no_array(function: Function) -> None:
    """Raises if a function holds an array: JAX's caches keep a primitive's parameters, thousands
    of them, with all that they hold."""
    for leaf in jax.tree.leaves(_held(function)):
        if isinstance(leaf, jax.Array):
            raise TypeError(
                f"{_name(function)} closes over {jax.typeof(leaf)}; it must take arrays "
                "from `residuals`, or JAX's caches keep them."
            )


def _held(function: Any) -> list[Any]:
    """Returns what a function holds: closed over, as defaults, bound, or given to `partial`."""
    if isinstance(function, functools.partial):
        return [function.args, function.keywords, _held(function.func)]
    of = getattr(function, "__func__", function)  # that of a bound method
    held = [getattr(function, "__self__", None)]
    held += [getattr(of, name, None) for name in ("__defaults__", "__kwdefaults__")]
    for cell in getattr(of, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # the variable has no value yet
            held.append(cell.cell_contents)
    return held


def _name(function: Any) -> str:
    of = function.func if isinstance(function, functools.partial) else function
    return str(getattr(of, "__qualname__", of))


def _as_declared(function: Function, arrays: list[Any], types: Sequence[Any]) -> list[Any]:
    """Reshards the arrays that a function returned as `types` say; checks shapes and dtypes."""
    for array, type_ in zip(arrays, types, strict=True):
        if (array.shape, array.dtype) != (type_.shape, type_.dtype):
            raise TypeError(
                f"{_name(function)} returned {array.dtype}{list(array.shape)} instead of "
                f"{type_.dtype}{list(type_.shape)}"
            )
    return list(map(explicit.cast, arrays, types))


def call_each(
    function: Callable[[Any, dict[str, Any]], dict[str, Any]],
    transpose: Callable[[Any, dict[str, Any]], dict[str, Any]],
    residuals: Any,
    tangents: Any,
    like: Any,
) -> Any:
    """Does the same as `call` for a function that maps each tangent to a result of the same name.

    `tangents`, `like` and the result are named tuples of one type. `function` returns a tangent for
    each tangent that it gets, and `transpose` a cotangent for each cotangent.
    """
    named = tangents._asdict()
    active = {name: getattr(like, name) for name in named if named[name] is not None}
    return tangents._replace(**call(function, transpose, residuals, named, active))


def jvp(function: Function, primals: Any, tangents: Any) -> Any:
    """Runs `jax.jvp` with respect to the arguments that have a tangent."""
    active = [i for i, tangent in enumerate(tangents) if jax.tree.leaves(tangent)]
    at, values = in_active(function, primals, active)
    return jax.jvp(at, values, [tangents[i] for i in active])


def in_active(
    function: Function, primals: Any, active: Sequence[int]
) -> tuple[Function, list[Any]]:
    """Returns `function` as a function of its `active` arguments alone, and their values."""

    def at(*moved: Any) -> Any:
        args = list(primals)
        for index, value in zip(active, moved, strict=True):
            args[index] = value
        return function(*args)

    return at, [primals[i] for i in active]


def not_zero(tangents: Any) -> tuple[Any, ...]:
    """Replaces JAX's symbolic zeros by None."""
    return tuple(None if isinstance(tangent, ad.Zero) else tangent for tangent in tangents)


def batch_size(args: Any, axes: Any) -> int:
    return next(arg.shape[axis] for arg, axis in zip(args, axes, strict=True) if axis is not None)


@dataclasses.dataclass(frozen=True, eq=False)
class _BoundLinear:
    """Parameter of `_linear_p`: flat functions of `num_residuals` residuals, then tangents."""

    name: str
    function: Function
    transpose: Function
    num_residuals: int
    types: tuple[jax.ShapeDtypeStruct, ...]

    def __repr__(self) -> str:
        return self.name


_linear_p = primitive("triax_linear")


def _jvp(primals: Any, tangents: Any, *, call: _BoundLinear) -> Any:
    count = call.num_residuals
    if any(tangent is not None for tangent in not_zero(tangents[:count])):
        return jvp(call.function, primals, not_zero(tangents))
    moved = map(ad.instantiate_zeros, tangents[count:])
    return tuple(
        _linear_p.bind(*primals[:count], *of, call=call) for of in (primals[count:], moved)
    )


def _transpose(cotangents: Any, *args: Any, call: _BoundLinear) -> list[Any]:
    known = args[: call.num_residuals]
    cotangents = call.transpose(*known, *map(ad.instantiate_zeros, cotangents))
    return [None] * call.num_residuals + cotangents


def _batch(args: Any, axes: Any, *, call: _BoundLinear) -> Any:
    size, batch = batch_size(args, axes), explicit.explicit_batch(args, axes)
    count = call.num_residuals

    # Put the batch in front of all tangents, so that all cotangents have it there. JAX transposes
    # the broadcast too: a tangent without a batch gets a cotangent summed over the batch.
    def in_front(arg: Any, axis: int | None) -> Any:
        if axis is not None:
            return jnp.moveaxis(arg, axis, 0)
        type_ = explicit.batched_type(explicit.type_of(arg), size, batch)
        return explicit.cast(jnp.broadcast_to(arg, (size, *arg.shape)), type_)

    tangents = list(map(in_front, args[count:], axes[count:]))
    known = tuple(axes[:count])
    batched = dataclasses.replace(
        call,
        function=jax.vmap(call.function, (*known, *(0 for _ in tangents))),
        transpose=jax.vmap(call.transpose, (*known, *(0 for _ in call.types))),
        types=tuple(explicit.batched_type(type_, size, batch) for type_ in call.types),
    )
    outputs = _linear_p.bind(*args[:count], *tangents, call=batched)
    return outputs, [0] * len(outputs)


ad.primitive_jvps[_linear_p] = _jvp
ad.primitive_transposes[_linear_p] = _transpose
batching.primitive_batchers[_linear_p] = _batch
