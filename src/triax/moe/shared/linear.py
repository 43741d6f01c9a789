"""Ops with custom derivatives that JAX can run forward, transpose, and differentiate again.

A kernel has no derivative. `jax.custom_vjp` would only give it a backward one; `jax.custom_jvp` is
lost where JAX splits a loop into forward and backward parts and these are differentiated again; and
`jax.custom_derivatives.linear_call` has no `vmap`. So there are two primitives. `op` runs a
function and knows the rule for its tangents. Such a rule uses `call`: a function that is linear in
some arguments, with its transpose. Forward mode runs it, reverse mode transposes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from triax.compat import jax_private

Function = Callable[..., Any]
Rules = tuple[Function, Function]
"""What `op` and `replaced` take. They should be the same two functions in every call of an op with
the same options (`functools.cache`): JAX keeps what it traced and compiled by function, and outside
`jit` would compile every call anew."""


def op(function: Function, derivative: Function, *arguments: Any) -> Any:
    """Returns ``function(*arguments)``, with a custom derivative.

    Args:
      function: of pytrees of arrays.
      derivative: ``derivative(arguments, tangents, results)`` returns the results' tangents.
        Tangents have the structure of the arguments or results, with None for those that are zero.
    """

    def rule(arguments: Any, tangents: Any) -> tuple[Any, Any]:
        results = op(function, derivative, *arguments)
        return results, derivative(arguments, tangents, results)

    return _bind(function, rule, *arguments)


def replaced(function: Function, differentiable: Function, *arguments: Any) -> Any:
    """Returns ``function(*arguments)``; where it is differentiated, ``differentiable(*arguments)``.

    For a function whose derivative needs more than it returns.
    """

    def rule(arguments: Any, tangents: Any) -> tuple[Any, Any]:
        primals, tree = _flatten(arguments)
        given = tree.flatten_up_to(tangents)
        moving = [i for i, tangent in enumerate(given) if tangent is not None]

        def at(*moved: Any) -> Any:
            leaves = list(primals)
            for index, value in zip(moving, moved, strict=True):
                leaves[index] = value
            return differentiable(*tree.unflatten(leaves))

        return jax.jvp(at, [primals[i] for i in moving], [given[i] for i in moving])

    return _bind(function, rule, *arguments)


def _bind(function: Function, rule: Function, *arguments: Any) -> Any:
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    leaves, tree = _flatten(arguments)
    _, out_tree = _flatten(shapes)

    def flat_rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        results, moved = rule(tree.unflatten(primals), tree.unflatten(tangents))
        return out_tree.flatten_up_to(results), out_tree.flatten_up_to(moved)

    # As a function, so that JAX does not treat its jaxpr as a part of the program.
    outputs = _op_p.bind(
        *leaves,
        function=jaxpr_as_fun(jaxpr),
        rule=flat_rule,
        types=tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in jaxpr.out_avals),
    )
    return out_tree.unflatten(outputs)


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
      transpose: ``transpose(residuals, cotangents)``, with cotangents like `like`, returns those of
        `tangents`, by the same names; those of tangents that are zero are ignored.
      residuals: a pytree of arrays.
      tangents: None for those that are zero; there must be others.
      like: a pytree of arrays or their shapes and dtypes.
    """
    moving = {name: tangent for name, tangent in tangents.items() if tangent is not None}
    saved, saved_tree = _flatten(residuals)
    shapes, out_tree = _flatten(like)

    def flat_function(*flat: Any) -> list[Any]:
        known = saved_tree.unflatten(flat[: len(saved)])
        named = dict(zip(moving, flat[len(saved) :], strict=True))
        return jax.tree.leaves(function(known, named))

    def flat_transpose(*flat: Any) -> list[Any]:
        known = saved_tree.unflatten(flat[: len(saved)])
        cotangents = transpose(known, out_tree.unflatten(flat[len(saved) :]))
        return [cotangents[name] for name in moving]

    outputs = _linear_p.bind(
        *saved,
        *moving.values(),
        function=flat_function,
        transpose=flat_transpose,
        num_residuals=len(saved),
        types=tuple(jax.ShapeDtypeStruct(shape.shape, shape.dtype) for shape in shapes),
    )
    return out_tree.unflatten(outputs)


def call_each(
    function: Callable[[Any, dict[str, Any]], dict[str, Any]],
    transpose: Callable[[Any, dict[str, Any]], dict[str, Any]],
    residuals: Any,
    tangents: Any,
    like: Any,
) -> Any:
    """`call` for a function that maps each of its arguments to the output of the same name.

    `tangents`, `like` and the result are named tuples of one type. The function returns a tangent
    for each one that it gets, and its transpose a cotangent.
    """
    named = tangents._asdict()
    moving = {name: getattr(like, name) for name in named if named[name] is not None}
    return tangents._replace(**call(function, transpose, residuals, named, moving))


# --- an op -----------------------------------------------------------------------------------

_op_p = Primitive("triax_op")
_op_p.multiple_results = True


def _run_op(*args: Any, function: Function, **_: Any) -> list[Any]:
    return function(*args)


_op_p.def_impl(_run_op)
mlir.register_lowering(_op_p, mlir.lower_fun(_run_op, multiple_results=True))


@_op_p.def_abstract_eval
def _op_abstract_eval(*avals: Any, types: Sequence[Any], **_: Any) -> list[Any]:
    return _results(avals, types)


def _op_jvp(primals: Any, tangents: Any, *, rule: Function, **_: Any) -> Any:
    known = tuple(None if isinstance(tangent, ad.Zero) else tangent for tangent in tangents)
    outputs, results = rule(tuple(primals), known)
    tangents = []
    for output, result in zip(outputs, results, strict=True):
        aval = jax.typeof(output).to_tangent_aval()
        # A result that is rounded to integers has none, whatever its operands have.
        without = result is None or aval.dtype == jax.dtypes.float0
        tangents.append(ad.Zero(aval) if without else result)
    return outputs, tangents


def _op_batch(
    args: Any, axes: Any, *, function: Function, rule: Function, types: Sequence[Any]
) -> Any:
    axes = tuple(axes)
    size = _batch_size(args, axes)
    outputs = _op_p.bind(
        *args,
        function=jax.vmap(function, axes),
        rule=jax.vmap(rule, (axes, axes)),
        types=tuple(jax.ShapeDtypeStruct((size, *a.shape), a.dtype) for a in types),
    )
    return outputs, [0] * len(outputs)


ad.primitive_jvps[_op_p] = _op_jvp
batching.primitive_batchers[_op_p] = _op_batch


# --- a linear function -----------------------------------------------------------------------

_linear_p = Primitive("triax_linear")
_linear_p.multiple_results = True


def _run_linear(*args: Any, function: Function, **_: Any) -> list[Any]:
    return function(*args)


_linear_p.def_impl(_run_linear)
mlir.register_lowering(_linear_p, mlir.lower_fun(_run_linear, multiple_results=True))


@_linear_p.def_abstract_eval
def _linear_abstract_eval(*avals: Any, types: Sequence[Any], **_: Any) -> list[Any]:
    return _results(avals, types)


def _linear_jvp(primals: Any, tangents: Any, *, function: Function, **_: Any) -> Any:
    moving = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def at(*moved: Any) -> list[Any]:
        args = list(primals)
        for index, value in zip(moving, moved, strict=True):
            args[index] = value
        return function(*args)

    return jax.jvp(at, [primals[i] for i in moving], [tangents[i] for i in moving])


def _linear_transpose(
    cotangents: Any, *args: Any, transpose: Function, num_residuals: int, **_: Any
) -> list[Any]:
    known = args[:num_residuals]
    return [None] * num_residuals + transpose(*known, *map(ad.instantiate_zeros, cotangents))


def _linear_batch(
    args: Any,
    axes: Any,
    *,
    function: Function,
    transpose: Function,
    num_residuals: int,
    types: Sequence[Any],
) -> Any:
    size = _batch_size(args, axes)
    # Put the batch in front of all tangents, so that all cotangents have it there. JAX transposes
    # that too: a tangent without a batch gets the sum over it.
    tangents = [
        jnp.broadcast_to(arg, (size, *arg.shape)) if axis is None else jnp.moveaxis(arg, axis, 0)
        for arg, axis in zip(args[num_residuals:], axes[num_residuals:], strict=True)
    ]
    known = tuple(axes[:num_residuals])
    outputs = _linear_p.bind(
        *args[:num_residuals],
        *tangents,
        function=jax.vmap(function, (*known, *(0 for _ in tangents))),
        transpose=jax.vmap(transpose, (*known, *(0 for _ in types))),
        num_residuals=num_residuals,
        types=tuple(jax.ShapeDtypeStruct((size, *a.shape), a.dtype) for a in types),
    )
    return outputs, [0] * len(outputs)


ad.primitive_jvps[_linear_p] = _linear_jvp
ad.primitive_transposes[_linear_p] = _linear_transpose
batching.primitive_batchers[_linear_p] = _linear_batch


def _batch_size(args: Any, axes: Any) -> int:
    return next(arg.shape[axis] for arg, axis in zip(args, axes, strict=True) if axis is not None)


def _flatten(tree: Any) -> tuple[list[Any], Any]:
    return jax.tree.flatten(tree)


def _results(avals: Sequence[Any], types: Sequence[Any]) -> list[Any]:
    return [jax_private.result_aval("triax_op", avals, a.shape, a.dtype) for a in types]
