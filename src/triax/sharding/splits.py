"""Describes how an op is sharded over several devices.

To XLA a kernel is a black box: XLA gathers sharded operands, and every device runs the whole call.
In plain JAX, on other platforms, XLA does this to some operations. A `Split` says which dimensions
may be sharded, so that each device runs the op on its shard: under plain `jit` (`automatic`) and on
meshes with explicit axes (`explicit`). Inside `shard_map` all code is local anyway, and on one
device there is nothing to do.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

Function = Callable[..., Any]
MeshAxes = tuple[str, ...]
Dims = str | list[str] | Callable[[Any], list[str]] | None
"""The dimensions of an argument or a result, one letter for each.

A string stands for an array, or for each array of a pytree if all have the same dimensions.
Otherwise a list has a string for each array of the pytree, or a function of the pytree returns this
list. None is for arrays that every device needs whole.
"""
_UNNAMED = "_"


@dataclasses.dataclass(frozen=True)
class Shard:
    """What one device runs of an op: the mesh axes that each dimension is sharded over."""

    mesh_axes: Mapping[str, MeshAxes]

    def sum(self, dims: str, value: jax.Array) -> jax.Array:
        """Returns the sum of `value` over the shards of `dims`.

        Small floats are summed in float32, and rounded once. On CPUs XLA would even abort the
        process in a sum of bfloat16 over some axes of a mesh.
        """
        axes = sum((self.mesh_axes.get(dim, ()) for dim in dims), ())
        if not axes:
            return value
        is_small = jnp.issubdtype(value.dtype, jnp.floating) and value.dtype.itemsize < 4
        wide = value.astype(jnp.float32) if is_small else value
        return jax.lax.psum(wide, axes).astype(value.dtype)

    def index(self, dim: str) -> Any:
        """Returns the index of this device's shard."""
        axes = self.mesh_axes.get(dim)
        return jax.lax.axis_index(axes) if axes else 0

    def count(self, dim: str) -> int:
        """Returns the number of shards."""
        axes = self.mesh_axes.get(dim)
        return int(jax.lax.psum(1, axes)) if axes else 1


class Split(NamedTuple):
    """Which dimensions of an op's arrays may be sharded.

    Attributes:
      arguments: the `Dims` of each argument; those with None, or past the end, are needed whole.
      results: the `Dims` of the result, or of each of several results.
      shardable: the dimensions that may be sharded; those of one letter are sharded alike.
      run: ``run(shard, *arguments)`` runs the op on a shard. If no result has a dimension of
        `shardable`, `run` must add up the shards over it (`Shard.sum`).
      pieces: the most shards of a dimension, if these are fewer than its size. Arrays may then
        count other things along it, such as blocks that share a scale: each size is a multiple of
        the number of pieces.
    """

    arguments: tuple[Dims, ...]
    results: Dims | tuple[Dims, ...]
    shardable: str
    run: Function
    pieces: Mapping[str, int] = {}


class FlatSplit(NamedTuple):
    """A `Split` of an op on flat arrays, a string for each; ``local(shard)`` runs it on one."""

    operands: tuple[str, ...]
    results: tuple[str, ...]
    shardable: str
    local: Callable[[Shard], Function]
    pieces: Mapping[str, int] = {}


def flatten(split: Split, arguments: Any, results: Any, name: str) -> FlatSplit:
    """Returns the flat split of a function from `arguments` to `results` (arrays, or types).

    Raises:
      TypeError: the declared dimensions of the op `name` do not fit the arrays.
    """
    tree = jax.tree.structure(arguments)

    def local(shard: Shard) -> Function:
        def run(*leaves: Any) -> list[Any]:
            return jax.tree.leaves(split.run(shard, *jax.tree.unflatten(tree, leaves)))

        return run

    outputs = results if isinstance(results, tuple) else (results,)
    declared = split.results if isinstance(split.results, tuple) else (split.results,)
    strings = _dims(split.arguments, arguments), _dims(declared, outputs)
    arrays = *jax.tree.leaves(arguments), *jax.tree.leaves(results)
    _check(name, (*strings[0], *strings[1]), arrays, split.pieces)
    return FlatSplit(*strings, split.shardable, local, split.pieces)


def _dims(declared: Sequence[Dims], arrays: Sequence[Any]) -> tuple[str, ...]:
    flat: list[str] = []
    for dims, argument in itertools.zip_longest(declared, arrays):
        dims = dims(argument) if callable(dims) else dims
        if isinstance(dims, list):
            flat += dims
        else:
            flat += [dims or _UNNAMED * leaf.ndim for leaf in jax.tree.leaves(argument)]
    return tuple(flat)


def _check(
    name: str, strings: Sequence[str], arrays: Sequence[Any], pieces: Mapping[str, int]
) -> None:
    sizes = dict(pieces)
    for dims, array in zip(strings, arrays, strict=True):
        for dim, size in itertools.zip_longest(dims, array.shape):
            wanted = sizes.setdefault(dim, size)
            fits = wanted == size or (dim in pieces and size and not size % wanted)
            if dim is None or size is None or not fits:
                known = f", where {dim!r} is {sizes[dim]}" if dim in sizes else ""
                raise TypeError(
                    f"{name}: an array of shape {array.shape} is declared as {dims!r}{known}"
                )
            sizes.pop(_UNNAMED, None)


def batched(split: FlatSplit, axes: Sequence[int | None]) -> FlatSplit:
    """Returns the split under `jax.vmap` over `axes`, with the batch first in results."""
    used = {dim for dims in split.operands + split.results for dim in dims}
    batch = next(dim for dim in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if dim not in used)
    operands = tuple(
        dims if axis is None else dims[:axis] + batch + dims[axis:]
        for dims, axis in zip(split.operands, axes, strict=True)
    )
    results = tuple(batch + dims for dims in split.results)
    local = lambda shard: jax.vmap(split.local(shard), tuple(axes))
    return FlatSplit(operands, results, split.shardable + batch, local, split.pieces)


def mesh_axes(
    mesh: Any,
    shardable: str,
    arrays: Iterable[tuple[str, Sequence[int], Iterable[Any]]],
    pieces: Mapping[str, int] = {},
) -> dict[str, MeshAxes]:
    """Returns the mesh axes that each dimension is sharded over.

    `arrays` has each array's dimensions, shape and spec. For each dimension the first array that
    has it decides, and no mesh axis is used twice. A dimension stays whole if its size, or number
    of `pieces`, is no multiple of the number of shards, because XLA would pad the last shard.
    """
    axes: dict[str, MeshAxes] = {}
    used: set[str] = set()
    for dims, shape, spec in arrays:
        for dim, size, entry in zip(dims, shape, spec, strict=False):
            names = (entry,) if isinstance(entry, str) else tuple(entry or ())
            count = math.prod(mesh.shape[name] for name in names)
            free = dim in shardable and dim not in axes and not used & {*names}
            if free and not pieces.get(dim, size) % count:
                axes[dim] = names
                used |= {*names}
    return {dim: names for dim, names in axes.items() if names}


def partition_spec(dims: str, axes: Mapping[str, MeshAxes]) -> PartitionSpec:
    return PartitionSpec(*(axes.get(dim) for dim in dims))
