"""Describes how an op is cut over several devices.

To XLA a kernel is a black box: XLA gathers sharded operands, and every device runs the whole call.
In plain JAX, on other platforms, XLA does this to some operations. A `Split` says which dimensions
may be cut, so that each device runs the op on its part: under plain `jit` (`automatic`) and on
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
Letters = str | list[str] | Callable[[Any], list[str]] | None
"""The letters of an argument or a result: one for each dimension.

A string stands for an array, or for each array of a pytree if all have the same dimensions.
Otherwise a list has a string for each array of the pytree, or a function of the pytree returns this
list. None is for arrays that every device needs whole.
"""
_UNNAMED = "_"


@dataclasses.dataclass(frozen=True)
class Shard:
    """The part of an op that one device runs: the mesh axes that each letter is cut over."""

    mesh_axes: Mapping[str, MeshAxes]

    def sum(self, letters: str, value: jax.Array) -> jax.Array:
        """Returns the sum of `value` over the parts that `letters` are cut into.

        Small floats are summed in float32, and rounded once. On CPUs XLA would even abort the
        process in a sum of bfloat16 over some axes of a mesh.
        """
        axes = sum((self.mesh_axes.get(letter, ()) for letter in letters), ())
        if not axes:
            return value
        is_small = jnp.issubdtype(value.dtype, jnp.floating) and value.dtype.itemsize < 4
        wide = value.astype(jnp.float32) if is_small else value
        return jax.lax.psum(wide, axes).astype(value.dtype)

    def index(self, letter: str) -> Any:
        """Returns the index of this device's part."""
        axes = self.mesh_axes.get(letter)
        return jax.lax.axis_index(axes) if axes else 0

    def count(self, letter: str) -> int:
        """Returns the number of parts."""
        axes = self.mesh_axes.get(letter)
        return int(jax.lax.psum(1, axes)) if axes else 1


class Split(NamedTuple):
    """Which dimensions of an op's arrays may be cut.

    Attributes:
      arguments: the `Letters` of each argument; those with None, or past the end, are needed whole.
      results: the `Letters` of the result, or of each of several results.
      cut: the letters that may be cut; equal letters are cut alike.
      run: ``run(shard, *arguments)`` runs the op on a part. If a letter of `cut` is in no result,
        `run` must add up the parts over it (`Shard.sum`).
    """

    arguments: tuple[Letters, ...]
    results: Letters | tuple[Letters, ...]
    cut: str
    run: Function


class FlatSplit(NamedTuple):
    """A `Split` of an op on flat arrays, a string for each; ``local(shard)`` runs it on a part."""

    operands: tuple[str, ...]
    results: tuple[str, ...]
    cut: str
    local: Callable[[Shard], Function]


def flatten(split: Split, arguments: Any, results: Any, name: str) -> FlatSplit:
    """Returns the flat split of a function from `arguments` to `results` (arrays, or types).

    Raises:
      TypeError: the declared letters of the op `name` do not fit the arrays.
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
    flat: list[str] = []
    for letters, part in itertools.zip_longest(declared, arrays):
        letters = letters(part) if callable(letters) else letters
        if isinstance(letters, list):
            flat += letters
        else:
            flat += [letters or _UNNAMED * leaf.ndim for leaf in jax.tree.leaves(part)]
    return tuple(flat)


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
    """Returns the split under `jax.vmap` over `axes`, with the batch first in results."""
    used = {letter for letters in split.operands + split.results for letter in letters}
    batch = next(letter for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if letter not in used)
    operands = tuple(
        letters if axis is None else letters[:axis] + batch + letters[axis:]
        for letters, axis in zip(split.operands, axes, strict=True)
    )
    results = tuple(batch + letters for letters in split.results)
    local = lambda shard: jax.vmap(split.local(shard), tuple(axes))
    return FlatSplit(operands, results, split.cut + batch, local)


def mesh_axes(
    mesh: Any, letters_cut: str, arrays: Iterable[tuple[str, Sequence[int], Iterable[Any]]]
) -> dict[str, MeshAxes]:
    """Returns the mesh axes that each letter is cut over.

    `arrays` has each array's letters, shape and spec. For each letter the first array that has it
    decides, and no mesh axis is used twice. A letter stays whole if its size is no multiple of the
    number of parts, because XLA would pad the last part.
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


def partition_spec(letters: str, axes: Mapping[str, MeshAxes]) -> PartitionSpec:
    return PartitionSpec(*(axes.get(letter) for letter in letters))
