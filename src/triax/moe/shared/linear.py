"""Ops with custom derivatives that JAX can run forward, transpose, and differentiate again.

A kernel has no derivative. `jax.custom_vjp` would only give it a backward one; `jax.custom_jvp` is
lost where JAX splits a loop into forward and backward parts and these are differentiated again; and
`jax.custom_derivatives.linear_call` has no `vmap`. So there are two primitives. `op` runs a
function and knows the rule for its tangents. Such a rule uses `call`: a function that is linear in
some arguments, with its transpose. Forward mode runs it, reverse mode transposes it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from triax.compat import jax_private
from triax.moe.shared import sharding
from triax.moe.shared.sharding import WHOLE, Split

Function = Callable[..., Any]


def op(
    function: Function,
    derivative: Function,
    split: Split = WHOLE,
    implementation: str | None = None,
) -> Function:
    """Returns `function` with a custom derivative.

    Make only one op for the same options (`functools.cache`): JAX keeps what it traced and compiled
    by function, and outside `jit` would compile every call anew.

    Args:
      function: of pytrees of arrays.
      derivative: ``derivative(arguments, tangents, results)`` returns the results' tangents.
        Tangents have the structure of the arguments or results, with None for those that are zero.
      split: how the function is cut over devices; by default only under `jax.vmap`, by batches.
      implementation: of the function. XLA does not cut what is interpreted: a host callback that is
        lowered while XLA compiles does not live as long as the program.
    """

    def rule(arguments: Any, tangents: Any) -> tuple[Any, Any]:
        results = run(*arguments)
        return results, derivative(arguments, tangents, results)

    run = functools.partial(_bind, function, rule, split, implementation != "interpret")
    return run


def constant(function: Function, implementation: str | None) -> Function:
    """Returns `function`, whose results are integers and have no derivative, as an op."""
    no_tangents = lambda _, __, results: jax.tree.map(lambda _: None, results)
    traced = op(function, no_tangents, implementation=implementation)

    def run(*arguments: Any) -> Any:
        leaves = jax.tree.leaves(arguments)
        traces = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        if traces or sharding.explicit_mesh(leaves) is not None:
            return traced(*arguments)
        return function(*arguments)  # one program, where the op would be one for each step

    return run


def replaced(
    function: Function, differentiable: Function, split: Split, implementation: str | None
) -> Function:
    """Returns `function`, in place of which `differentiable` is differentiated.

    For a function whose derivative needs more than it returns.
    """

    def rule(arguments: Any, tangents: Any) -> tuple[Any, Any]:
        primals, tree = _flatten(arguments)
        flat = lambda *leaves: differentiable(*tree.unflatten(leaves))
        return _jvp_where_moving(flat, primals, tree.flatten_up_to(tangents))

    return functools.partial(_bind, function, rule, split, implementation != "interpret")


def _bind(function: Function, rule: Function, split: Split, may_cut: bool, *arguments: Any) -> Any:
    leaves, tree = _flatten(arguments)
    # Inside shard_map, what the platforms' code returns must vary over the same mesh axes.
    leaves = jax_private.insert_varying_casts(leaves)
    arguments = tree.unflatten(leaves)
    mesh = sharding.explicit_mesh(leaves)
    if mesh is None:
        run = sharding.left_whole(function)
        jaxpr, shapes = jax.make_jaxpr(run, return_shape=True)(*arguments)
    else:
        shapes = sharding.shapes(mesh, function, arguments)
    _, out_tree = _flatten(shapes)
    flat_split = sharding.flatten(split, function, arguments, shapes)
    if mesh is not None:
        jaxpr = _in_parts(mesh, flat_split, leaves)

    def flat_rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        results, moved = rule(tree.unflatten(primals), tree.unflatten(tangents))
        return out_tree.flatten_up_to(results), out_tree.flatten_up_to(moved)

    # The thread in which XLA has a part traced may not know of `jax.enable_x64`.
    wide = any(a.dtype.itemsize > 4 for a in (*leaves, *jaxpr.out_avals))
    may_cut = may_cut and not wide and mesh is None
    jax_private.require_devices(_op_p, None if may_cut else "cuda")
    # As a function, so that JAX does not treat its jaxpr as a part of the program.
    outputs = _op_p.bind(
        *leaves,
        function=jaxpr_as_fun(jaxpr),
        rule=flat_rule,
        types=tuple(map(sharding.type_of, jaxpr.out_avals)),
        split=flat_split if may_cut or mesh is not None else None,
        mesh=mesh,
    )
    return out_tree.unflatten(outputs)


def _in_parts(mesh: Any, split: sharding.FlatSplit, operands: Sequence[Any]) -> Any:
    with jax_private.no_vmapped_axes():
        return jax.make_jaxpr(sharding.over_explicit_mesh(mesh, split, operands))(*operands)


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

    types = tuple(map(sharding.type_of, shapes))
    moving_types = tuple(map(sharding.type_of, moving.values()))

    def flat_function(*flat: Any) -> list[Any]:
        known = saved_tree.unflatten(flat[: len(saved)])
        named = dict(zip(moving, flat[len(saved) :], strict=True))
        return list(map(sharding.cast, jax.tree.leaves(function(known, named)), types))

    def flat_transpose(*flat: Any) -> list[Any]:
        known = saved_tree.unflatten(flat[: len(saved)])
        cotangents = transpose(known, out_tree.unflatten(flat[len(saved) :]))
        return list(map(sharding.cast, (cotangents[name] for name in moving), moving_types))

    jax_private.require_devices(_linear_p)
    outputs = _linear_p.bind(
        *saved,
        *moving.values(),
        function=flat_function,
        transpose=flat_transpose,
        num_residuals=len(saved),
        types=types,
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


def _primitive(name: str) -> Primitive:
    """A primitive that runs its parameter `function`, which returns arrays of `types`."""
    primitive = Primitive(name)
    primitive.multiple_results = True

    def run(*args: Any, function: Function, **_: Any) -> list[Any]:
        return function(*args)

    def abstract_eval(*avals: Any, types: Sequence[Any], **_: Any) -> list[Any]:
        return [jax_private.result_aval(name, avals, a.shape, a.dtype, a.sharding) for a in types]

    def lower(
        ctx: Any, *operands: Any, function: Function, split: Any = None, mesh: Any = None, **_: Any
    ) -> Sequence[Any]:
        if split is not None and mesh is None and sharding.is_partitioned(ctx):
            function = sharding.partitioned(split, function)
        return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)

    primitive.def_impl(run)
    primitive.def_abstract_eval(abstract_eval)
    mlir.register_lowering(primitive, lower)
    return primitive


# --- an op -----------------------------------------------------------------------------------

_op_p = _primitive("triax_op")


def _op_jvp(primals: Any, tangents: Any, *, rule: Function, **_: Any) -> Any:
    outputs, results = rule(tuple(primals), _not_zero(tangents))
    tangents = []
    for output, result in zip(outputs, results, strict=True):
        aval = jax.typeof(output).to_tangent_aval()
        # A result that is rounded to integers has none, whatever its operands have.
        without = result is None or aval.dtype == jax.dtypes.float0
        tangents.append(ad.Zero(aval) if without else result)
    return outputs, tangents


def _op_batch(
    args: Any,
    axes: Any,
    *,
    function: Function,
    rule: Function,
    types: Sequence[Any],
    split: sharding.FlatSplit | None,
    mesh: Any,
) -> Any:
    axes = tuple(axes)
    split = None if split is None else sharding.batched(split, axes)
    function = jax.vmap(function, axes)
    types = tuple(sharding.batched_type(a, _batch_size(args, axes)) for a in types)
    if mesh is not None and split is not None:  # cut over more axes now, perhaps: by batches
        jaxpr = _in_parts(mesh, split, args)
        function, types = jaxpr_as_fun(jaxpr), tuple(map(sharding.type_of, jaxpr.out_avals))
    outputs = _op_p.bind(
        *args,
        function=function,
        rule=jax.vmap(rule, (axes, axes)),
        types=types,
        split=split,
        mesh=mesh,
    )
    return outputs, [0] * len(outputs)


ad.primitive_jvps[_op_p] = _op_jvp
batching.primitive_batchers[_op_p] = _op_batch


# --- a linear function -----------------------------------------------------------------------

_linear_p = _primitive("triax_linear")


def _linear_jvp(primals: Any, tangents: Any, *, function: Function, **_: Any) -> Any:
    return _jvp_where_moving(function, primals, _not_zero(tangents))


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
    size, batch = _batch_size(args, axes), sharding.explicit_batch(args, axes)

    # Put the batch in front of all tangents, so that all cotangents have it there. JAX transposes
    # that too: a tangent without a batch gets the sum over it.
    def in_front(arg: Any, axis: int | None) -> Any:
        if axis is not None:
            return jnp.moveaxis(arg, axis, 0)
        kind = sharding.batched_type(sharding.type_of(arg), size, batch)
        return sharding.cast(jnp.broadcast_to(arg, (size, *arg.shape)), kind)

    tangents = list(map(in_front, args[num_residuals:], axes[num_residuals:]))
    known = tuple(axes[:num_residuals])
    outputs = _linear_p.bind(
        *args[:num_residuals],
        *tangents,
        function=jax.vmap(function, (*known, *(0 for _ in tangents))),
        transpose=jax.vmap(transpose, (*known, *(0 for _ in types))),
        num_residuals=num_residuals,
        types=tuple(sharding.batched_type(a, size, batch) for a in types),
    )
    return outputs, [0] * len(outputs)


ad.primitive_jvps[_linear_p] = _linear_jvp
ad.primitive_transposes[_linear_p] = _linear_transpose
batching.primitive_batchers[_linear_p] = _linear_batch


def _batch_size(args: Any, axes: Any) -> int:
    return next(arg.shape[axis] for arg, axis in zip(args, axes, strict=True) if axis is not None)


def _flatten(tree: Any) -> tuple[list[Any], Any]:
    return jax.tree.flatten(tree)


def _not_zero(tangents: Any) -> tuple[Any, ...]:
    return tuple(None if isinstance(tangent, ad.Zero) else tangent for tangent in tangents)


def _jvp_where_moving(function: Function, primals: Any, tangents: Any) -> Any:
    """`jax.jvp` in the arguments whose tangent is not None."""
    moving = [i for i, tangent in enumerate(tangents) if tangent is not None]

    def at(*moved: Any) -> Any:
        args = list(primals)
        for index, value in zip(moving, moved, strict=True):
            args[index] = value
        return function(*args)

    return jax.jvp(at, [primals[i] for i in moving], [tangents[i] for i in moving])
