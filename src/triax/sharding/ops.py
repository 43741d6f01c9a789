"""Primitives for functions that may be sharded over devices, with their rules.

`bind` traces the function whole, and puts it into the program as one step. JAX then asks for

- a *lowering*: the function, or where XLA partitions the program over several devices, each
  device's shard (`automatic`); on meshes with explicit axes the shards are traced right away
  (`explicit`);
- a *derivative*: the caller's rule, made of such primitives and linear functions (`linear`);
- *batching*: `jax.vmap` of the function and of its rule, and a `Split` with one more dimension.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching

from triax import settings
from triax.compat import jax_private
from triax.sharding import automatic, explicit, linear, primitives
from triax.sharding.splits import FlatSplit, Function, Split, batched, flatten


def bind(
    primitive: Primitive,
    name: str,
    run: Function,
    split: Split | None,
    rule: Callable[[Any, Any, Any, Any], Any],
    arguments: Sequence[Any],
    *,
    calls_back: bool = False,
    check: Callable[[Any, Any], None] | None = None,
) -> Any:
    """Runs ``run(*arguments)`` as one step of a program.

    Args:
      primitive: a primitive made by `primitive`.
      name: the step's name in jaxprs and errors.
      run: a function of pytrees of arrays.
      split: how `run` is sharded over devices; None if its own steps are instead.
      rule: ``rule(tree, out_tree, primals, tangents)`` returns flat results and their tangents, for
        flat arguments of the structure `tree`; None stands for a tangent that is zero.
      calls_back: whether `run` may make host callbacks, as kernels do on a CPU.
      check: called with the jaxpr of the whole `run`, and the types of its results.
    """
    leaves, tree = jax.tree.leaves(arguments), jax.tree.structure(arguments)
    mesh = None if split is None else explicit.explicit_mesh(leaves)
    # Inside shard_map, all platforms' results must vary over the same mesh axes.
    leaves = jax_private.insert_varying_casts(leaves)
    arguments = jax.tree.unflatten(tree, leaves)
    if mesh is None:
        local = run if split is None else automatic.left_whole(run)
        jaxpr, shapes = jax.make_jaxpr(local, return_shape=True)(*arguments)
    else:
        jaxpr, shapes = explicit.traced(mesh, run, arguments)
    if check is not None:
        check(jaxpr, shapes)
    flat = None if split is None else flatten(_as_here(split), arguments, shapes, name)
    if mesh is not None and flat is not None:
        jaxpr = _in_shards(mesh, flat, leaves)
    is_automatic = split is not None and not mesh
    out_tree = jax.tree.structure(shapes)
    jax_private.require_devices(primitive, None if is_automatic else "cuda")
    outputs = primitive.bind(
        *leaves,
        call=_BoundOp(
            name,
            # A function, because JAX would treat a jaxpr here as a part of the program.
            function=jaxpr_as_fun(jaxpr),
            rule=functools.partial(rule, tree, out_tree),
            types=tuple(map(explicit.type_of, jaxpr.out_avals)),
            split=flat if is_automatic or mesh is not None else None,
            mesh=mesh,
            calls_back=calls_back,
        ),
    )
    return jax.tree.unflatten(out_tree, outputs)


def _as_here(split: Split) -> Split:
    """Returns the split with this thread's settings: XLA traces its shards in another thread."""
    restored = settings.captured()

    def run(*operands: Any) -> Any:
        with restored():
            return split.run(*operands)

    return split._replace(run=run)


@dataclasses.dataclass(frozen=True, eq=False)
class _BoundOp:
    """Parameter of a `primitive`: flat functions, the results' types, and the split."""

    name: str
    function: Function
    rule: Function
    types: tuple[jax.ShapeDtypeStruct, ...]
    split: FlatSplit | None
    mesh: Any
    calls_back: bool

    def __repr__(self) -> str:
        return self.name


def _in_shards(mesh: Any, split: FlatSplit, operands: Sequence[Any]) -> Any:
    with jax_private.no_vmapped_axes():
        return jax.make_jaxpr(explicit.over_explicit_mesh(mesh, split, operands))(*operands)


def primitive(name: str) -> Primitive:
    """Makes a primitive for `bind`."""

    def lowered(ctx: Any, call: _BoundOp) -> Function:
        if call.split is not None and call.mesh is None and jax_private.is_partitioned(ctx):
            board = jax_private.add_switchboard(ctx) if call.calls_back else None
            return automatic.partitioned(call.split, call.function, board)
        return call.function

    new = primitives.primitive(name, lowered)

    def jvp(primals: Any, tangents: Any, *, call: _BoundOp) -> Any:
        outputs, results = call.rule(tuple(primals), linear.not_zero(tangents))
        moved = []
        for output, result in zip(outputs, results, strict=True):
            aval = jax.typeof(output).to_tangent_aval()
            # An integer result has no tangent, whatever its operands have.
            without = result is None or aval.dtype == jax.dtypes.float0
            moved.append(ad.Zero(aval) if without else result)
        return outputs, moved

    def batch(args: Any, axes: Any, *, call: _BoundOp) -> Any:
        axes = tuple(axes)
        split = None if call.split is None else batched(call.split, axes)
        function = jax.vmap(call.function, axes)
        size = linear.batch_size(args, axes)
        names = explicit.explicit_batch(args, axes) if call.mesh is None else None
        types = tuple(explicit.batched_type(type_, size, names) for type_ in call.types)
        if call.mesh is not None and split is not None:  # explicit axes may shard the batch too
            jaxpr = _in_shards(call.mesh, split, args)
            function, types = jaxpr_as_fun(jaxpr), tuple(map(explicit.type_of, jaxpr.out_avals))
        rule = jax.vmap(call.rule, (axes, axes))
        mapped = dataclasses.replace(call, function=function, rule=rule, types=types, split=split)
        outputs = new.bind(*args, call=mapped)
        return outputs, [0] * len(outputs)

    ad.primitive_jvps[new] = jvp
    batching.primitive_batchers[new] = batch
    return new
