"""Shards ops under plain `jit`, by `custom_partitioning`, once XLA has chosen the shardings."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from triax.compat import jax_private
from triax.sharding.primitives import primitive
from triax.sharding.splits import FlatSplit, Function, Shard, mesh_axes, partition_spec


def partitioned(split: FlatSplit, function: Function, board: Any = None) -> Function:
    """Returns `function`, a function of flat arrays that XLA shards over devices as `split` allows.

    `board` is the switchboard for host callbacks inside the shards.
    """

    def run(*operands: Any) -> Any:
        jaxpr = jax.make_jaxpr(function)(*operands)
        constants = jaxpr.consts  # custom_partitioning refuses closed-over arrays
        extended = split._replace(
            operands=(*split.operands, *("_" * jnp.ndim(value) for value in constants)),
            local=lambda shard: lambda *both: split.local(shard)(*both[: len(operands)]),
        )

        def whole(*both: Any) -> tuple[Any, ...]:
            closed = ClosedJaxpr(jaxpr.jaxpr, both[len(operands) :])
            return tuple(jaxpr_as_fun(closed)(*both[: len(operands)]))

        shapes = [jnp.shape(array) for array in (*operands, *constants)]
        rule = _shardy_rule(extended, shapes, [aval.shape for aval in jaxpr.out_avals])
        return _partitioned(extended, whole, rule, board)(*operands, *constants)

    return run


def _partitioned(
    split: FlatSplit, function: Function, rule: SdyShardingRule, board: Any
) -> Function:
    run = custom_partitioning(function)

    def named(mesh: Any, axes: Any, strings: tuple[str, ...]) -> tuple[NamedSharding, ...]:
        return tuple(NamedSharding(mesh, partition_spec(dims, axes)) for dims in strings)

    def axes_of(mesh: Any, strings: tuple[str, ...], arrays: Any) -> Any:
        pairs = zip(strings, arrays, strict=True)
        specs = ((s, a.shape, jax_private.spec_of(a, mesh)) for s, a in pairs)
        return mesh_axes(mesh, split.shardable, specs, split.pieces)

    def infer(mesh: Any, operands: Any, _: Any) -> Any:
        return named(mesh, axes_of(mesh, split.operands, operands), split.results)

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        axes = axes_of(mesh, split.results + split.operands, (*results, *operands))
        run_shard = split.local(Shard(axes))
        local: Function = lambda *operands: tuple(run_shard(*operands))
        if board is not None:
            local = functools.partial(_with_callbacks, local, board)
        return mesh, local, named(mesh, axes, split.results), named(mesh, axes, split.operands)

    # JAX fails to decode a sharding where XLA shards over a part of a mesh axis.
    run.def_partition(
        partition,
        infer_sharding_from_operands=infer,
        sharding_rule=rule,
        decode_shardings=False,
    )
    return run


@dataclasses.dataclass(frozen=True, eq=False)
class _Local:
    """Parameter of `_local_p`: what a device runs, and the switchboard for its callbacks."""

    function: Function
    types: tuple[Any, ...]
    board: Any


def _with_callbacks(function: Function, board: Any, *operands: Any) -> tuple[Any, ...]:
    jaxpr = jax.make_jaxpr(function)(*operands)
    types = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in jaxpr.out_avals)
    return tuple(_local_p.bind(*operands, call=_Local(jaxpr_as_fun(jaxpr), types, board)))


_local_p = primitive("triax_local")
mlir.register_lowering(
    _local_p,
    lambda ctx, *operands, call: mlir.lower_fun(call.function, multiple_results=True)(
        jax_private.with_switchboard(ctx, call.board), *operands
    ),
)


def _shardy_rule(
    split: FlatSplit, operand_shapes: Sequence[Any], result_shapes: Sequence[Any]
) -> SdyShardingRule:
    """Returns the split as a Shardy rule.

    A dimension that stays whole is a factor of its own. A dimension that may only be sharded into
    `split.pieces` is two factors: the pieces, and what a piece has, which stays whole.
    """
    whole: list[str] = []
    sizes: dict[str, int] = {}
    inferred: set[str] = set()

    def stays_whole() -> str:
        whole.append(f"whole{len(whole)}")
        return whole[-1]

    def names(dims: str, shape: Sequence[int]) -> ArrayMapping:
        named: list[str | CompoundFactor] = []
        for dim, size in zip(dims, shape, strict=True):
            pieces = split.pieces.get(dim, size)
            if dim not in split.shardable:
                named.append(stays_whole())
            elif pieces == size:
                named.append(dim)
                inferred.add(dim)
            else:
                named.append(CompoundFactor(dim, stays_whole()))
                sizes.update({dim: pieces, whole[-1]: size // pieces})
        return ArrayMapping(*named)

    operands = tuple(map(names, split.operands, operand_shapes))
    results = tuple(map(names, split.results, result_shapes))
    summed = {*split.shardable} - {*"".join(split.results)}
    # Shardy wants summed dimensions in the order in which they appear in the operands.
    appearing = dict.fromkeys(dim for dim in "".join(split.operands) if dim in summed)
    # JAX infers the sizes of factors that are whole dimensions.
    stated: Any = {name: size for name, size in sizes.items() if name not in inferred}
    return SdyShardingRule(
        operands,
        results,
        reduction_factors=tuple(appearing),
        need_replication_factors=tuple(whole),
        **stated,
    )


def left_whole(function: Function) -> Function:
    """Returns `function`, with its arrays kept whole on automatic axes inside a `shard_map`.

    If XLA shards plain JAX over these axes, it may abort the process (in JAX 0.10, at a gather).
    """

    def run(*operands: Any) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        if not {AxisType.Manual, AxisType.Auto} <= {*mesh.axis_types}:
            return function(*operands)
        whole = NamedSharding(mesh, PartitionSpec())
        constrain = lambda array: jax.lax.with_sharding_constraint(array, whole)
        return jax.tree.map(constrain, function(*jax.tree.map(constrain, operands)))

    return run
