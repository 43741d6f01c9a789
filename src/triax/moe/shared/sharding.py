"""How an op is cut over several devices.

To XLA a kernel is a black box: operands that are sharded are gathered, and every device runs the
whole call. It treats parts of the plain JAX of other platforms like that too. A `Split` says which
dimensions may be cut, so that each device runs the op on its part. It is used by programs under
plain `jit` (through `custom_partitioning`, once XLA has chosen the shardings) and on meshes with
explicit axes (through `shard_map`, while the program is traced). Inside `shard_map` all code is
local anyway, and for one device there is nothing to do.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from triax.compat import jax_private

Function = Callable[..., Any]
MeshAxes = tuple[str, ...]
Letters = str | Callable[[Any], list[str]] | None
"""A letter for each dimension of an array, or of every array of a pytree.

For arrays of several ranks a function that returns the letters of each; None for those that every
device needs whole.
"""
_UNNAMED = "_"


@dataclasses.dataclass(frozen=True)
class Shard:
    """The part of an op that one device runs: the mesh axes that each letter is cut over."""

    mesh_axes: Mapping[str, MeshAxes]

    def sum(self, letter: str, value: jax.Array) -> jax.Array:
        """The sum of `value` over the parts that `letter` is cut into."""
        axes = self.mesh_axes.get(letter)
        return jax.lax.psum(value, axes) if axes else value

    def index(self, letter: str) -> Any:
        """The number of this device's part."""
        axes = self.mesh_axes.get(letter)
        return jax.lax.axis_index(axes) if axes else 0

    def count(self, letter: str) -> int:
        """The number of parts."""
        axes = self.mesh_axes.get(letter)
        return int(jax.lax.psum(1, axes)) if axes else 1


class Split(NamedTuple):
    """Which dimensions of an op's arrays may be cut.

    Attributes:
      arguments: the `Letters` of each; None, or one that is missing at the end, is needed whole.
      results: likewise, for one array or for each of several.
      cut: the letters that may be cut; equal letters are cut alike.
      run: ``run(shard, *arguments)`` runs the op on a part. It sums over letters that no result
        has.
    """

    arguments: tuple[Letters, ...]
    results: Letters | tuple[Letters, ...]
    cut: str
    run: Function


class FlatSplit(NamedTuple):
    """A `Split` of an op on flat arrays: a string for each; ``local(shard)`` runs a part."""

    operands: tuple[str, ...]
    results: tuple[str, ...]
    cut: str
    local: Callable[[Shard], Function]


def flatten(split: Split, arguments: Any, results: Any, name: str) -> FlatSplit:
    """The split of a function that maps `arguments` to `results` (arrays, or their types).

    Raises:
      TypeError: `name`, an op, was declared with other letters than these arrays have.
    """
    tree = jax.tree.structure(arguments)

    def local(shard: Shard) -> Function:
        def run(*leaves: Any) -> list[Any]:
            return jax.tree.leaves(split.run(shard, *jax.tree.unflatten(tree, leaves)))

        return run

    outputs = results if isinstance(results, tuple) else (results,)
    declared = split.results if isinstance(split.results, tuple) else (split.results,)
    strings = _letters(split.arguments, arguments), _letters(declared, outputs)
    _check(
        name, (*strings[0], *strings[1]), (*jax.tree.leaves(arguments), *jax.tree.leaves(results))
    )
    return FlatSplit(*strings, split.cut, local)


def _letters(declared: Sequence[Letters], arrays: Sequence[Any]) -> tuple[str, ...]:
    found: list[str] = []
    for letters, part in itertools.zip_longest(declared, arrays):
        if callable(letters):
            found += letters(part)
        else:
            found += [letters or _UNNAMED * leaf.ndim for leaf in jax.tree.leaves(part)]
    return tuple(found)


def _check(name: str, strings: Sequence[str], arrays: Sequence[Any]) -> None:
    sizes: dict[str, int] = {}
    for letters, array in zip(strings, arrays, strict=True):
        for letter, size in itertools.zip_longest(letters, array.shape):
            if letter is None or size is None or sizes.setdefault(letter, size) != size:
                known = f", where {letter!r} is {sizes[letter]}" if letter in sizes else ""
                raise TypeError(
                    f"{name}: an array of shape {array.shape} is declared as {letters!r}{known}"
                )
            sizes.pop(_UNNAMED, None)


def batched(split: FlatSplit, axes: Sequence[int | None]) -> FlatSplit:
    """The split of the function under `jax.vmap` over `axes`, with the batch first in results."""
    used = {letter for letters in split.operands + split.results for letter in letters}
    batch = next(letter for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if letter not in used)
    operands = tuple(
        letters if axis is None else letters[:axis] + batch + letters[axis:]
        for letters, axis in zip(split.operands, axes, strict=True)
    )
    results = tuple(batch + letters for letters in split.results)
    local = lambda shard: jax.vmap(split.local(shard), tuple(axes))
    return FlatSplit(operands, results, split.cut + batch, local)


# --- plain jit ---------------------------------------------------------------------------------


def is_partitioned(ctx: Any) -> bool:
    """Whether a lowering rule is for a program that XLA cuts over several devices."""
    return (
        jax_private.num_partitions(ctx) > 1
        and jax_private.uses_shardy()
        and not jax_private.is_exporting(ctx)
    )


def partitioned(split: FlatSplit, function: Function) -> Function:
    """`function` of flat arrays, which XLA runs in parts by `split` where it pays."""
    run = custom_partitioning(functools.partial(_as_tuple, function))

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        arrays = zip(split.results + split.operands, (*results, *operands), strict=True)
        cut = ((letters, a.shape, jax_private.spec_of(a, mesh)) for letters, a in arrays)
        axes = _mesh_axes(mesh, split.cut, cut)
        to, of = (
            tuple(NamedSharding(mesh, _spec(letters, axes)) for letters in strings)
            for strings in (split.results, split.operands)
        )
        return mesh, functools.partial(_as_tuple, split.local(Shard(axes))), to, of

    # Not decoded by JAX, which fails where XLA cuts over a part of a mesh axis.
    run.def_partition(partition, sharding_rule=_shardy_rule(split), decode_shardings=False)
    return run


def _as_tuple(function: Function, *operands: Any) -> tuple[Any, ...]:
    return tuple(function(*operands))


def _shardy_rule(split: FlatSplit) -> SdyShardingRule:
    """The same for Shardy; each dimension that is needed whole has a name of its own."""
    whole: list[str] = []

    def names(letters: str) -> ArrayMapping:
        named = []
        for letter in letters:
            if letter not in split.cut:
                letter = f"whole{len(whole)}"
                whole.append(letter)
            named.append(letter)
        return ArrayMapping(*named)

    operands = tuple(map(names, split.operands))
    results = tuple(map(names, split.results))
    summed = {*"".join(split.operands)} & {*split.cut} - {*"".join(split.results)}
    return SdyShardingRule(
        operands,
        results,
        reduction_factors=tuple(sorted(summed)),
        need_replication_factors=tuple(whole),
    )


def _mesh_axes(
    mesh: Any, letters_cut: str, arrays: Iterable[tuple[str, Sequence[int], Iterable[Any]]]
) -> dict[str, MeshAxes]:
    """The mesh axes each letter is cut over, from arrays' letters, shapes and specs in turn.

    No axis is used twice.
    A letter is left whole if its size is no multiple of the number of parts, because XLA would
    fill the last part up.
    """
    axes: dict[str, MeshAxes] = {}
    used: set[str] = set()
    for letters, shape, spec in arrays:
        for letter, size, part in zip(letters, shape, spec, strict=False):
            names = (part,) if isinstance(part, str) else tuple(part or ())
            count = math.prod(mesh.shape[name] for name in names)
            free = letter in letters_cut and letter not in axes and not used & {*names}
            if free and not size % count:
                axes[letter] = names
                used |= {*names}
    return {letter: names for letter, names in axes.items() if names}


def _spec(letters: str, axes: Mapping[str, MeshAxes]) -> PartitionSpec:
    return PartitionSpec(*(axes.get(letter) for letter in letters))


# --- inside shard_map ---------------------------------------------------------------------------


def left_whole(function: Function) -> Function:
    """`function` of arrays, which XLA does not cut over axes that `shard_map` leaves to it.

    Where it cuts plain JAX there, XLA of JAX 0.10 may end the process (at a gather).
    """

    def run(*operands: Any) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        if not {AxisType.Manual, AxisType.Auto} <= {*mesh.axis_types}:
            return function(*operands)
        whole = NamedSharding(mesh, PartitionSpec())
        constrain = lambda array: jax.lax.with_sharding_constraint(array, whole)
        return jax.tree.map(constrain, function(*jax.tree.map(constrain, operands)))

    return run


# --- explicit meshes ---------------------------------------------------------------------------


def explicit_mesh(arrays: Any) -> Any | None:
    """The mesh with explicit axes that is in use, or that the arrays' types name; None if none."""
    types = map(jax.typeof, jax.tree.leaves(arrays))
    meshes = (jax.sharding.get_abstract_mesh(), *(t.sharding.mesh for t in types))
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)


def shapes(mesh: Any, function: Function, arguments: Any) -> Any:
    """The types of the results of a whole op, whose arguments are cut over explicit axes.

    Traced as if these axes were automatic; those that are manual are so still.
    """
    kinds = (AxisType.Auto if kind is AxisType.Explicit else kind for kind in mesh.axis_types)
    mesh = jax.sharding.AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=tuple(kinds))

    def whole(array: Any) -> Any:
        return jax_private.result_aval("op", [jax.typeof(array)], array.shape, array.dtype)

    with jax.sharding.use_abstract_mesh(mesh):
        return jax.eval_shape(function, *jax.tree.map(whole, arguments))


def explicit(array: Any) -> NamedSharding | None:
    """The sharding that is part of an array's type, if its mesh has explicit axes."""
    is_type = isinstance(array, (jax.ShapeDtypeStruct, jax.core.ShapedArray))
    sharding = (array if is_type else jax.typeof(array)).sharding
    if sharding is None or AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    return sharding


def type_of(array: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype, and the sharding that is part of the type."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=explicit(array))


def explicit_batch(arrays: Sequence[Any], axes: Sequence[int | None]) -> Any:
    """The explicit axes that a batch is cut over, which `vmap` wants to be the same for all."""
    cuts = [
        sharding.spec[axis]
        for array, axis in zip(arrays, axes, strict=True)
        if axis is not None and (sharding := explicit(array)) is not None
    ]
    return next(filter(None, cuts), None)


def batched_type(kind: jax.ShapeDtypeStruct, size: int, batch: Any = None) -> jax.ShapeDtypeStruct:
    """The type with a batch in front, which is cut over the explicit axes `batch`."""
    sharding = kind.sharding
    if sharding is not None:
        sharding = NamedSharding(sharding.mesh, PartitionSpec(batch, *sharding.spec))
    return jax.ShapeDtypeStruct((size, *kind.shape), kind.dtype, sharding=sharding)


def cast(array: Any, kind: jax.ShapeDtypeStruct) -> Any:
    """The array with the sharding of a type."""
    have, want = explicit(array), kind.sharding
    if have == want:
        return array
    mesh = (have or want).mesh
    return jax.sharding.reshard(array, want or NamedSharding(mesh, PartitionSpec()))


def gathered(array: Any, *kept: int) -> jax.Array:
    """The array, which explicit axes cut over no dimensions but those given.

    For plain JAX, which wants operands that are cut alike.
    """
    sharding = explicit(array)
    if sharding is None:
        return array
    spec = (part if i in kept else None for i, part in enumerate(sharding.spec))
    return jax.sharding.reshard(array, NamedSharding(sharding.mesh, PartitionSpec(*spec)))


def over_explicit_mesh(mesh: Any, split: FlatSplit, operands: Sequence[Any]) -> Function:
    """The op in parts, as the types of its operands are cut."""
    axes = _explicit_axes(mesh, split, operands)
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    names = {name for name, kind in kinds if kind is AxisType.Explicit}
    return _in_parts(mesh, names, split, axes)


def cut_only(function: Function, split: Split, *arguments: Any) -> Any:
    """Runs a function of several ops in parts, over those explicit axes that its arguments are cut
    over and the split allows."""
    mesh = explicit_mesh(arguments)
    if mesh is None:
        return function(*arguments)
    results = shapes(mesh, function, arguments)
    flat = flatten(split, arguments, results, "the layer")
    operands = jax.tree.leaves(arguments)
    axes = _explicit_axes(mesh, flat, operands)
    if not axes:
        return function(*arguments)
    used = {name for names in axes.values() for name in names}
    parts = _in_parts(mesh, used, flat, axes)(*operands)
    return jax.tree.unflatten(jax.tree.structure(results), parts)


def _explicit_axes(mesh: Any, split: FlatSplit, operands: Sequence[Any]) -> dict[str, MeshAxes]:
    cut = (
        (letters, operand.shape, sharding.spec)
        for letters, operand in zip(split.operands, operands, strict=True)
        if (sharding := explicit(operand)) is not None and any(sharding.spec)
    )
    return _mesh_axes(mesh, split.cut, cut)


def _in_parts(
    mesh: Any, names: set[str], split: FlatSplit, axes: Mapping[str, MeshAxes]
) -> Function:
    specs = [_spec(letters, axes) for letters in split.operands]
    local = left_whole(split.local(Shard(axes)))

    def on_device(*operands: Any) -> Any:
        return local(*map(_of_no_axis, operands))

    part = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=[_spec(letters, axes) for letters in split.results],
        axis_names=names,
        # JAX takes a kernel's results to vary over all axes that an operand varies over.
        check_vma=False,
    )

    def run(*operands: Any) -> Any:
        return part(
            *(
                jax.sharding.reshard(operand, NamedSharding(mesh, spec))
                for operand, spec in zip(operands, specs, strict=True)
            )
        )

    return run


def _of_no_axis(array: jax.Array) -> jax.Array:
    """The array, whose type says no more that it varies over axes that were manual before.

    JAX lets operands keep that with `check_vma=False`, and most results lose it.
    """
    return jax.lax.squeeze(jax.lax.expand_dims(array, (0,)), (0,))
