"""Shards ops on meshes with explicit axes, by `shard_map`, while the program is traced."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from triax.compat import jax_private
from triax.sharding.automatic import left_whole
from triax.sharding.splits import (
    FlatSplit,
    Function,
    MeshAxes,
    Shard,
    Split,
    flatten,
    mesh_axes,
    partition_spec,
)


def explicit_mesh(arrays: Any) -> Any | None:
    """Returns the mesh with explicit axes that is in use or in an array's type, else None."""
    types = map(jax.typeof, jax.tree.leaves(arrays))
    meshes = (jax.sharding.get_abstract_mesh(), *(t.sharding.mesh for t in types))
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)


def traced(mesh: Any, function: Function, arguments: Any) -> tuple[Any, Any]:
    """Returns the jaxpr and the result types of an op whose arguments explicit axes shard.

    The op is traced on whole arrays, with explicit axes made automatic; manual axes stay manual.
    """
    kinds = (AxisType.Auto if type_ is AxisType.Explicit else type_ for type_ in mesh.axis_types)
    mesh = jax.sharding.AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=tuple(kinds))

    def whole(array: Any) -> Any:
        return jax_private.result_aval("op", [jax.typeof(array)], array.shape, array.dtype)

    with jax.sharding.use_abstract_mesh(mesh):
        make = jax.make_jaxpr(function, return_shape=True)
        jaxpr_and_types: tuple[Any, Any] = make(*jax.tree.map(whole, arguments))
        return jaxpr_and_types


def sharding_of(array: Any) -> NamedSharding | None:
    """Returns the sharding in an array's type if its mesh has explicit axes, else None."""
    is_type = isinstance(array, (jax.ShapeDtypeStruct, jax.core.ShapedArray))
    sharding = (array if is_type else jax.typeof(array)).sharding
    if sharding is None or AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    return sharding


def type_of(array: Any) -> jax.ShapeDtypeStruct:
    """Returns an array's shape, dtype and explicit sharding."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding_of(array))


def explicit_batch(arrays: Sequence[Any], axes: Sequence[int | None]) -> Any:
    """Returns the explicit axes that shard a batch; `vmap` requires the same ones in all arrays."""
    names = [
        sharding.spec[axis]
        for array, axis in zip(arrays, axes, strict=True)
        if axis is not None and (sharding := sharding_of(array)) is not None
    ]
    return next(filter(None, names), None)


def batched_type(type_: jax.ShapeDtypeStruct, size: int, batch: Any = None) -> jax.ShapeDtypeStruct:
    """Returns a type with a leading batch dimension, sharded over the explicit axes `batch`."""
    sharding = type_.sharding
    if sharding is not None:
        sharding = NamedSharding(sharding.mesh, PartitionSpec(batch, *sharding.spec))
    return jax.ShapeDtypeStruct((size, *type_.shape), type_.dtype, sharding=sharding)


def cast(array: Any, type_: jax.ShapeDtypeStruct) -> Any:
    """Reshards an array as a type says; an array is gathered if the type has no sharding."""
    have, want = sharding_of(array), type_.sharding
    if have == want:
        return array
    mesh = (have or want).mesh
    return jax.sharding.reshard(array, want or NamedSharding(mesh, PartitionSpec()))


def gathered(array: Any, *kept: int) -> jax.Array:
    """Gathers an array that is sharded over explicit axes, along all dimensions but `kept`.

    Plain JAX wants operands that are sharded alike.
    """
    sharding = sharding_of(array)
    if sharding is None:
        return array
    spec = (entry if i in kept else None for i, entry in enumerate(sharding.spec))
    return jax.sharding.reshard(array, NamedSharding(sharding.mesh, PartitionSpec(*spec)))


def shard_alike(shardable: str, dims: Sequence[str], arrays: Sequence[Any]) -> list[Any]:
    """Reshards arrays (or None) so that only `shardable` dimensions are sharded, and all alike.

    The first array that is sharded decides. Plain JAX wants operands that are sharded alike.
    """
    mesh = explicit_mesh(arrays)
    if mesh is None:
        return list(arrays)
    axes = _explicit_axes(mesh, shardable, dims, arrays)

    def resharded(of_array: str, array: Any) -> Any:
        if array is None or sharding_of(array) is None:
            return array
        sharding = NamedSharding(mesh, partition_spec(of_array, axes))
        return cast(array, jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding))

    return list(map(resharded, dims, arrays))


def over_explicit_mesh(mesh: Any, split: FlatSplit, operands: Sequence[Any]) -> Function:
    """Returns the op in shards, as the types of its operands say."""
    axes = _explicit_axes(mesh, split.shardable, split.operands, operands, split.pieces)
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    names = {name for name, type_ in kinds if type_ is AxisType.Explicit}
    return _in_shards(mesh, names, split, axes)


def shard_only(mesh: Any, function: Function, split: Split, *arguments: Any) -> Any:
    """Runs a function of several ops in shards: its arguments are sharded by `split`."""
    _, results = traced(mesh, function, arguments)
    flat = flatten(split, arguments, results, "the layer")
    operands = jax.tree.leaves(arguments)
    axes = _explicit_axes(mesh, flat.shardable, flat.operands, operands, flat.pieces)
    if not axes:
        return function(*arguments)
    used = tuple(name for names in axes.values() for name in names)
    copied = [
        not {*dims} & {*axes} and jnp.issubdtype(operand.dtype, jnp.inexact)
        for dims, operand in zip(flat.operands, operands, strict=True)
    ]
    operands = [_copies(mesh, used, a) if c else a for a, c in zip(operands, copied, strict=True)]
    outputs = _in_shards(mesh, {*used}, _of_copies(flat, copied), {**axes, _COPY: used})(*operands)
    return jax.tree.unflatten(jax.tree.structure(results), outputs)


_COPY = "#"


def _copies(mesh: Any, used: MeshAxes, array: jax.Array) -> jax.Array:
    """Copies an array for each shard, so that XLA sums the gradients outside of the shards."""
    # Workaround: xla all: inside, where some axes of the mesh are not manual, a sum of bfloat16
    # aborts the process on CPUs.
    count = math.prod(mesh.shape[name] for name in used)
    sharding = NamedSharding(mesh, PartitionSpec(used, *(None for _ in array.shape)))
    return jax.lax.broadcast(gathered(array), (count,), out_sharding=sharding)


def _of_copies(split: FlatSplit, copied: Sequence[bool]) -> FlatSplit:
    """Returns the split of a function where `copied` operands have one copy for each shard."""

    def local(shard: Shard) -> Function:
        run = split.local(shard)
        one = lambda array, is_copy: jax.lax.squeeze(array, (0,)) if is_copy else array
        return lambda *operands: run(*map(one, operands, copied))

    operands = tuple(_COPY * c + dims for dims, c in zip(split.operands, copied, strict=True))
    return split._replace(operands=operands, local=local)


def _explicit_axes(
    mesh: Any,
    shardable: str,
    dims: Sequence[str],
    arrays: Sequence[Any],
    pieces: Mapping[str, int] = {},
) -> dict[str, MeshAxes]:
    specs = (
        (of_array, array.shape, sharding.spec)
        for of_array, array in zip(dims, arrays, strict=True)
        if array is not None and (sharding := sharding_of(array)) is not None and any(sharding.spec)
    )
    return mesh_axes(mesh, shardable, specs, pieces)


def _in_shards(
    mesh: Any, names: set[str], split: FlatSplit, axes: Mapping[str, MeshAxes]
) -> Function:
    specs = [partition_spec(dims, axes) for dims in split.operands]
    local = left_whole(split.local(Shard(axes)))

    def on_device(*operands: Any) -> Any:
        return local(*map(_of_no_axis, operands))

    sharded = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=[partition_spec(dims, axes) for dims in split.results],
        axis_names=names,
        # JAX assumes that a kernel's results vary over every axis that an operand varies over.
        check_vma=False,
    )

    def run(*operands: Any) -> Any:
        return sharded(
            *(
                jax.sharding.reshard(operand, NamedSharding(mesh, spec))
                for operand, spec in zip(operands, specs, strict=True)
            )
        )

    return run


def _of_no_axis(array: jax.Array) -> jax.Array:
    """Drops the outer manual axes that an array varies over from its type.

    With `check_vma=False` operands keep these axes in their types, but most results lose them.
    """
    return jax.lax.squeeze(jax.lax.expand_dims(array, (0,)), (0,))
