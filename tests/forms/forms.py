"""The forms of programs: loops, vmap, updates in place, eager calls, gradients, shard_map, export.

A form takes a function of a tuple of arrays, and the tuple stacked along a new first axis. It
returns the function's results, stacked alike. What they must be is what `alone` returns.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import triax

LENGTH = 4
"""How often a form applies the function."""

Function = Callable[..., Any]


def at(stacked: Any, index: Any) -> Any:
    pick = functools.partial(jax.lax.dynamic_index_in_dim, index=index, axis=0, keepdims=False)
    return jax.tree.map(pick, stacked)


def put(stacked: Any, index: Any, values: Any) -> Any:
    update = lambda of, value: jax.lax.dynamic_update_index_in_dim(of, value, index, 0)
    return jax.tree.map(update, stacked, values)


def _each(stacked: Any) -> list[Any]:
    length = len(jax.tree.leaves(stacked)[0])
    return [jax.tree.map(lambda of: of[i], stacked) for i in range(length)]  # noqa: B023


def _stack(parts: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)


def _zeros(function: Function, stacked: Any) -> Any:
    first = jax.tree.map(lambda of: jax.ShapeDtypeStruct(of.shape[1:], of.dtype), stacked)
    kinds = jax.eval_shape(function, first)
    return jax.tree.map(lambda k: jnp.zeros((len(stacked[0]), *k.shape), k.dtype), kinds)


def alone(function: Function, stacked: Any) -> Any:
    """The function's results under `jit`, one call a program."""
    jitted = jax.jit(function)
    return _stack([jitted(part) for part in _each(stacked)])


def total(results: Any) -> Any:
    """A loss that depends on every float of some results."""
    floats = [a for a in jax.tree.leaves(results) if jnp.issubdtype(a.dtype, jnp.floating)]
    return sum(jnp.sum(jnp.sin(a.astype(jnp.float32))) for a in floats)


def gradient(function: Function) -> Function:
    """The gradients of `total` by the floats among the function's arrays."""

    def run(arrays: Any) -> Any:
        moving = [i for i, a in enumerate(arrays) if jnp.issubdtype(a.dtype, jnp.floating)]

        def of(some: Any) -> Any:
            held = list(arrays)
            for i, a in zip(moving, some, strict=True):
                held[i] = a
            return total(function(tuple(held)))

        return tuple(jax.grad(of)([jnp.asarray(arrays[i]) for i in moving]))

    return run


# --- the forms -------------------------------------------------------------------------------


def _one_program(function: Function, stacked: Any) -> Any:
    return jax.jit(lambda xs: _stack([function(x) for x in _each(xs)]))(stacked)


def _eager(function: Function, stacked: Any) -> Any:
    return _stack([function(x) for x in _each(stacked)])


def _map(function: Function, stacked: Any) -> Any:
    return jax.jit(lambda xs: jax.lax.map(function, xs))(stacked)


def _map_of_batches(function: Function, stacked: Any) -> Any:
    """JAX's map of batches divides by the size of each result: empty ones stay outside."""
    found, of = jax.tree.flatten(_zeros(function, stacked))
    some = [i for i, a in enumerate(found) if a.size]

    def filled(x: Any) -> Any:
        leaves = jax.tree.leaves(function(x))
        return [leaves[i] for i in some]

    mapped = jax.jit(lambda xs: jax.lax.map(filled, xs, batch_size=2))(stacked)
    for i, a in zip(some, mapped, strict=True):
        found[i] = a
    return jax.tree.unflatten(of, found)


def _vmap(function: Function, stacked: Any) -> Any:
    return jax.jit(jax.vmap(function))(stacked)


def _donated(function: Function, stacked: Any) -> Any:
    run = jax.jit(lambda xs: jax.lax.map(function, xs), donate_argnums=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        return run(jax.tree.map(jnp.array, stacked))


def _closed_over(function: Function, stacked: Any) -> Any:
    indices = jnp.arange(len(stacked[0]))
    return jax.jit(lambda many: jax.lax.map(lambda i: function(at(stacked, i)), many))(indices)


def _fori(function: Function, stacked: Any) -> Any:
    @jax.jit
    def run(xs: Any) -> Any:
        body = lambda i, out: put(out, i, function(at(xs, i)))
        return jax.lax.fori_loop(0, len(xs[0]), body, _zeros(function, xs))

    return run(stacked)


def _while(function: Function, stacked: Any) -> Any:
    @jax.jit
    def run(xs: Any) -> Any:
        body = lambda c: (c[0] + 1, put(c[1], c[0], function(at(xs, c[0]))))
        start = jnp.int32(0), _zeros(function, xs)
        return jax.lax.while_loop(lambda c: c[0] < len(xs[0]), body, start)[1]

    return run(stacked)


def _carry(function: Function, stacked: Any) -> Any:
    """Results pass through the carry, and leave a step later."""

    @jax.jit
    def run(xs: Any) -> Any:
        start = jax.tree.map(lambda of: of[0], _zeros(function, xs))
        last, earlier = jax.lax.scan(lambda before, x: (function(x), before), start, xs)
        return jax.tree.map(lambda e, z: jnp.concatenate([e[1:], z[None]]), earlier, last)

    return run(stacked)


def _cond(function: Function, stacked: Any) -> Any:
    @jax.jit
    def run(xs: Any) -> Any:
        one = lambda pair: jax.lax.cond(pair[0] % 2 == 0, function, lambda x: function(x), pair[1])
        return jax.lax.map(one, (jnp.arange(len(xs[0])), xs))

    return run(stacked)


def _switch(function: Function, stacked: Any) -> Any:
    @jax.jit
    def run(xs: Any) -> Any:
        nothing = lambda x: jax.tree.map(lambda of: of[0], _zeros(function, xs))
        one = lambda pair: jax.lax.switch(pair[0] % 2 + 1, [nothing, function, function], pair[1])
        return jax.lax.map(one, (jnp.arange(len(xs[0])), xs))

    return run(stacked)


def _in_place(function: Function, stacked: Any, loop: str) -> Any:
    """Each result that is like one of the arrays is put where that array came from."""

    @jax.jit
    def run(xs: Any) -> Any:
        out, tree = jax.tree.flatten(_zeros(function, xs))
        taken: dict[int, int] = {}
        for k, of in enumerate(out):
            like = [i for i, x in enumerate(xs) if (x.shape, x.dtype) == (of.shape, of.dtype)]
            if free := [i for i in like if i not in taken.values()]:
                taken[k] = free[0]

        def step(carry: Any, i: Any) -> Any:
            xs, out = map(list, carry)
            part = tuple(x[i] for x in xs) if loop == "static" else at(tuple(xs), i)
            for k, value in enumerate(jax.tree.leaves(function(part))):
                held, where = (xs, taken[k]) if k in taken else (out, k)
                if loop == "fori":
                    held[where] = put(held[where], i, value)
                else:
                    held[where] = held[where].at[i].set(value)
            return tuple(xs), tuple(out)

        carry: Any = (tuple(xs), tuple(out))
        if loop == "static":
            for i in range(len(xs[0])):
                carry = step(carry, i)
        elif loop == "fori":
            carry = jax.lax.fori_loop(0, len(xs[0]), lambda i, c: step(c, i), carry)
        else:
            many = jnp.arange(len(xs[0]))
            carry, _ = jax.lax.scan(lambda c, i: (step(c, i), None), carry, many)
        xs, found = carry
        leaves = [xs[taken[k]] if k in taken else of for k, of in enumerate(found)]
        return jax.tree.unflatten(tree, leaves)

    return run(stacked)


def _mesh(length: int) -> Mesh:
    devices = jax.devices()
    return Mesh(np.array(devices[: 2 if len(devices) > 1 and length % 2 == 0 else 1]), ("d",))


def _scan_in_shard_map(function: Function, stacked: Any) -> Any:
    spec = PartitionSpec("d")
    each = lambda xs: jax.lax.map(function, xs)
    sharded = jax.shard_map(each, mesh=_mesh(len(stacked[0])), in_specs=spec, out_specs=spec)
    return jax.jit(sharded)(stacked)


def _shard_map_in_scan(function: Function, stacked: Any) -> Any:
    """Each device has all of it: the function is local."""
    spec = PartitionSpec()
    mesh = _mesh(len(stacked[0]))
    sharded = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec)
    return jax.jit(lambda xs: jax.lax.map(sharded, xs))(stacked)


def _exported(function: Function, stacked: Any) -> Any:
    run = jax.jit(lambda xs: jax.lax.map(function, xs))
    checks = triax.export_checks()
    kept = jax.export.export(run, disabled_checks=checks)(stacked).serialize()
    return jax.jit(jax.export.deserialize(kept).call)(stacked)


def _gradient_of(loop: Callable[[Function, Any], Any], transform: Any = lambda f: f) -> Any:
    """The gradients by all stacked arrays of a loop's total, as one program."""

    def run(function: Function, stacked: Any) -> Any:
        return jax.jit(gradient(lambda xs: loop(transform(function), xs)))(stacked)

    return run


def _eager_gradient(function: Function, stacked: Any) -> Any:
    return _stack([gradient(function)(x) for x in _each(stacked)])


def _layers(function: Function, xs: Any) -> Any:
    return jax.lax.scan(lambda c, x: (c, function(x)), 0, xs)[1]


@dataclasses.dataclass(frozen=True)
class Form:
    """One form; `differentiates` says that it returns `gradient` of the function, stacked.

    `needs` is what the function must be: "batching" rules, "export" (no host callback), "types" of
    varying axes.
    """

    run: Callable[[Function, Any], Any]
    differentiates: bool = False
    needs: tuple[str, ...] = ()


FORMS: dict[str, Form] = {
    "many in one program": Form(_one_program),
    "eager": Form(_eager),
    "map": Form(_map),
    "map of batches": Form(_map_of_batches, needs=("batching",)),
    "vmap": Form(_vmap, needs=("batching",)),
    "donated": Form(_donated),
    "closed over": Form(_closed_over),
    "fori_loop": Form(_fori),
    "while_loop": Form(_while),
    "scan with a carry": Form(_carry),
    "cond": Form(_cond),
    "switch": Form(_switch),
    "in place, fori_loop": Form(functools.partial(_in_place, loop="fori")),
    "in place, scan": Form(functools.partial(_in_place, loop="scan")),
    "in place, no loop": Form(functools.partial(_in_place, loop="static")),
    "scan in shard_map": Form(_scan_in_shard_map, needs=("types",)),
    "shard_map in a scan": Form(_shard_map_in_scan, needs=("types",)),
    "export": Form(_exported, needs=("export",)),
    "gradient, eager": Form(_eager_gradient, differentiates=True),
    "gradient of a scan": Form(_gradient_of(_layers), differentiates=True),
    "gradient of a scan, remat": Form(_gradient_of(_layers, jax.checkpoint), differentiates=True),
    "gradient of many": Form(
        _gradient_of(lambda f, xs: _stack([f(x) for x in _each(xs)])), differentiates=True
    ),
    "gradient of vmap": Form(
        _gradient_of(lambda f, xs: jax.vmap(f)(xs)), differentiates=True, needs=("batching",)
    ),
}
